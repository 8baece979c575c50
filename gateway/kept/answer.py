"""One answer that outlives its gateway: it notes in its slot what it sends, or goes on with what its slot has.

An answer is a function of its record and of the log of its jobs. So its position is a number of event bytes of each
job. The successor encodes the log again, and sends what follows that position.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from zlib import adler32

import msgpack
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.contract.errors import StreamDivergedError
from penstock.gateway.kept.connection import KeptConnection
from penstock.gateway.kept.slots import CLOSES, FAILED, FINAL, MAX_COUNTERS, NO_EVENTS, WITHIN, AnswerSlot, Left
from penstock.queue.wire import pack
from penstock.runtime import crash_points

_KEPT = "penstock.kept"
_TAKEN = "penstock.taken_over"
_HEADERS = frozenset(
    (
        *(b"accept", b"idempotency-key", b"last-event-id", b"x-penstock-event-ids", b"origin", b"host"),
        *(b"anthropic-version", b"traceparent", b"tracestate"),
    )
)
"""The request's headers that a record holds. Those with credentials are not among them."""


MAX_TAKEOVERS = 3
"""Gateways that may die while they take an answer over. The next one ends it with an error."""


def _nothing() -> None:
    pass


def _count_nothing(counter: int, events: bytes) -> None:
    pass


class PlainTransport:
    """Writes the rest of an answer that is not kept any more to its connection."""

    __slots__ = ("_transport",)

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def write(self, data: bytes, events: bytes = b"") -> None:
        """Write the answer's next bytes."""
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection once its bytes are written."""
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether the connection closes."""
        return bool(self._transport.is_closing())


class KeptTransport(PlainTransport):
    """Writes an answer to its connection, and into its slot before."""

    __slots__ = ("_answer", "_slot")

    def __init__(self, transport: Any, slot: AnswerSlot, answer: AnswerKeep) -> None:
        super().__init__(transport)
        self._slot = slot
        self._answer = weakref.ref(answer)

    def write(self, data: bytes, events: bytes = b"") -> None:
        """Note and write the answer's next bytes. `events`: those of the first job in them, which are counted."""
        slot, transport = self._slot, self._transport
        if events:
            slot.count(0, events)
        is_kept = slot.put(data, transport.get_write_buffer_size())
        if not is_kept and (answer := self._answer()) is not None:
            answer.give_up("too_many_bytes")
        transport.write(data)
        if is_kept and not transport.get_write_buffer_size():
            slot.open_short_way()


