"""Whether the nodes of this container live: they are asked over a Unix socket without a file, and without Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
MAX_NODES = 64
"""Nodes of one name in one container that can be told apart."""
_MAX_ANSWER_BYTES = 65536
_SOCKETS = Path("/proc/net/unix")
_PROCESSES = "/proc/self/ns/pid"

State = dict[str, Any]


@asynccontextmanager
async def answering(name: str, state: Callable[[], State]) -> AsyncIterator[None]:
    """Gives `state` to health checks that ask for nodes of this name. An answer shows that the event loop turns."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(state()).encode())
        writer.close()

    listener = _listener(name)
    if listener is None:
        _LOG.info("health checks cannot ask this node", extra={"name_asked_for": name})
        yield
        return
    async with await asyncio.start_unix_server(answer, sock=listener):
        yield


def states_of(name: str) -> list[State]:
    """What the nodes of this name in this container say, those that answer."""
    found = _SOCKETS.read_text().split() if _SOCKETS.exists() else ()
    addresses = sorted({word for word in found if word.startswith(f"@{_prefix(name)}")})
    return [state for address in addresses if (state := _asked(address)) is not None]


def _prefix(name: str) -> str:
    """Of the addresses of the nodes of a name. Containers may share a network, but hardly ever processes."""
    try:
        processes = str(os.stat(_PROCESSES).st_ino)
    except OSError:
        processes = ""
    digest = hashlib.blake2b(f"{processes}\0{name}".encode(), digest_size=12).hexdigest()
    return f"penstock-alive-{digest}-"


def _listener(name: str) -> socket.socket | None:
    for address in _addresses(name):
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(address)
        except OSError:
            # Another node's, or this system has no such addresses.
            listener.close()
        else:
            return listener
    return None


def _addresses(name: str) -> Iterator[str]:
    return (f"\0{_prefix(name)}{number}" for number in range(MAX_NODES))


def _asked(address: str) -> State | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(f"\0{address[1:]}")
            said = b"".join(iter(lambda: connection.recv(_MAX_ANSWER_BYTES), b""))
            state = json.loads(said)
        except (OSError, ValueError):
            return None
    return state if isinstance(state, dict) else None
