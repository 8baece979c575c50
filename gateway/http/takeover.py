"""The open answers of a predecessor: its connections come from the keeper, and its answers go on from their slots."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import msgpack
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn._types import HTTPScope

from penstock.contract.errors import InvariantError
from penstock.gateway.http.protocol import BoundedHead
from penstock.gateway.kept.answer import keep_of, scope_of, unpacked
from penstock.gateway.kept.connection import Keep
from penstock.gateway.kept.slots import ANSWERING, CLOSES, FAILED, FINAL, IDLE, AnswerSlot, Left
from penstock.gateway.metrics import GatewayMetrics
from penstock.runtime.kept_sockets import counts_of

logger = logging.getLogger("penstock.gateway")

SURVIVED_S = 1.0
"""An answer that was taken over for so many seconds is not the kind that kills its gateway."""
TURN_S = 0.25
"""Seconds for which an answer is alone whose takeover may have killed a gateway, to show whether it did."""
TURNS_S = 1.0
"""Seconds for the turns of all such answers: where a gateway was killed twice from outside, all are such."""
MAX_ADOPTED_AT_ONCE = 64
_END_OF_CHUNKS = b"0\r\n\r\n"


class AnswerTakeover:
    """Takes over the connections that a predecessor left, once."""

    def __init__(
        self, keep: Keep, new_protocol: Callable[[], BoundedHead], app: ASGIApp, metrics: GatewayMetrics
    ) -> None:
        """`new_protocol` makes the protocol of a connection."""
        self._keep = keep
        self._new_protocol = new_protocol
        self._app = app
        self._metrics = metrics
        self._found: list[tuple[AnswerSlot, int]] = []
        self._ended_ns = 0
        self._suspects = asyncio.Lock()
        self._num_suspects = 0

    async def learn(self) -> None:
        """Learn which slots are taken. Until then, no other answer may take one, nor the place of newest parts."""
        found, self._ended_ns = await self._keep.kept_before()
        slots = self._keep.slots.taken([number for number, _ in found])
        self._found = [(slot, descriptor) for slot, (_, descriptor) in zip(slots, found, strict=True)]

    async def run(self) -> None:
        """Take all of them over, and return when each answer has begun to go on."""
        for number, (slot, descriptor) in enumerate(self._found):
            await self._adopt(slot, descriptor)
            if number % MAX_ADOPTED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if self._found:
            logger.info("took over the connections of an earlier gateway", extra={"num_connections": len(self._found)})

    async def _adopt(self, slot: AnswerSlot, descriptor: int) -> None:
        """Go on with one connection, or close it."""
        try:
            left = slot.left()
            counts = counts_of(descriptor)
            if counts is None or left.state not in (IDLE, ANSWERING):
                raise ValueError("no answer can go on")
            is_ahead = left.is_ahead or counts.num_read != left.num_read
            if left.state == IDLE:
                if is_ahead:
                    raise ValueError("a request was read that no record has")
                start: Callable[[BoundedHead], None] = partial(self._go_idle, slot, counts.num_read)
            else:
                rest, record = slot.rest(left, counts.num_accepted - left.num_before), unpacked(left.record)
                start = partial(self._go_on, slot, left, counts.num_read, rest, record, is_ahead)
        except (ValueError, msgpack.UnpackException) as error:
            self._close(slot, descriptor, str(error))
            return
        protocol = self._new_protocol()
        protocol.take_over = start
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection)
        except OSError:
            self._keep.num_kept += 1
            self._keep.drop(slot)
            connection.close()

    def _close(self, slot: AnswerSlot, descriptor: int, reason: str) -> None:
        logger.info("a connection of an earlier gateway was closed", extra={"reason": reason})
        self._metrics.takeovers.labels("closed").inc()
        self._keep.num_kept += 1
        self._keep.drop(slot)
        os.close(descriptor)

    def _go_idle(self, slot: AnswerSlot, num_read: int, protocol: BoundedHead) -> None:
        """Wait for the next request of a connection without an open answer."""
        if protocol.kept is not None:
            slot.continue_from(slot.left())
            protocol.kept.take_over(slot, num_read, is_ahead=False)
            self._metrics.takeovers.labels("idle").inc()

    def _go_on(
        self,
        slot: AnswerSlot,
        left: Left,
        num_read: int,
        rest: bytes,
        record: Mapping[str, Any],
        is_ahead: bool,
        protocol: BoundedHead,
    ) -> None:
        """Write what the kernel has not got of an answer, and go on with it behind that."""
        if protocol.kept is None:
            return
        slot.continue_from(left)
        protocol.kept.take_over(slot, num_read, is_ahead=is_ahead)
        if rest:
            protocol.transport.write(rest)
        if left.flags & (FINAL | FAILED):
            if not left.flags & FINAL:
                protocol.transport.write(_END_OF_CHUNKS)
            self._metrics.takeovers.labels("complete").inc()
            if is_ahead or left.flags & CLOSES or not left.flags & FINAL:
                protocol.transport.close()
            else:
                protocol.kept.complete()
            return
        scope = scope_of(record, protocol.server, protocol.client)
        app = partial(self._answer, slot, left)
        self._num_suspects += left.num_takeovers > 0
        keep = protocol.resume(cast(HTTPScope, scope), app, keep_alive=not (is_ahead or record["closes"]))
        keep.take_over(slot, left, record, self._note_pause)
        self._metrics.takeovers.labels("continued").inc()

    async def _answer(self, slot: AnswerSlot, left: Left, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the rest of an answer. One whose takeover has killed a gateway begins alone."""
        keep = keep_of(scope)
        if keep is None:
            raise InvariantError("an answer that was taken over has no slot")
        loop = asyncio.get_running_loop()
        if left.num_takeovers:
            await self._suspects.acquire()
            loop.call_later(min(TURN_S, TURNS_S / self._num_suspects), self._suspects.release)
        slot.set_takeovers(min(left.num_takeovers + 1, 255))
        survived = loop.call_later(SURVIVED_S, keep.survive)
        try:
            await self._app(scope, receive, send)
        finally:
            survived.cancel()

    def _note_pause(self) -> None:
        if self._ended_ns:
            self._metrics.takeover_pause_s.observe((time.monotonic_ns() - self._ended_ns) / 1e9)
