"""Seats of a host: each is held by one process at a time, and the kernel frees it when that process ends.

The process that gets a seat therefore knows that the one which held it before is dead. Its pool need not wait for a
lease. Two kinds of seats survive a restart, each in other surroundings:

- A locked file in the cache folder: on a machine, and in a container whose cache folder is a volume.
- A Unix socket in the abstract namespace: on a machine, and in a pod, whose containers keep their network namespace.

The name of a seat stands for the kernel's boot id and for the file or the network namespace. So two hosts never have
the same seat, also where they share the cache folder over a network whose locks reach only one of them. A living node's
seat is never free: a second node of the same name takes the next number.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.gpu_node.settings import NodeSettings
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import NodeBroker
from penstock.runtime.cache_folders import cache_folder

_LOG = logging.getLogger(__name__)

MAX_NODES = 64
"""Nodes of one name in one pool that a host can tell apart."""
LOOK_PATIENCE_S = 60.0
_PAUSE_S = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats that this process holds until it ends."""

    names: tuple[str, ...] = ()
    _held: tuple[int, ...] = ()
    """Descriptors. They stay open until the process ends, whatever becomes of this record."""

    def release(self) -> None:
        """Frees the seats before the process ends."""
        for held in self._held:
            os.close(held)


NO_SEATS = Seats()


def take_seats(settings: NodeSettings) -> Seats:
    """A seat of each kind, as far as this host has them."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        return Seats()
    # The same node after a restart: its name, for its pool of its Redis.
    node = _digest(settings.name, settings.pool_name, settings.redis_url)
    taken = [seat for seat in (_file_seat(node, boot_id), _socket_seat(node, boot_id)) if seat is not None]
    return Seats(tuple(name for name, _ in taken), tuple(held for _, held in taken))


async def declare_dead(broker: NodeBroker, seats: Seats, *, has_joined: bool = False) -> None:
    """Returns when no predecessor is left in the pool. It waits until each has been silent for longer than a beat."""
    deadline_s = asyncio.get_running_loop().time() + LOOK_PATIENCE_S
    while seats.names and asyncio.get_running_loop().time() < deadline_s:
        try:
            left = await broker.succeed(seats.names, has_joined=has_joined)
            if not left.num_left:
                return
            await broker.sweep()
            await asyncio.sleep(max(left.wait_ms / 1000, _PAUSE_S))
        except UnavailableError:
            await asyncio.sleep(_PAUSE_S)


async def declare_dead_before_loading(settings: NodeSettings, seats: Seats) -> None:
    """The same as long as the model is being loaded: other nodes need not wait for that."""
    try:
        async with connect(settings.redis_url) as redis:
            await declare_dead(NodeBroker(redis, settings.pool_name, "", ""), seats)
    except PenstockError as error:
        # It is raised again, and then seen, when the node joins.
        _LOG.info("predecessors are looked for later", extra={"reason": error.message})


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
            # Another process lives there, or this system has no such names.
            holder.close()
        else:
            where = (boot_id, str(network.st_dev), str(network.st_ino))
            return _digest("net", *where, node, str(number)), holder.detach()
    return None


def _file_seat(node: str, boot_id: str) -> tuple[str, int] | None:
    folder = cache_folder() / "seats"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in _candidates(folder, node):
            if (file := _locked(path)) is not None:
                return _name_in(file, boot_id), file
    except OSError as error:
        _LOG.info("no seat in the cache folder", extra={"folder": str(folder), "reason": str(error)})
    return None


def _candidates(folder: Path, node: str) -> Iterator[Path]:
    return (folder / f"{node}-{number}" for number in range(MAX_NODES))


def _locked(path: Path) -> int | None:
    """The open file, locked until this process ends; None while another one holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the opening and the lock the file may have been removed, and another node may have made a new one.
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None


def _name_in(file: int, boot_id: str) -> str:
    """The seat's name, which the file keeps as long as this kernel runs."""
    known = os.pread(file, 200, 0).decode(errors="replace").split()
    if len(known) == 2 and known[0] == boot_id:
        return known[1]
    name = secrets.token_hex(12)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{boot_id} {name}\n".encode(), 0)
    return name
