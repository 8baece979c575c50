"""Health checks of a container's nodes, asked over abstract Unix sockets, so without files and without Redis."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.gpu_node.settings import MAX_REPLICAS, replica_name

log = logging.getLogger(__package__)


MAX_HEARTBEAT_AGE_S = 60.0
"""A node is healthy while its last heartbeat is younger. A turn of the heartbeat waits for Redis for less than that."""
ANSWER_TIMEOUT_S = 5.0
MAX_NODES = 64
"""Nodes of one name in one container that can be distinguished."""
_MAX_ANSWER_BYTES = 65536
_SOCKETS = Path("/proc/net/unix")
_PROCESSES = "/proc/self/ns/pid"

State = dict[str, Any]


@asynccontextmanager
async def answering(name: str, state: Callable[[], State]) -> AsyncIterator[None]:
    """Answer health checks for nodes of this name with `state`. An answer shows that the event loop is running."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(state()).encode())
        writer.close()

    listener = _listener(name)
    if listener is None:
        log.info("health checks cannot reach this node", extra={"name_asked_for": name})
        yield
        return
    async with await asyncio.start_unix_server(answer, sock=listener):
        yield


def states_of(name: str) -> list[State]:
    """Return the states of this container's nodes of this name and of its replicas, as far as they answer."""
    found = _SOCKETS.read_text().split() if _SOCKETS.exists() else ()
    names = [name, *(replica_name(name, number) for number in range(MAX_REPLICAS))]
    prefixes = tuple(f"@{_prefix(one)}" for one in names)
    addresses = sorted({word for word in found if word.startswith(prefixes)})
    return [state for address in addresses if (state := _asked(address)) is not None]


def _prefix(name: str) -> str:
    """Return the addresses' prefix. It depends on the PID namespace, since containers may share a network."""
    try:
        processes = str(os.stat(_PROCESSES).st_ino)
    except OSError:
        processes = ""
    digest = hashlib.blake2b(f"{processes}\0{name}".encode(), digest_size=12).hexdigest()
    return f"penstock-alive-{digest}-"


def _listener(name: str) -> socket.socket | None:
    for number in range(MAX_NODES):
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{_prefix(name)}{number}")
        except OSError:
            # Another node has this address, or the system has no abstract sockets.
            listener.close()
        else:
            return listener
    return None


def _asked(address: str) -> State | None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(f"\0{address[1:]}")
            answer = b"".join(iter(lambda: connection.recv(_MAX_ANSWER_BYTES), b""))
            state = json.loads(answer)
        except (OSError, ValueError):
            return None
    return state if isinstance(state, dict) else None
