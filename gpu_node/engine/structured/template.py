"""The process that loads the tokenizer and forks grammar workers, so that a new worker is ready within milliseconds.

    python -P -m penstock.gpu_node.engine.structured.template FD

FD is a socket to the node. The first message brings the tokenizer. A later message asks to fork a worker, to kill one,
or for a worker's exit status. A fork message carries the worker's socket and shared page as file descriptors. The
process ends when the node closes its end of the socket, and its workers end with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgpack
from llguidance import LLTokenizer

from penstock.gpu_node.engine.structured.protocol import frame
from penstock.gpu_node.engine.structured.worker import WorkerLimits, serve

_LETTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    "[a-z ]{1,14}",
    "[A-Za-z ]{1,14}",
    _LETTER + "{1,10}",
    _LETTER + "{1,14}",
    _LETTER + "{1,30}",
    _LETTER + "+",
)
"""Sets of tokens that a mask allows at once where any of their text may follow; it tries the others one by one.

llguidance's own sets lack the three of 14 letters. Few tokens are longer. So masks take half the time while 14 to 29
letters are left of a text of limited length, and a tenth within patterns such as `[a-z ]{1,400}`. The masks are the
same.
"""
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "500"
"""If memory runs out, the system should kill a grammar process rather than the node."""


def _receive(node: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the next message with its file descriptors; None once the node has closed the socket."""
    head, fds, _, _ = socket.recv_fds(node, 4, 2)
    while head and len(head) < 4:
        head += node.recv(4 - len(head))
    if not head:
        return None
    body = bytearray()
    size = int.from_bytes(head, "little")
    while len(body) < size:
        part = node.recv(min(1 << 20, size - len(body)))
        if not part:
            return None
        body += part
    return msgpack.unpackb(bytes(body), strict_map_key=False), list(fds)


def _load(node: socket.socket) -> tuple[LLTokenizer, list[int]] | None:
    """Return the tokenizer and its special tokens, or None if there is none to use."""
    received = _receive(node)
    if received is None:
        return None
    text, vocab_size, eos_token_ids = received[0]
    try:
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids, slices=[*SLICES])
    except Exception as error:
        # An untrusted tokenizer file in a foreign parser may raise anything.
        node.sendall(frame(["failed", str(error)[:500], []]))
        return None
    special = [token_id for token_id in range(vocab_size) if tokenizer.is_special_token(token_id)]
    node.sendall(frame(["ready", "", special]))
    return tokenizer, special


def _fork(tokenizer: LLTokenizer, special: list[int], node: socket.socket, limits: list[Any], fds: list[int]) -> int:
    template = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        node.close()
        if os.getppid() == template:
            serve(tokenizer, special, fds[0], fds[1], WorkerLimits(*limits))
        status = 0
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        status = 0
    finally:
        os._exit(status)


def _run(node: socket.socket) -> None:
    loaded = _load(node)
    if loaded is None:
        return
    gc.collect()
    gc.freeze()
    pids: dict[int, int] = {}
    while (received := _receive(node)) is not None:
        (action, worker_id, limits), fds = received
        if action == "fork":
            pids[worker_id] = _fork(*loaded, node, limits, fds)
        elif action == "kill" and worker_id in pids:
            # The pid cannot be reused before this process has waited for it.
            os.kill(pids[worker_id], signal.SIGKILL)
        elif action == "wait" and worker_id in pids:
            status = os.waitstatus_to_exitcode(os.waitpid(pids.pop(worker_id), 0)[1])
            node.sendall(frame(["ended", worker_id, status]))


def main() -> None:
    """Serve until the node closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's Ctrl-C is for the node. Its end ends this process.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(_OOM_SCORE)
    with socket.socket(fileno=int(sys.argv[1])) as node:
        _run(node)


if __name__ == "__main__":
    main()
