"""The process that parses large bodies, and large messages of WebSockets.

Its command is `python -m penstock.gateway.request.parser_process UNKNOWN_FIELDS`. The argument is the gateway's setting
`unknown_fields`.

Parsing holds Python's global interpreter lock, so a thread would still block the gateway's event loop. This process
reads bodies one by one from a socket, its stdin, and ends with the gateway. Its memory is limited: a body that needs
more kills it, and the gateway starts another one.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator

from penstock.contract.errors import InvariantError, PenstockError, RequestError, TooLargeError
from penstock.gateway.request.parsed_body import BODIES, encode_parsed_body, encode_refusal, parse, with_packed_prompts
from penstock.gateway.request.socket_message import FORM, SocketMessage, encode_socket_message, parse_socket_message
from penstock.queue.msgpack_codec import MAX_BYTES
from penstock.runtime.process_memory import keep_large_blocks_apart

HEAD = struct.Struct(">BI")
"""Header of a message on the socket. Body: the index of its form in FORMS, then its length in bytes.
Answer: 0, then its length in bytes."""
FORMS = (*BODIES, FORM)
MAX_PARSED_BYTES = 128 << 20
"""Limit in bytes on the memory of a body's parsed values, estimated with the values below."""
BYTES_PER_VALUE = 72
BYTES_PER_TEXT = 160
BYTES_PER_CONTAINER = 400
"""A container is an object or a list."""
MAX_GROWTH_BYTES = 192 << 20
"""Bytes of data memory that this process may allocate after its start. A body that needs more kills the process."""
_WINDOW_BYTES = 256 << 10


def main() -> None:
    """Answer bodies until the gateway closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the gateway, which ends this process.
    os.nice(10)  # Large bodies must not take the cores from token streams.
    gc.disable()  # A parsed body is a tree without cycles, so a collection would scan millions of values for nothing.
    gc.freeze()
    keep_large_blocks_apart()
    _limit_memory()
    with socket.socket(fileno=sys.stdin.fileno()) as line:
        while (head := _receive(line, HEAD.size)) is not None:
            form, num_bytes = HEAD.unpack(head)
            raw = _receive(line, num_bytes)
            if raw is None:
                return
            answer = answer_to(FORMS[form], bytes(raw), ignores_unknown=sys.argv[1] == "ignore")
            line.sendall(HEAD.pack(0, len(answer)) + answer)
            del raw, answer
            gc.collect()


def answer_to(form: str, raw: bytes, *, ignores_unknown: bool = False) -> bytes:
    """Parse a body or, if `form` is that of a message, a message. Return the encoded result or the encoded refusal."""
    try:
        check_structure(raw)
        encoded = _encoded(form, raw, ignores_unknown=ignores_unknown)
        if len(encoded) > MAX_BYTES:
            # A body whose input is also stored, as a response's is, takes up to twice its bytes.
            raise TooLargeError(f"the checked body has more than {MAX_BYTES} bytes", code="body_too_large")
        return encoded
    except PenstockError as error:
        return _encoded_refusal(form, error)
    except (MemoryError, RecursionError):
        return _encoded_refusal(form, RequestError("the body is too complex to parse", code="body_too_complex"))
    except Exception as error:
        # A bug refuses one body. If it ended this process, the bodies of all other tenants would wait for a new one.
        return _encoded_refusal(form, InvariantError(f"a body was not parsed: {_place_of(error)}"))


def _place_of(error: Exception) -> str:
    """Return an error's type and place. Its text is left out, because it may quote the body."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.name}, {os.path.basename(frame.filename)}:{frame.lineno}"


def _encoded(form: str, raw: bytes, *, ignores_unknown: bool) -> bytes:
    if form == FORM:
        return encode_socket_message(parse_socket_message(raw, ignores_unknown=ignores_unknown, packs=True))
    return encode_parsed_body(with_packed_prompts(parse(form, raw, ignores_unknown=ignores_unknown)))


def _encoded_refusal(form: str, error: PenstockError) -> bytes:
    return encode_socket_message(SocketMessage(error=error)) if form == FORM else encode_refusal(error)


def check_structure(raw: bytes) -> None:
    """Raise TooLargeError if the parsed values of a body would take more than MAX_PARSED_BYTES.

    The first estimate counts every comma and bracket. Only if it exceeds the limit, a second estimate leaves out the
    characters inside strings.
    """
    if parsed_bytes(raw) > MAX_PARSED_BYTES and sum(map(parsed_bytes, _without_texts(raw))) > MAX_PARSED_BYTES:
        message = f"the parsed values of the body take more than {MAX_PARSED_BYTES >> 20} MiB"
        raise TooLargeError(message, code="body_too_complex")


def parsed_bytes(text: bytes) -> int:
    """Return an upper estimate, in bytes, of the memory of the values that begin in this part of a body."""
    containers = text.count(b"{") + text.count(b"[")
    return (
        text.count(b",") * BYTES_PER_VALUE + text.count(b'"') // 2 * BYTES_PER_TEXT + containers * BYTES_PER_CONTAINER
    )


def _without_texts(raw: bytes) -> Iterator[bytes]:
    """Yield a body in parts, without the characters between its quotes."""
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    is_inside = False
    for at in range(0, len(plain), _WINDOW_BYTES):
        parts = plain[at : at + _WINDOW_BYTES].split(b'"')
        yield b'""'.join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _limit_memory() -> None:
    """Limit this process's data memory to its present size plus MAX_GROWTH_BYTES."""
    with open("/proc/self/statm") as statm:
        num_pages = int(statm.read().split()[5])
    limit = num_pages * os.sysconf("SC_PAGESIZE") + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _receive(line: socket.socket, num_bytes: int) -> bytearray | None:
    """Receive exactly `num_bytes` bytes, or return None if the gateway closed the socket."""
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        num_received = line.recv_into(view[at:])
        if not num_received:
            return None
        at += num_received
    return data


if __name__ == "__main__":
    main()
