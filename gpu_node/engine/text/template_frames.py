"""Messages between the node and the processes of its chat template: a letter, the length in four bytes, the body."""

from __future__ import annotations

import socket

RENDERED, RAISED, COSTLY = "R", "E", "C"
"""Kinds of an answer: the text, the template's own error, the limit that the render exceeded."""
CHAT, WORKER = "M", "W"
"""Kinds of a message to the processes: a template or a chat as JSON, the socket of a new worker."""
_HEAD_BYTES = 5
_PART_BYTES = 1 << 20


def send(peer: socket.socket, kind: str, body: bytes, fds: tuple[int, ...] = ()) -> None:
    """Send a message. Raises OSError."""
    head = kind.encode() + len(body).to_bytes(4, "little")
    if fds:
        socket.send_fds(peer, [head], list(fds))
    else:
        peer.sendall(head + body)


def receive(peer: socket.socket) -> tuple[bytes, list[int], str] | None:
    """Return the next message's body, file descriptors and kind; None once the peer has closed the socket."""
    head, fds, _, _ = socket.recv_fds(peer, _HEAD_BYTES, 1)
    while head and len(head) < _HEAD_BYTES:
        more = peer.recv(_HEAD_BYTES - len(head))
        head = head + more if more else b""
    if not head:
        return None
    size = int.from_bytes(head[1:], "little")
    body = bytearray()
    while len(body) < size:
        part = peer.recv(min(_PART_BYTES, size - len(body)))
        if not part:
            return None
        body += part
    return bytes(body), list(fds), head[:1].decode("latin-1")
