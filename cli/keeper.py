"""The keeper of a gateway: it holds the listening sockets and the connections, so that both outlive the gateway.

When a gateway ends, its holder (`gateway/kept/holder.py`) sends the keeper each connection with an answer that can go
on elsewhere. The next gateway gets all of them, and goes on from the slots of the shared memory
(`gateway/kept/slots.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Self

from penstock.cli.keeper_upgrade import HandedKeeper, become
from penstock.cli.processes import ChildCommand
from penstock.contract.errors import ConfigError
from penstock.gateway.kept.slots import memory_bytes
from penstock.runtime.kept_sockets import (
    KEEP,
    LEAVE,
    LOADED,
    READY,
    START,
    TAKEN,
    Inherited,
    receive_message,
    send_message,
)

_log = logging.getLogger(__package__)

KEEP_S = 30.0
"""Seconds for which connections are kept without a gateway."""
MAX_SLOTS = 1 << 14
MIN_OTHER_FILES = 128
"""Descriptors that the keeper leaves for its children and for itself."""
BACKLOG = 2048
"""Connections that wait while no gateway accepts them, as many as a gateway of its own lets wait."""


def num_slots() -> int | None:
    """Return how many connections a keeper may hold by this process's limit of open files. None: no keeper here."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SOCK_SEQPACKET"):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_SLOTS if limit == resource.RLIM_INFINITY else max(0, min(MAX_SLOTS, limit - MIN_OTHER_FILES))


