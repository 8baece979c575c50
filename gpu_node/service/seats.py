"""Seats of a host: one process at a time holds a seat, and the kernel frees it when that process ends.

A process that gets a seat therefore knows that the seat's previous holder is dead. Its pool need not wait for a lease
to expire. Two kinds of seats survive a restart, each in other environments:

- A locked file in the cache folder: on a machine, and in a container whose cache folder is a volume.
- A Unix socket in the abstract namespace: on a machine, and in a pod, whose containers keep their network namespace.

A seat's name includes the kernel's boot id, and the file or the network namespace. So two hosts never share a seat,
even if they share the cache folder over a network whose locks reach only one of them. A living node's seat is never
free: a second node of the same name takes the next number.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.gpu_node.settings import NodeSettings
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import NodeBroker
from penstock.runtime.cache_folders import UNTRUSTED, cache_folder, trusted_cache
from penstock.runtime.trusted_folders import UntrustedError, open_own

log = logging.getLogger(__package__)


MAX_NODES = 64
"""Nodes of one name in one pool that a host can distinguish."""
LOOK_PATIENCE_S = 60.0
"""How long predecessors are looked for after a start."""
_PAUSE_S = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats that this process holds until it ends."""

    names: tuple[str, ...] = ()
    _held: tuple[int, ...] = ()
    """File descriptors. They stay open until the process ends, even if this record is freed."""

    def release(self) -> None:
        """Free the seats before the process ends."""
        for held in self._held:
            os.close(held)


NO_SEATS = Seats()


def take_seats(settings: NodeSettings) -> Seats:
    """Take a seat of each kind that this host supports."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        return Seats()
    # The identity of a node across restarts: its name, pool and Redis.
    node = _digest(settings.name, settings.pool_name, settings.redis_url)
    taken = [seat for seat in (_file_seat(node, boot_id), _socket_seat(node, boot_id)) if seat is not None]
    return Seats(tuple(name for name, _ in taken), tuple(held for _, held in taken))


async def declare_dead(broker: NodeBroker, seats: Seats, *, has_joined: bool = False) -> None:
    """Declare the previous holders of these seats dead. Return when none of them is left in the pool.

    A predecessor is declared dead once it has been silent for longer than the interval of its heartbeats. This call
    returns after LOOK_PATIENCE_S at the latest.
    """
    deadline_s = asyncio.get_running_loop().time() + LOOK_PATIENCE_S
    while seats.names and asyncio.get_running_loop().time() < deadline_s:
        try:
            left = await broker.declare_dead(seats.names, has_joined=has_joined)
            if not left.num_left:
                return
            await broker.sweep()
            await asyncio.sleep(max(left.wait_ms / 1000, _PAUSE_S))
        except UnavailableError:
            await asyncio.sleep(_PAUSE_S)


async def declare_dead_before_loading(settings: NodeSettings, seats: Seats) -> None:
    """Declare predecessors dead while the model loads, so that other nodes take over their jobs sooner."""
    try:
        async with connect(settings.redis_url) as redis:
            await declare_dead(NodeBroker(redis, settings.pool_name, "", ""), seats)
    except PenstockError as error:
        # Joining the pool raises the same error again, where it is reported.
        log.info("the search for predecessors is repeated later", extra={"reason": error.reason})


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _socket_seat(node: str, boot_id: str) -> tuple[str, int] | None:
    try:
        network = _NETWORK.stat()
    except OSError:
        return None
    for number in range(MAX_NODES):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0penstock-seat-{node}-{number}")
        except OSError:
            # Another process has this name, or the system has no abstract namespace.
            holder.close()
        else:
            where = (boot_id, str(network.st_dev), str(network.st_ino))
            return _digest("net", *where, node, str(number)), holder.detach()
    return None


def _file_seat(node: str, boot_id: str) -> tuple[str, int] | None:
    try:
        folder = trusted_cache("seats")
        for number in range(MAX_NODES):
            if (file := _locked(folder / f"{node}-{number}")) is not None:
                return _name_in(file, boot_id), file
    except UntrustedError as error:
        log.warning(UNTRUSTED, extra={"folder": str(cache_folder() / "seats"), "reason": str(error)})
    except OSError as error:
        facts = {"folder": str(cache_folder() / "seats"), "reason": str(error)}
        log.info("the node cannot take a seat in the cache folder", extra=facts)
    return None


def _locked(path: Path) -> int | None:
    """Return the open file, locked until this process ends; None if another process holds the lock."""
    file = open_own(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have removed the file before the lock, and a third may have created a new one.
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None


def _name_in(file: int, boot_id: str) -> str:
    """Return the seat's name. The file keeps it until the machine reboots."""
    known = os.pread(file, 200, 0).decode(errors="replace").split()
    if len(known) == 2 and known[0] == boot_id:
        return known[1]
    name = secrets.token_hex(12)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{boot_id} {name}\n".encode(), 0)
    return name
