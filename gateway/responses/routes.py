"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.routing import Route

from penstock.contract.errors import JobFailedError, NotFoundError, RequestError
from penstock.contract.job import SamplingParams
from penstock.gateway.authentication import caller_of
from penstock.gateway.request.parsing import MAX_NUMBER_DIGITS
from penstock.gateway.responses.answers import ResponseState, ResponseStream, leave
from penstock.gateway.responses.body import INCLUDABLE
from penstock.gateway.responses.compact import Compact
from penstock.gateway.responses.create import CountInputTokens, CreateResponse
from penstock.gateway.responses.ids import job_id_of, no_response
from penstock.gateway.responses.input_items import InputItemList
from penstock.gateway.responses.stored import stored_record
from penstock.gateway.stream.generation_request import GenerationRequest, RequestContent, StreamPosition
from penstock.producer.client import AsyncClient

CANCEL_WAIT_S = 2.0
"""Seconds that a cancellation waits for a running job to end, which usually takes a step."""
RETURN_PROGRESS = "return_progress"
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
        reading = replace(_reading(job_id, tenant), return_progress=with_progress)
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