class ConnectionKeeper:
    """Holds what a gateway and its successors share."""

    def __init__(self, listeners: list[socket.socket], slots: int, num_slots: int) -> None:
        self._listeners = listeners
        self._slots = slots
        self._num_slots = num_slots
        self._kept: dict[int, int] = {}
        """Slot → descriptor of its connection, until a gateway has it."""
        self.is_leaving = False
        """Whether the gateway was asked to end, so that a new one takes over."""
        self.next_command: Sequence[str] = ()
        """The command of the keeper that replaces this one when the gateway has ended, or empty."""
        self.asked_to_leave = asyncio.Event()
        """Set when the gateway shall leave its connections to a successor."""
        self.next_has_loaded = asyncio.Event()
        """Set when the next gateway has loaded its modules."""
        self._control: socket.socket | None = None
        """To the gateway."""
        self._next: socket.socket | None = None
        """To the next gateway, which has not started."""
        self._theirs: socket.socket | None = None
        """The next gateway's end of it, until that process exists."""
        self._unsent: deque[tuple[bytes, int, int | None]] = deque()
        self._ended_ns = 0
        self._expiry: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self | None:
        """Listen on an address, or return None where connections cannot outlive a gateway.

        Raises ConfigError if the address is taken.
        """
        slots_here = num_slots()
        if not slots_here:
            return None
        try:
            # It resolves the host and sets the options of the sockets as the server of a gateway does.
            server = await asyncio.get_running_loop().create_server(
                asyncio.Protocol, host, port, start_serving=False, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(f"port {port} on {host}: {error.strerror}", param="port") from error
        listeners = [socket.socket(fileno=os.dup(one.fileno())) for one in server.sockets]
        server.close()
        for listener in listeners:
            listener.listen(BACKLOG)
        slots = os.memfd_create("penstock-slots")
        os.ftruncate(slots, memory_bytes(slots_here))
        return cls(listeners, slots, slots_here)

    @classmethod
    def take_over(cls, handed: HandedKeeper) -> Self:
        """Hold what another keeper has handed to this process."""
        keeper = cls([socket.socket(fileno=number) for number in handed.listeners], handed.slots, handed.num_slots)
        keeper._kept, keeper._ended_ns = dict(handed.kept), handed.ended_ns
        keeper._expiry = asyncio.get_running_loop().call_later(KEEP_S, keeper._drop_all)
        return keeper

    def hand_over(self) -> None:
        """Become the keeper of `next_command`. It returns only where that is not possible."""
        command, self.next_command = self.next_command, ()
        listeners = [listener.fileno() for listener in self._listeners]
        try:
            become(command, HandedKeeper(listeners, self._slots, self._num_slots, self._kept, self._ended_ns))
        except OSError as error:
            _log.error("the new release does not start, so this one goes on", extra={"reason": str(error)})

    @property
    def num_kept(self) -> int:
        """Connections that it holds."""
        return len(self._kept)

    def command_of(self, command: ChildCommand) -> ChildCommand:
        """Return the command of the next gateway, which inherits what it needs and waits until it may start."""
        self.end_next()
        self._next, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._next.setblocking(False)
        listeners = tuple(one.fileno() for one in self._listeners)
        inherited = Inherited(self._theirs.fileno(), self._slots, self._num_slots, listeners)
        env = {**command.env, **inherited.variable}
        return replace(command, env=env, descriptors=inherited.descriptors)

    def next_exists(self) -> None:
        """Read the messages of the next gateway, whose process was made."""
        # Only the gateway may have that end: its death must show here.
        self._close_theirs()
        if self._next is not None:
            asyncio.get_running_loop().add_reader(self._next.fileno(), self._read_next)

    def start_next(self) -> None:
        """Let the next gateway start: from now on it is the gateway."""
        self._end_control()
        if (control := self._next) is not None:
            self._control, self._next = control, None
            # It replaces the reader of the next gateway.
            asyncio.get_running_loop().add_reader(control.fileno(), self._read)
            self._unsent.append((START, 0, None))
            self._flush()

    def end_next(self) -> None:
        """Let the next gateway end: it will not be needed."""
        self.next_has_loaded.clear()
        self._close_theirs()
        if (control := self._next) is not None:
            self._next = None
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()

    def gateway_ended(self) -> None:
        """Take the connections of a gateway that has ended, and whose holder has too, and wait for the next gateway."""
        self._ended_ns = time.monotonic_ns()
        self._read()
        self._end_control()
        if self._expiry is None:
            self._expiry = asyncio.get_running_loop().call_later(KEEP_S, self._drop_all)

    def leave(self) -> None:
        """Tell the gateway to leave its connections to a successor, which is started then."""
        if self._control is not None:
            self.is_leaving = True
            self._unsent.append((LEAVE, 0, None))
            self._flush()

    def close(self) -> None:
        """Accept no connection any more, and hold none: the gateway ends by itself."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self.end_next()
        self._end_control()
        self._drop_all()
        with suppress(OSError):
            os.close(self._slots)

    def _close_theirs(self) -> None:
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def _drop_all(self) -> None:
        """Close the connections: a gateway has them, or they end."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        for descriptor in self._kept.values():
            os.close(descriptor)
        self._kept.clear()

    def _read_next(self) -> None:
        if self._next is None:
            return
        try:
            message = receive_message(self._next)
        except BlockingIOError:
            return
        except OSError:
            message = None
        if message is not None and message[0] == LOADED:
            self.next_has_loaded.set()
        else:  # It has ended.
            asyncio.get_running_loop().remove_reader(self._next.fileno())

    def _read(self) -> None:
        while (control := self._control) is not None:
            try:
                message = receive_message(control)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The gateway ended before it had read all. What its holder has sent follows.
                continue
            except OSError:
                message = None
            if message is None:
                self._end_control()
                return
            kind, number, descriptor = message
            if kind == KEEP and descriptor is not None:
                if (old := self._kept.get(number)) is not None:
                    os.close(old)
                self._kept[number] = descriptor
            elif kind == TAKEN:
                self._drop_all()
            elif kind == READY:
                self._hand_over()

    def _hand_over(self) -> None:
        """Give the gateway the connections of its predecessor."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self._unsent.extend((KEEP, number, descriptor) for number, descriptor in self._kept.items())
        self._unsent.append((READY, self._ended_ns, None))
        self._flush()

    def _flush(self) -> None:
        loop, control = asyncio.get_running_loop(), self._control
        while self._unsent and control is not None:
            kind, number, descriptor = self._unsent[0]
            try:
                send_message(control, kind, number, descriptor)
            except BlockingIOError:
                loop.add_writer(control.fileno(), self._flush)
                return
            except OSError:
                return  # Its end is being read.
            self._unsent.popleft()
        if control is not None:
            loop.remove_writer(control.fileno())

    def _end_control(self) -> None:
        self._unsent.clear()
        if (control := self._control) is not None:
            self._control = None
            loop = asyncio.get_running_loop()
            loop.remove_reader(control.fileno())
            loop.remove_writer(control.fileno())
            control.close()
