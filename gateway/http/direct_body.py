"""The short way from a streamed answer to its connection, offered as an extension of the ASGI scope.

On the usual way, each part of a body passes through a coroutine of every middleware and of the server. All of them only
look at the head of the answer. For a stream of tokens, that way costs more than encoding the event.
"""

from __future__ import annotations

import weakref
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "penstock.body"


class DirectBody:
    """The body of one answer. Its head must have been sent on the usual way, and its last part goes that way too."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written: the body is chunked, and the client reads fast enough."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            self._flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        """Write one part, which must not be empty. Only while `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def offer_direct_body(cycle: RequestResponseCycle) -> None:
    """Add the body of this answer to its scope."""
    extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
    # A strong reference would be circular, and leave each answer to the garbage collector.
    extensions[_EXTENSION] = weakref.ref(cycle)


def direct_body_of(scope: Scope) -> DirectBody | None:
    """Return the body of the answer to this request, or None if the server offers none."""
    offered: weakref.ref[RequestResponseCycle] | None = scope.get("extensions", {}).get(_EXTENSION)
    cycle = None if offered is None else offered()
    return None if cycle is None else DirectBody(cycle)
