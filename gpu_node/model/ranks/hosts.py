"""Ranks on other hosts: rank 0 listens for them, and what it writes into its group's memory is copied into theirs."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.protocol import RanksLostError
from penstock.gpu_node.model.ranks.connection import ConnectionLostError, FrameKind, RankConnection, admit
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.messages import Kind
from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange

log = logging.getLogger(__package__)

_LOOK_S = 0.25
_HELLO_PATIENCE_S = 2.0
"""How long a connection may take to prove that it is a rank. Others wait meanwhile."""
_BACKLOG = 64
_STATE = struct.Struct("<QqqqI")
"""Meetings, nanoseconds of waiting for stages and at exchanges, the last message done, and whether it waits."""
_ANY = ("0.0.0.0", "::", "")


def parse_address(given: str, setting: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT. Raises ConfigError."""
    host, separator, port = given.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{setting} {given!r} must be HOST:PORT, with a port from 1 to 65535", param=setting)
    return host.strip("[]"), int(port)


def own_address(host: str, setting: str) -> str:
    """Return the address of this host that a name or an address stands for. Raises ConfigError for all of them."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"{setting}: {host} is no address: {error.strerror}", param=setting) from error
    if host in _ANY or not found.isdisjoint(_ANY):
        problem = "would listen at all interfaces; name the address of the network that the ranks share"
        raise ConfigError(f"{setting}: {host} {problem}", param=setting)
    return sorted(found)[0]


_PROBLEMS = {errno.EADDRINUSE: "the port is in use", errno.EADDRNOTAVAIL: "no interface of this host has the address"}


class RankListener:
    """Listens at one address, as long as rank 0 lives. A rank that was lost joins again."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        """Raises ConfigError if the port is in use, or the address is not this host's."""
        self.address = address
        self._secret = secret
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address, port))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            why = _PROBLEMS.get(error.errno or 0, str(error.strerror))
            raise ConfigError(f"rank_address {address}:{port}: {why}", param="rank_address") from error
        self.port = int(self._socket.getsockname()[1])

    def accept(self, ranks: Sequence[int], patience_s: float) -> list[RankConnection]:
        """Wait until so many ranks have joined. Raises ConfigError that names those that have not."""
        joined: list[RankConnection] = []
        ends_s = time.monotonic() + patience_s
        while len(joined) < len(ranks):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                late = ", ".join(map(str, ranks[len(joined) :]))
                for connection in joined:
                    connection.close()
                raise ConfigError(f"rank {late} has not joined at {self.address}:{self.port} within {patience_s:g} s")
            readable, _, _ = select.select([self._socket, *(one.stream for one in joined)], [], [], left_s)
            # A rank that has joined says nothing before it gets a config. So its end is all that can be read.
            for gone in [one for one in joined if one.stream in readable]:
                gone.close()
                joined.remove(gone)
            if self._socket in readable and (admitted := self._admitted()) is not None:
                log.info("a rank has joined", extra={"address": admitted.other_address})
                joined.append(admitted)
        return joined

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    def _admitted(self) -> RankConnection | None:
        connection = RankConnection(self._socket.accept()[0])
        try:
            admit(connection, self._secret, _HELLO_PATIENCE_S)
        except (ConnectionLostError, ConfigError) as error:
            log.warning("a rank was refused", extra={"reason": str(error)})
            connection.close()
            return None
        return connection


