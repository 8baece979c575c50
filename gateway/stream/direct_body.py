"""The short way from a streamed answer to its connection, offered as an extension of the ASGI scope.

On the usual way, each part of a body passes through a coroutine of every middleware and of the server. All of them
only look at the head of the answer. For a stream of tokens, that way costs more than encoding the event.
"""

from __future__ import annotations

import weakref
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.gateway.kept.answer import AnswerKeep
from penstock.gateway.kept.slots import AnswerSlot

_BODY = "penstock.body"


class DirectBody:
    """The body of one answer. Its head must have been sent on the usual way, and its last part goes that way too."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow

    @property
    def cycle(self) -> RequestResponseCycle:
        """The server's side of the answer."""
        return self._cycle

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written: the body is chunked, and the client reads fast enough."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            self._flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, part: bytes, events: bytes = b"") -> None:
        """Write one part, which must not be empty. Only while `is_ready`. `events`: those of the first job in it."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class KeptBody(DirectBody):
    """The body of an answer that outlives its gateway: each part is in the answer's slot before it is written."""

    __slots__ = ("_slot", "_transport")

    def __init__(self, cycle: RequestResponseCycle, slot: AnswerSlot, transport: Any) -> None:
        """`transport`: that of the connection, without a slot."""
        super().__init__(cycle)
        self._slot = slot
        self._transport = transport

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written. While the short way is open, no byte waits, and the answer is not complete."""
        return self._slot.small > 0 or super().is_ready

    def write(self, part: bytes, events: bytes = b"") -> None:
        """Write one part, and count the events of the first job in it.

        This runs for each token. The module of slots says why the process may be killed anywhere here.
        """
        data, slot, transport = b"%x\r\n%b\r\n" % (len(part), part), self._slot, self._transport
        if events and len(data) <= slot.small:
            slot.stage(data, events)
            transport.write(data)
            if transport.get_write_buffer_size():
                slot.keep_staged(data)
        else:
            kept: Any = self._cycle.transport
            kept.write(data, events)


def kept_body(body: DirectBody, keep: AnswerKeep) -> DirectBody:
    """Return the body of an answer with its slot, if it has one."""
    return body if keep.slot is None else KeptBody(body.cycle, keep.slot, keep.transport)


def offer_direct_body(cycle: RequestResponseCycle) -> None:
    """Add the body of this answer to its scope."""
    extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
    # A strong reference would be circular, and leave each answer to the garbage collector.
    extensions[_BODY] = weakref.ref(cycle)


def direct_body_of(scope: Scope) -> DirectBody | None:
    """Return the body of the answer to this request, or None if the server offers none."""
    offered: weakref.ref[RequestResponseCycle] | None = scope.get("extensions", {}).get(_BODY)
    cycle = None if offered is None else offered()
    return None if cycle is None else DirectBody(cycle)
