"""The process that checks outputs of jobs against a JSON schema or a regular expression.

    python -P -m penstock.gpu_node.publishing.check_worker FD

FD is a socket to the node. A message is its length in four bytes and JSON; so is the answer. The kernel ends the
process if a check takes too much time, and its memory is limited. It ends when the node closes its end of the socket.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import socket
import sys
from typing import Any

from penstock.runtime.process_memory import limit_growth

CPU_S, WALL_S = 1.0, 20.0
"""The most time that the check of a job may take."""
MAX_GROWTH_BYTES = 512 << 20
"""Memory that the process may take beyond what it has at its start."""
ACCEPTED, REJECTED, INVALID, COSTLY = "accepted", "rejected", "invalid", "costly"
_MAX_PATH_CHARS = 200
_HEAD_BYTES = 4


def read(peer: socket.socket) -> bytes | None:
    """Return the next message; None once the peer has closed the socket."""
    head = _exactly(peer, _HEAD_BYTES)
    return None if head is None else _exactly(peer, int.from_bytes(head, "little"))


def write(peer: socket.socket, body: bytes) -> None:
    """Send a message. Raises OSError."""
    peer.sendall(len(body).to_bytes(_HEAD_BYTES, "little") + body)


def _exactly(peer: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(1 << 20, size - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)


def verdict_of(check: dict[str, Any], texts: list[str]) -> tuple[str, str]:
    """Return whether all texts match, and why not. The reason names places and keywords, never what a text says."""
    try:
        if (pattern := check.get("regex")) is not None:
            wrong = next((at for at, text in enumerate(texts) if re.fullmatch(pattern, text) is None), None)
            return (ACCEPTED, "") if wrong is None else (REJECTED, f"choice {wrong} does not match the expression")
        return _verdict_of_schema(json.loads(check["json_schema"]), texts)
    except (MemoryError, RecursionError) as error:
        return COSTLY, f"the check ended with {type(error).__name__}"
    except re.error as error:
        return INVALID, f"no regular expression: {error}"


def _verdict_of_schema(schema: Any, texts: list[str]) -> tuple[str, str]:
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return INVALID, f"no JSON schema: {error.json_path[:_MAX_PATH_CHARS]} has a wrong {error.validator}"
    # Without a registry of its own it would fetch what a $ref names.
    validator = Draft202012Validator(schema, registry=Registry())
    for at, text in enumerate(texts):
        try:
            value = json.loads(text)
        except ValueError:
            return REJECTED, f"choice {at} is no JSON"
        try:
            problem = next(validator.iter_errors(value), None)
        except Unresolvable as error:
            return INVALID, f"no JSON schema: the reference {error.ref[:_MAX_PATH_CHARS]!r} leads nowhere"
        if problem is not None:
            path = problem.json_path[:_MAX_PATH_CHARS]
            return REJECTED, f"choice {at} does not match the schema at {path}: {problem.validator}"
    return ACCEPTED, ""


def _limit_time(cpu_s: float, wall_s: float) -> None:
    """Let the kernel end this process after so much time; 0 takes the limit away."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def main() -> None:
    """Serve until the node closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's Ctrl-C is for the node. Its end ends this process.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import jsonschema  # noqa: F401  # Before the limits: its import takes longer than a check.

    limit_growth(MAX_GROWTH_BYTES)
    with socket.socket(fileno=int(sys.argv[1])) as node:
        while (message := read(node)) is not None:
            asked = json.loads(message)
            _limit_time(CPU_S, WALL_S)
            kind, reason = verdict_of(asked["check"], asked["texts"])
            _limit_time(0, 0)
            write(node, json.dumps([kind, reason]).encode())


if __name__ == "__main__":
    main()