class RemoteRank:
    """A rank on another host, as rank 0 sees it: a `RankHandle`."""

    def __init__(self, connection: RankConnection, rank: int, memory: GroupMemory, config: Mapping[str, Any]) -> None:
        """Send the rank what it computes. Raises OSError."""
        self._connection = connection
        self._rank = rank
        self._memory = memory
        self._state = memory.state.ranks[rank]
        self._reports, self._report = os.pipe()
        with suppress(ConnectionLostError):  # The reader notices, and closes the pipe.
            connection.send(FrameKind.CONFIG, json.dumps(config).encode())
        self._reader = threading.Thread(target=self._read, name=f"penstock-rank-{rank}", daemon=True)
        self._reader.start()

    def fileno(self) -> int:
        """The descriptor of its reports. Its end means that the connection has ended."""
        return self._reports

    def is_stopped(self) -> bool:
        """No: this host cannot see it."""
        return False

    def send_message(self, number: int) -> None:
        """Send the message that was written last. Raises RanksLostError if the connection has ended."""
        messages = self._memory.messages
        content = messages.view(np.uint8, 0, messages.num_written).tobytes()
        try:
            self._connection.send(FrameKind.MESSAGE, bytes([self._memory.kind]) + content, number)
        except ConnectionLostError as error:
            raise RanksLostError(f"rank {self._rank} cannot be reached: {error}") from error

    def kill(self) -> None:
        """End the connection: the rank then ends itself."""
        self._connection.close()

    def close(self) -> None:
        """Wait for the thread that reads."""
        self.kill()
        self._reader.join()
        os.close(self._reports)

    def _read(self) -> None:
        """Read frames, and pass on that rank 0 lives, until the connection ends."""
        life = 0
        try:
            while True:
                if self._memory.life != life:
                    life = self._memory.life
                    self._connection.send(FrameKind.LIFE)
                readable, _, _ = select.select([self._connection.stream], [], [], _LOOK_S)
                if readable:
                    self._take(*self._connection.receive()[:2])
        except (ConnectionLostError, OSError, ValueError, struct.error) as error:
            log.info("the connection to a rank has ended", extra={"rank": self._rank, "reason": str(error)})
        finally:
            os.close(self._report)

    def _take(self, frame: FrameKind, content: bytes) -> None:
        if frame is FrameKind.REPORT:
            os.write(self._report, content + b"\n")
        elif frame is FrameKind.STATE:
            state = self._state
            state.meetings, state.waited_ns, state.exchanged_ns, done, state.is_waiting = _STATE.unpack(content)
            self._memory.done[self._rank] = done
            self._memory.pulses[self._rank] += 1


class CopiedMemory:
    """The memory of a rank on another host, which a thread fills with what rank 0 sends."""

    def __init__(self, connection: RankConnection, rank: int, end: Callable[[], None]) -> None:
        """end: called on that thread when the connection ends."""
        self._connection = connection
        self._rank = rank
        self._end = end
        self.memory = GroupMemory.create()
        self.exchange = PlainExchange(self.memory, rank, readers=(rank,))
        self._reading = threading.Thread(target=self._read, name="penstock-copies", daemon=True)

    def start(self) -> None:
        """Start to copy."""
        self._reading.start()

    def report(self, event: Mapping[str, Any]) -> None:
        """Report to rank 0."""
        with suppress(ConnectionLostError):  # The thread that reads notices.
            self._connection.send(FrameKind.REPORT, json.dumps(event).encode())

    def _read(self) -> None:
        shown_s = 0.0
        try:
            while True:
                if time.monotonic() - shown_s >= _LOOK_S:
                    shown_s = time.monotonic()
                    self._show()
                readable, _, _ = select.select([self._connection.stream], [], [], _LOOK_S)
                if readable:
                    self._take(*self._connection.receive())
        except (ConnectionLostError, RanksLostError, OSError, ValueError, MemoryError) as error:
            log.warning("the connection to rank 0 has ended", extra={"reason": str(error)})
        self.exchange.abort()
        self._end()

    def _take(self, frame: FrameKind, content: bytes, number: int) -> None:
        if frame is FrameKind.LIFE:
            self.memory.show_life()
        elif frame is FrameKind.MESSAGE:
            self.exchange.await_done()
            messages = self.memory.messages
            messages.grow(len(content) - 1)
            messages.view(np.uint8, 0, len(content) - 1)[:] = np.frombuffer(content, np.uint8)[1:]
            self.memory.note_message(Kind(content[0]))
            self.exchange.hand_out(number)

    def _show(self) -> None:
        state = self.exchange.state_of(self._rank)
        done = int(self.memory.done[self._rank])
        times = state.waited_ns, state.exchanged_ns
        self._connection.send(FrameKind.STATE, _STATE.pack(state.meetings, *times, done, state.is_waiting))