class AnswerKeep:
    """The slot of one answer, from the record before its jobs are submitted to its last byte."""

    __slots__ = (
        "__weakref__",
        "_behind",
        "_connection",
        "_cycle",
        "_on_first_bytes",
        "_replayed",
        "_send",
        "_swallows_head",
        "count",
        "is_poisoned",
        "num_behind",
        "place",
        "record",
        "slot",
        "was_within_event",
    )

    def __init__(self, connection: KeptConnection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._send = cycle.send
        self.slot: AnswerSlot | None = None
        """The slot that has the answer. Only then is the transport of the cycle a `KeptTransport`."""
        self.count: Callable[[int, bytes], None] = _count_nothing
        """Counts events of a job that are written next. Only while not `is_behind`."""
        self._behind: list[int] = []
        """Of an answer that was taken over: event bytes of each job that the client has, and their checksums."""
        self._replayed: list[int] = []
        self.num_behind = 0
        """Jobs of which the client has more than was encoded so far. It is read for each event."""
        self._swallows_head = False
        self.was_within_event = False
        """Whether the bytes that the client has end within an event."""
        self.record: Mapping[str, Any] | None = None
        """The record, if the answer was taken over."""
        self.place: tuple[int, int] | None = None
        """Of an answer that was taken over and notes places: the one behind the last page that the client has."""
        self.is_poisoned = False
        """Whether earlier gateways died while they took the answer over, so that this one must not try it."""
        self._on_first_bytes: Callable[[], None] = _nothing

    def take_over(
        self, slot: AnswerSlot, left: Left, record: Mapping[str, Any], on_first_bytes: Callable[[], None]
    ) -> None:
        """Go on with the answer of an earlier gateway. `on_first_bytes` is called with its first new bytes."""
        self.slot, self.record, self._on_first_bytes = slot, record, on_first_bytes
        self.count = slot.count
        self.is_poisoned = left.num_takeovers >= MAX_TAKEOVERS
        if record.get("has_place"):
            noted = left.counters[2:4]
            self.place = None if noted == NO_EVENTS else (noted[0], noted[1])
        else:
            self._behind = [*left.counters]
        self._replayed = [*NO_EVENTS * (len(self._behind) // 2)]
        self.num_behind = sum(count > 0 for count in self._behind[::2])
        slot.counters = left.counters
        self._swallows_head = left.total > 0
        self.was_within_event = bool(left.flags & WITHIN)
        self._cycle.transport = KeptTransport(self._cycle.transport, slot, self)  # type: ignore[assignment]

    @property
    def transport(self) -> Any:
        """The connection's transport, without the slot."""
        return self._connection.transport

    @property
    def is_kept(self) -> bool:
        """Whether a slot has the answer."""
        return self.slot is not None

    @property
    def has_head(self) -> bool:
        """Whether the client has the head of an answer that was taken over."""
        return self._swallows_head

    @property
    def is_behind(self) -> bool:
        """Whether the client has more of the answer than was encoded so far."""
        return self.num_behind > 0

    def begin(self, facts: Mapping[str, Any], num_counters: int = 1) -> None:
        """Note the record of a new answer, before its jobs are submitted. An answer that cannot be kept is counted."""
        cycle = self._cycle
        if self.slot is not None or num_counters > MAX_COUNTERS:
            return
        if cycle.response_started or cycle.scope["http_version"] != "1.1" or cycle.scope["method"] == "HEAD":
            return
        scope = _scope_facts(cast("Scope", cycle.scope))
        data = pack({"scope": scope, "closes": not cycle.keep_alive, **facts})
        self.slot = slot = self._connection.begin(data, num_counters)
        if slot is not None:
            self.count = slot.count
            cycle.transport = KeptTransport(cycle.transport, slot, self)  # type: ignore[assignment]

    def add(self, facts: Mapping[str, Any]) -> None:
        """Add to the record of an answer that has sent nothing yet."""
        if self.slot is not None and not self.slot.add(pack(facts)):
            self.give_up("large_record")

    def give_up(self, reason: str) -> None:
        """Let the answer end with this gateway, because its slot has no room."""
        if self.slot is not None:
            self._connection.give_up(self.slot, reason)
            self.slot, self.count = None, _count_nothing
            self._cycle.transport = PlainTransport(self._connection.transport)  # type: ignore[assignment]

    def split(self, counter: int, events: bytes) -> tuple[bytes, bytes]:
        """Split events into those that the client has, and new ones, which are counted.

        Raises StreamDivergedError if the client has other ones.
        """
        at = 2 * counter
        left = self._behind[at] - self._replayed[at] if self.num_behind else 0
        if left <= 0:
            self.count(counter, events)
            return b"", events
        old, new = events[:left], events[left:]
        self._replayed[at] += len(old)
        self._replayed[at + 1] = adler32(old, self._replayed[at + 1])
        if self._replayed[at] == self._behind[at]:
            if self._replayed[at + 1] != self._behind[at + 1]:
                raise StreamDivergedError("the log of the job is no longer the one from which its stream was sent")
            self.num_behind -= 1
            if not self.num_behind:
                self._go_on()
            if new:
                self.count(counter, new)
        return old, new

    def _go_on(self) -> None:
        """Note that the answer is where the earlier gateway left it."""
        if self.slot is not None:
            crash_points.point("before", "first byte of a takeover")
            self.survive()

    def survive(self) -> None:
        """Note that this gateway goes on with the answer, so it is not the kind that kills its gateway."""
        told, self._on_first_bytes = self._on_first_bytes, _nothing
        told()
        if self.slot is not None:
            self.slot.set_takeovers(0)

    def begin_read(self, *, is_stream: bool) -> None:
        """Note the record of an answer that only reads. A successor reads again, from the place that was noted last.

        It is for answers that are no function of a log, because what they send depends on when they read.
        """
        self.begin({"job_ids": [], "is_stream": is_stream, "has_place": True}, num_counters=2)

    def note_place(self, place: tuple[int, int]) -> None:
        """Note the place behind the bytes that are written next, once the head is sent. Only its source reads it."""
        if self.slot is not None:
            self.slot.counters = (*NO_EVENTS, *place)
        if self._on_first_bytes is not _nothing:
            self.survive()

    def note_within(self, *, is_within: bool) -> None:
        """Note whether the bytes that are written next end within an event."""
        if self.slot is not None:
            self.slot.note(self.slot.flags | WITHIN if is_within else self.slot.flags & ~WITHIN)

    def note_failure(self) -> None:
        """Note that the bytes that are written next are the error with which the answer ends."""
        if self.slot is not None:
            self.slot.note(self.slot.flags | FAILED)

    async def send(self, message: Message) -> None:
        """Send a message of ASGI. That with the head is left out if the client has the head."""
        slot = self.slot
        if slot is not None:
            if message["type"] == "http.response.start":
                if self._swallows_head:
                    self._swallow(message, slot)
                    return
                slot.status = message["status"]
            elif not message.get("more_body", False):
                slot.note(slot.flags | FINAL)
            if not self._cycle.keep_alive:
                slot.note(slot.flags | CLOSES)
        await self._send(message)  # type: ignore[arg-type]
        if self._on_first_bytes is not _nothing:
            self.survive()

    def _swallow(self, message: Message, slot: AnswerSlot) -> None:
        """Learn from the head how the body is framed, as the server does when it sends the head."""
        cycle = self._cycle
        self._swallows_head = False
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        if message["status"] != slot.status:
            # The client has another status. Nothing valid can follow it.
            self._connection.transport.abort()
            return
        for name, value in message.get("headers", ()):
            if name.lower() == b"content-length" and cycle.chunked_encoding is None:
                cycle.expected_content_length, cycle.chunked_encoding = int(value), False
            elif name.lower() == b"connection" and b"close" in value.lower():
                cycle.keep_alive = False
        if cycle.chunked_encoding is None and message["status"] not in (204, 304):
            cycle.chunked_encoding = True

    def release(self) -> None:
        """Let the slot go, and forget the cycle, which otherwise would be left to the garbage collector."""
        self.slot, self.count = None, _count_nothing
        self._cycle.__dict__.pop("send", None)
        self._cycle.transport = self._connection.transport


def _scope_facts(scope: Scope) -> dict[str, Any]:
    """Return what a successor needs of a request, beside its body."""
    caller, state = scope["state"].get("caller"), scope["state"]
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query": scope["query_string"],
        "headers": [[name, value] for name, value in scope["headers"] if name in _HEADERS],
        "request_id": state.get("request_id", ""),
        "key_id": "" if caller is None else caller.key_id,
        "tenant": "default" if caller is None else caller.tenant,
    }


def offer_keep(cycle: RequestResponseCycle, connection: KeptConnection) -> AnswerKeep:
    """Add the slot of this answer to its scope. The caller holds it as long as the answer lasts."""
    keep = AnswerKeep(connection, cycle)
    cycle.send = keep.send  # type: ignore[method-assign, assignment]
    extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
    extensions[_KEPT] = weakref.ref(keep)
    return keep


def keep_of(scope: Scope) -> AnswerKeep | None:
    """Return the slot of the answer to this request, or None if no keeper holds its connection."""
    offered: weakref.ref[AnswerKeep] | None = scope.get("extensions", {}).get(_KEPT)
    return None if offered is None else offered()


def record_of(scope: Scope) -> Mapping[str, Any] | None:
    """Return the record of an answer that was taken over, or None for a new request."""
    keep = keep_of(scope)
    return None if keep is None else keep.record


def unpacked(record: bytes) -> dict[str, Any]:
    """Return the facts of a record; later ones replace earlier ones. Raises ValueError."""
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(record) or 1)
    unpacker.feed(record)
    facts: dict[str, Any] = {}
    for more in unpacker:
        if not isinstance(more, dict):
            raise ValueError("a part of a record is no map")
        facts |= more
    return facts


def scope_of(facts: Mapping[str, Any], server: Sequence[Any] | None, client: Sequence[Any] | None) -> dict[str, Any]:
    """Return the scope of a request that an earlier gateway read."""
    told = facts["scope"]
    headers = [(name, value) for name, value in told["headers"]]
    headers.append((b"x-request-id", told["request_id"].encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": server,
        "client": client,
        "scheme": "http",
        "root_path": "",
        "method": told["method"],
        "path": told["path"],
        "raw_path": told["path"].encode(),
        "query_string": told["query"],
        "headers": headers,
        "state": {},
    }
