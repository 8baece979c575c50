"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import JobFailedError, NotFoundError, RequestError
from penstock.contract.job import RETURN_PROGRESS, SamplingParams
from penstock.gateway.budget import SharedBudget
from penstock.gateway.http.entry import caller_of
from penstock.gateway.request.reading import MAX_NUMBER_DIGITS
from penstock.gateway.responses.answers import CountInputTokens, CreateResponse, ResponseState, ResponseStream, leave
from penstock.gateway.responses.body import INCLUDABLE
from penstock.gateway.responses.compact import Compact
from penstock.gateway.responses.record import (
    MAX_SHOWN_CHARS,
    bytes_to_claim,
    input_item_id,
    job_id_of,
    no_response,
    record_of,
    stored_record,
)
from penstock.gateway.stream.generation_request import GenerationRequest, RequestContent, StreamPosition
from penstock.gateway.stream.writer import PIECE_BYTES, BodyWriter, CallerGoneError
from penstock.producer.client import AsyncClient
from penstock.runtime.cooperative import LoopYielder

# The list of a stored response's input items, sent in pieces.

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


CANCEL_WAIT_S = 2.0
"""Seconds that a cancellation waits for a running job to end, which usually takes a step."""
_INCLUDE = ("include", "include[]")

ROUTES = (
    Route("/v1/responses", CreateResponse(), methods=["POST"]),
    Route("/v1/responses/input_tokens", CountInputTokens(), methods=["POST"]),
    Route("/v1/responses/compact", Compact(), methods=["POST"]),
)
router = APIRouter()


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response, or with `?stream=true` its events, after the one that `starting_after` names.

    With `?return_progress=true`, further events report queue position and prompt progress before the first token.
    """
    query = _query_of(request, "stream", "starting_after", RETURN_PROGRESS, "include_obfuscation", *_INCLUDE)
    is_stream, with_progress = _truth_of(query, "stream"), _truth_of(query, RETURN_PROGRESS)
    starting_after = query.get("starting_after", "-1")
    if query.get("include_obfuscation", "false") != "false":
        raise RequestError("include_obfuscation: not supported; omit it or send false", param="include_obfuscation")
    for name in () if is_stream else ("starting_after", RETURN_PROGRESS):
        if name in query:
            raise RequestError(f"{name}: allowed only when stream is true", param=name)
    if starting_after != "-1" and not (starting_after.isdecimal() and len(starting_after) <= MAX_NUMBER_DIGITS):
        raise RequestError("starting_after must be the sequence number of an event", param="starting_after")
    job_id, client, tenant = _named(request, response_id)
    record = stored_record(client, job_id, tenant)
    if is_stream:
        reading = replace(_reading(job_id, tenant), queueing={RETURN_PROGRESS: with_progress})
        return ResponseStream(request, reading, record, starting_after=int(starting_after))
    return ResponseState(request, _reading(job_id, tenant), record)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response and return it. A response that has ended stays as it is."""
    _query_of(request)
    job_id, client, tenant = _named(request, response_id)
    stored, budget = stored_record(client, job_id, tenant), request.app.state.result_budget
    async with budget.taken(tenant) as claim:
        is_background = (await stored(claim)).background
    if not is_background:
        message = "Only responses created with background=true can be cancelled; close the connection of this one."
        raise RequestError(message, code="not_a_background_response", param="response_id")
    if await client.cancel(job_id, tenant=tenant) == "running":
        await _wait_for_end(client, job_id, tenant)
    return ResponseState(request, _reading(job_id, tenant), stored)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Delete a stored response with its output. A response that has not ended is canceled."""
    _query_of(request)
    job_id, client, tenant = _named(request, response_id)
    try:
        await client.responses.delete(job_id, tenant)
    except NotFoundError:
        raise no_response(response_id) from None
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Return a page of the input items that the response was created with, without those of earlier responses."""
    query = _query_of(request, "after", "limit", "order", *_INCLUDE)
    return InputItemList(request, job_id_of(response_id), query)


def _named(request: Request, response_id: str) -> tuple[str, AsyncClient, str]:
    """Return the job that a path names, the client, and the caller's tenant."""
    return job_id_of(response_id), request.app.state.client, caller_of(request).tenant


def _reading(job_id: str, tenant: str) -> GenerationRequest:
    """Return the request that reads a job from its first chunk on."""
    content = RequestContent(model="", prompts=(), params=SamplingParams())
    cut_at = StreamPosition(job_id, 0, 0)
    return GenerationRequest(content, tenant=tenant, cut_at=cut_at, replay_from_start=True, job_id=job_id)


def _query_of(request: Request, *known: str) -> Mapping[str, str]:
    """Return the query of a request. Raises RequestError for an unknown parameter."""
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise RequestError(f"{name[:64]}: unknown query parameter", code="unknown_field", param=name[:64])
        if name in _INCLUDE and value not in INCLUDABLE:
            names = ", ".join(INCLUDABLE)
            raise RequestError(f"include: {value[:80]!r} is not supported; supported: {names}", param="include")
    return request.query_params


def _truth_of(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise RequestError(f"{name} must be true or false", param=name)
    return value == "true"


async def _wait_for_end(client: AsyncClient, job_id: str, tenant: str) -> None:
    job = await client.attach(job_id, tenant=tenant)
    with suppress(TimeoutError, JobFailedError):
        async with asyncio.timeout(CANCEL_WAIT_S):
            await job.packed_result(lambda _: False)
    await leave(job)
