"""`POST /v1/responses`: from a body to a job with a stored record, and to its answer."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import uuid_utils
from fastapi import Request
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError, TooLargeError
from penstock.contract.problems import rename
from penstock.contract.response_record import ResponseRecord
from penstock.gateway.authentication import caller_of
from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.request.parsing import generation_request_of, held_body
from penstock.gateway.responses.answers import ResponseState, ResponseStream, ResponseWhole
from penstock.gateway.responses.body import SHOWN_SAMPLING
from penstock.gateway.responses.conversation import Conversations
from penstock.gateway.responses.record import PackedMessages, StoredResponse
from penstock.gateway.responses.stored import new_record
from penstock.gateway.responses.tools import CalledTool
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.shared_budget import Claim, SharedBudget
from penstock.gateway.stream.answer import Answer, answer_format
from penstock.gateway.stream.generation_request import GenerationRequest, RequestContent
from penstock.gateway.stream.limits import check_logprobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import with_defaults
from penstock.queue.broker.producer import ServedPool
from penstock.queue.msgpack_codec import MAX_BYTES

FORM = "response"
"""The key of the body's schema in `parsed_body.BODIES`."""


class CreateResponse:
    """The ASGI app of the route. The record is stored in the same step as the job.

    One script call writes both. So a crash leaves both or none, and a repeated call writes nothing twice.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        budget: SharedBudget = request.app.state.result_budget
        async with budget.taken(caller_of(request).tenant) as claim:
            # Other large bodies wait unread while this one waits for the memory of its answer.
            async with held_body(request, FORM) as body:
                answer = await self._answer_to(request, body, claim)
                del body
            await answer(scope, receive, send)

    async def _answer_to(self, request: Request, body: ParsedBody, claim: Claim) -> Answer:
        generation = generation_request_of(request, body)
        if generation.cut_at is not None:
            message = "after: continue a response with GET /v1/responses/{id}?stream=true&starting_after=<number>"
            raise RequestError(message, param="after")
        try:
            generation, record = await _with_record(request, generation, body)
        except PenstockError as error:
            rename(error, body.content.names)
            raise
        source = await new_record(record, claim)
        if body.stream:
            return ResponseStream(request, generation, source, claim, ignored=body.ignored)
        if generation.background:
            return ResponseState(request, generation, source, claim, ignored=body.ignored)
        return ResponseWhole(request, generation, source, claim, ignored=body.ignored)


async def _with_record(
    request: Request, generation: GenerationRequest, body: ParsedBody
) -> tuple[GenerationRequest, StoredResponse]:
    """Return the request with its whole conversation and its job's id, and the record of the response."""
    client: AsyncClient = request.app.state.client
    settings: GatewaySettings = request.app.state.settings
    options, content = body.options, generation.content
    budget: SharedBudget = request.app.state.result_budget
    conversations = Conversations(client, generation.tenant, settings.max_body_bytes, budget)
    own = await conversations.resolved(content.prompts[0], options["num_calls"], options["references"])
    prompt = await conversations.prompt_of(own, options["instructions"], options["previous"])
    content = replace(content, prompts=[prompt])
    pool = await client.served_pool(content.model, key=generation.key)
    check_logprobs(content, pool, settings.max_logprobs)
    record = _record_of(content, options, own, pool)
    stored = ResponseRecord(record.encode(), round(1000 * settings.response_retention_s))
    if len(stored.data) > MAX_BYTES:
        message = f"input: the stored response would have more than {MAX_BYTES} bytes"
        raise TooLargeError(message, param="input")
    generation = replace(
        generation,
        content=content,
        job_id=f"{pool.pool}.{uuid_utils.uuid7()}",
        event_ids=record.stored,
        background=record.background,
        response=stored if record.stored else None,
    )
    return generation, record


def _record_of(content: RequestContent, options: Any, own: PackedMessages, pool: ServedPool) -> StoredResponse:
    # What the caller did not set is as the pool's model recommends it.
    params = with_defaults(content.params, pool)
    return StoredResponse(
        created_s=int(time.time()),
        background=options["background"],
        form=answer_format(content, pool),
        echo=options["echo"][:-1] + b"," + to_json({name: getattr(params, name) for name in SHOWN_SAMPLING})[1:],
        items=[(item_id, text.encode()) for item_id, text in options["items"]],
        messages=own,
        previous=options["previous"] or "",
        stored=options["store"],
        called={name: CalledTool(*called) for name, *called in options["called"]},
    )
