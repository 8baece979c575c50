"""The list of a stored response's input items, sent in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import RequestError
from penstock.gateway.authentication import caller_of
from penstock.gateway.responses.ids import MAX_SHOWN_CHARS, input_item_id
from penstock.gateway.responses.stored import bytes_to_claim, record_of
from penstock.gateway.shared_budget import SharedBudget
from penstock.gateway.stream.body_writer import PIECE_BYTES, BodyWriter
from penstock.gateway.stream.caller import CallerGoneError
from penstock.producer.client import AsyncClient
from penstock.runtime.cooperative import LoopYielder

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
"""Items of one page."""
_ORDERS = ("asc", "desc")

Items = Sequence[tuple[str, bytes]]
"""Ids and the other members as JSON."""


class InputItemList(Response):
    """One page of a stored response's input items."""

    def __init__(self, request: Request, job_id: str, query: Mapping[str, str]) -> None:
        """`query` asks for the page."""
        super().__init__()
        state = request.app.state
        self._client: AsyncClient = state.client
        self._budget: SharedBudget = state.result_budget
        self._yielder: LoopYielder = state.yielder
        self._timeout_s: float = state.settings.send_timeout_s
        self._tenant = caller_of(request).tenant
        self._job_id = job_id
        self._query = query

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the record and send the page. Raises RequestError for a wrong query."""
        async with self._budget.taken(self._tenant) as claim:
            items = (await record_of(self._client, claim, self._job_id, self._tenant)).items
            page, has_more = page_of(items, self._job_id, self._query)
            del items
            claim.shrink_to(bytes_to_claim(sum(len(text) for _, text in page)))
            parts = _parts_of(page, has_more=has_more)
            # The server closes the connection of a body that is not complete.
            with suppress(CallerGoneError):
                await BodyWriter(send, {}, self._yielder, timeout_s=self._timeout_s).send_all(parts)


async def _parts_of(page: Items, *, has_more: bool) -> AsyncGenerator[bytes, None]:
    yield b'{"object":"list","data":['
    for number, (item_id, text) in enumerate(page):
        yield (b"," if number else b"") + b'{"id":' + to_json(item_id) + b","
        for at in range(1, len(text), PIECE_BYTES):
            yield text[at : at + PIECE_BYTES]
    ends = {"first_id": page[0][0], "last_id": page[-1][0]} if page else {}
    tail = {"first_id": None, "last_id": None, **ends, "has_more": has_more}
    yield b"]," + to_json(tail)[1:]


def page_of(items: Items, job_id: str, query: Mapping[str, str]) -> tuple[Items, bool]:
    """Return the page of items that a query asks for, and whether there are more. Raises RequestError."""
    limit, order, after = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc"), query.get("after")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestError(f"limit must be a number from 1 to {MAX_LIMIT}", param="limit")
    if order not in _ORDERS:
        raise RequestError("order must be asc or desc", param="order")
    named = [(item_id or input_item_id(index, job_id), text) for index, (item_id, text) in enumerate(items)]
    if order == "desc":
        named.reverse()
    start = 0
    if after:
        start = next((at + 1 for at, (item_id, _) in enumerate(named) if item_id == after), 0)
        if not start:
            raise RequestError(f"after: no input item has the id {after[:MAX_SHOWN_CHARS]!r}", param="after")
    end = start + int(limit)
    return named[start:end], end < len(named)
