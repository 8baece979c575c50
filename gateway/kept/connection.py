"""The connections of a gateway that have a slot, so that they outlive the gateway (`holder.py`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.gateway.kept.slots import MAX_RECORD_BYTES, AnswerSlot, Slots
from penstock.runtime.kept_sockets import KEEP, LEAVE, READY, TAKEN, Inherited, counts_of, receive_message, send_message

logger = logging.getLogger("penstock.gateway")


class Keep:
    """The gateway's side of its keeper: the slots, and the messages about connections."""

    def __init__(self, inherited: Inherited) -> None:
        self.slots = Slots(inherited.slots, inherited.num_slots)
        self._control: socket.socket | None = socket.socket(fileno=inherited.control)
        self._control.setblocking(False)
        self._holder = inherited.holder
        self.num_kept = 0
        self.note_unkept: Callable[[str], None] = lambda _: None
        """Counts an answer that could not be kept, by the reason."""
        self.on_leave: Callable[[], None] = lambda: None
        """Called when the keeper asks this gateway to leave its connections to a successor."""

    @property
    def is_alive(self) -> bool:
        """Whether there is a keeper."""
        return self._control is not None

    async def kept_before(self) -> tuple[list[tuple[int, int]], int]:
        """Return slot and descriptor of each connection of the predecessor, and when that one ended, in nanoseconds.

        From then on, the keeper's messages are read as they arrive.
        """
        loop, control = asyncio.get_running_loop(), self._control
        if control is None:
            return [], 0
        found: list[tuple[int, int]] = []
        arrived = asyncio.Event()
        try:
            loop.add_reader(control.fileno(), arrived.set)
            send_message(control, READY)
            while True:
                await arrived.wait()
                arrived.clear()
                while (message := _received(control)) is not None:
                    kind, number, descriptor = message
                    if kind == KEEP and descriptor is not None:
                        self.slots.connections.note(number, descriptor)
                        found.append((number, descriptor))
                    elif kind == READY:
                        send_message(control, TAKEN)
                        loop.add_reader(control.fileno(), self._read)
                        return found, number
        except OSError:
            self._lose_keeper()
            return found, 0

    def hold(self, connection: int) -> AnswerSlot | str:
        """Let a connection outlive this gateway, and return its slot, or the reason why it does not."""
        if self._control is None:
            return "no_keeper"
        if not self._holder:
            return "no_holder"
        if (slot := self.slots.take()) is None:
            return "too_many_connections"
        self.slots.connections.note(slot.number, connection)
        self.num_kept += 1
        return slot

    def drop(self, slot: AnswerSlot) -> None:
        """Let a connection end with this gateway, or with its descriptor, which may be closed from now on."""
        slot.clear()
        self.slots.connections.forget(slot.number)
        self.slots.free(slot.number)
        self.num_kept -= 1

    def watch_holder(self) -> None:
        """Learn when the holder ends. Log a warning if there is none."""
        if not self._holder:
            logger.warning("no process gateway-holder could start, so open answers end with this gateway")
            return
        try:
            ended = os.pidfd_open(self._holder)
        except (AttributeError, OSError):
            return  # Before Linux 5.3.
        asyncio.get_running_loop().add_reader(ended, self._lose_holder, ended)

    def _lose_holder(self, ended: int) -> None:
        asyncio.get_running_loop().remove_reader(ended)
        os.close(ended)
        with suppress(ChildProcessError):
            os.waitpid(self._holder, os.WNOHANG)
        self._holder = 0
        self.slots.connections.forget_all()
        logger.error(
            "the holder of the connections has ended (process gateway-holder), so open answers end with this gateway"
        )

    def _read(self) -> None:
        control = self._control
        try:
            while control is not None and (message := _received(control)) is not None:
                if message[0] == LEAVE:
                    self.on_leave()
        except OSError:
            self._lose_keeper()

    def _lose_keeper(self) -> None:
        """Go on without a keeper, whose process has ended: its guard lets this gateway drain."""
        if (control := self._control) is not None:
            self._control = None
            # First: the holder must not send by the number of this socket when that is another file's.
            self.slots.connections.forget_all()
            loop = asyncio.get_running_loop()
            loop.remove_reader(control.fileno())
            control.close()


def _received(control: socket.socket) -> tuple[bytes, int, int | None] | None:
    """Return the next message, or None if there is none yet. Raises ConnectionResetError at the end."""
    try:
        message = receive_message(control)
    except BlockingIOError:
        return None
    if message is None:
        raise ConnectionResetError
    return message


class KeptConnection:
    """One connection of a client. It has a slot from its first answer that is kept on."""

    __slots__ = ("_is_ahead", "_keep", "_num_read", "_slot", "transport")

    def __init__(self, keep: Keep, transport: Any) -> None:
        self._keep = keep
        self.transport = transport
        self._slot: AnswerSlot | None = None
        self._num_read = 0
        self._is_ahead = False

    @property
    def _descriptor(self) -> int:
        return int(self.transport.get_extra_info("socket").fileno())

    def take_over(self, slot: AnswerSlot, num_read: int, *, is_ahead: bool) -> None:
        """Go on with a connection that an earlier gateway had."""
        self._slot, self._num_read, self._is_ahead = slot, num_read, is_ahead
        self._keep.num_kept += 1

    def note_received(self, num_bytes: int) -> None:
        """Count received bytes."""
        self._num_read += num_bytes

    def note_ahead(self) -> None:
        """Note that a request arrives behind the one that is being answered."""
        self._is_ahead = True
        if self._slot is not None:
            self._slot.note_ahead()

    def begin(self, record: bytes, num_counters: int) -> AnswerSlot | None:
        """Note the record of an answer, and return its slot, or None if it cannot be kept."""
        reason: str | AnswerSlot = "large_record"
        if len(record) <= MAX_RECORD_BYTES:
            num_waiting = self.transport.get_write_buffer_size()
            descriptor = self._descriptor
            counts = counts_of(descriptor)
            reason = self._slot or ("no_counts" if counts is None else self._keep.hold(descriptor))
            if isinstance(reason, AnswerSlot) and counts is not None:
                self._slot = slot = reason
                slot.begin(
                    record,
                    num_counters,
                    num_before=counts.num_accepted + num_waiting,
                    num_read=self._num_read,
                    is_ahead=self._is_ahead,
                )
                return slot
        if self._keep.is_alive:
            self._keep.note_unkept(str(reason))
        self.leave()
        return None

    def give_up(self, slot: AnswerSlot, reason: str) -> None:
        """Note that an answer cannot be kept any more."""
        self._keep.note_unkept(reason)
        slot.lose()

    def complete(self) -> None:
        """Note the end of an answer."""
        if self._slot is not None and not self.transport.get_write_buffer_size():
            self._slot.idle(self._num_read)

    def leave(self) -> None:
        """Let the connection end with this gateway. It stays open here."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._keep.drop(slot)
