"""`POST /v1/responses` and `/v1/responses/input_tokens`: from a body to a job with its conversation, and to its answer.

The job of a response has a stored record.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import uuid_utils
from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError, TooLargeError
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.problems import rename
from penstock.contract.response_record import ResponseRecord
from penstock.gateway.authentication import caller_of
from penstock.gateway.prompt_counter import count_prompt_tokens
from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.request.parsing import generation_request_of, held_body, read_body
from penstock.gateway.responses.answers import ResponseState, ResponseStream, ResponseWhole
from penstock.gateway.responses.body import SHOWN_SAMPLING
from penstock.gateway.responses.compaction import Seal, is_genuine
from penstock.gateway.responses.conversation import Conversations
from penstock.gateway.responses.record import PackedMessages, StoredResponse
from penstock.gateway.responses.stored import new_record
from penstock.gateway.responses.tools import CalledTool
from penstock.gateway.route_doc import NUMBER, RouteDoc, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.shared_budget import Claim, SharedBudget
from penstock.gateway.stream.answer import Answer, answer_format
from penstock.gateway.stream.caller import CallerGoneError, until_disconnected, while_connected
from penstock.gateway.stream.generation_request import GenerationRequest, RequestContent, hiding_models
from penstock.gateway.stream.limits import check_logprobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import names_of, with_defaults
from penstock.queue.broker.producer import ServedPool
from penstock.queue.msgpack_codec import MAX_BYTES

FORM = "response"
"""The key of the body's schema in `parsed_body.BODIES`."""


class CreateResponse:
    """The ASGI app of the route. The record is stored in the same step as the job.

    One script call writes both. So a crash leaves both or none, and a repeated call writes nothing twice.
    """

    form = FORM
    doc = RouteDoc("Answer with a response, whole or as a stream of typed events.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        budget: SharedBudget = request.app.state.result_budget
        async with budget.taken(caller_of(request).tenant) as claim:
            # Other large bodies wait unread while this one waits for the memory of its answer.
            async with held_body(request, self.form) as body:
                answer = await self._answer_to(request, body, claim)
                del body
            await answer(scope, receive, send)

    async def _answer_to(self, request: Request, body: ParsedBody, claim: Claim) -> Answer:
        generation = generation_request_of(request, body)
        if generation.cut_at is not None:
            message = "after: continue a response with GET /v1/responses/{id}?stream=true&starting_after=<number>"
            raise RequestError(message, param="after")
        with naming_fields(body):
            generation, record = await _with_record(request, generation, body)
        source = await new_record(record, claim)
        if body.stream:
            return ResponseStream(request, generation, source, claim, ignored=body.ignored)
        if generation.background:
            return ResponseState(request, generation, source, claim, ignored=body.ignored)
        return ResponseWhole(request, generation, source, claim, ignored=body.ignored)


class CountInputTokens:
    """The ASGI app that counts the tokens of the conversation that a response with the same body would get."""

    form = FORM
    doc = RouteDoc(
        "Return how many input tokens a response with this body would have.",
        object_of(object={"const": "response.input_tokens"}, input_tokens=NUMBER),
        has_streams=False,
    )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        body = await read_body(request, self.form)
        # The key belongs to the response that the caller may create with it.
        generation = replace(generation_request_of(request, body), idempotency_key=None, cut_at=None)
        with naming_fields(body):
            _, prompt = await conversation_of(request, generation, body, conversations_of(request, generation))
        generation = replace(generation, content=replace(generation.content, prompts=[prompt]))

        async def answer() -> None:
            num_tokens = await count_prompt_tokens(request.app.state.client, generation)
            await JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})(scope, receive, send)

        with contextlib.suppress(CallerGoneError):
            await while_connected(answer(), until_disconnected(receive))


@contextlib.contextmanager
def naming_fields(body: ParsedBody) -> Iterator[None]:
    """Let errors of the block name the fields as the body does."""
    try:
        yield
    except PenstockError as error:
        rename(error, body.content.names)
        raise


def conversations_of(request: Request, generation: GenerationRequest, *, keeps_user: bool = False) -> Conversations:
    """Return the builder of a request's conversation."""
    state = request.app.state
    max_bytes = state.settings.max_body_bytes
    return Conversations(state.client, generation.tenant, max_bytes, state.result_budget, keeps_user=keeps_user)


async def conversation_of(
    request: Request, generation: GenerationRequest, body: ParsedBody, conversations: Conversations
) -> tuple[PackedMessages, PackedPrompt]:
    """Return the messages of a body's own input, and the whole conversation. The seals of summaries are checked."""
    client: AsyncClient = request.app.state.client
    options = body.options
    if options["seals"]:
        await _check_seals(client, generation, options["seals"])
    own = await conversations.resolved(generation.content.prompts[0], options["num_calls"], options["references"])
    return own, await conversations.prompt_of(own, options["instructions"], options["previous"])


async def seal_of(client: AsyncClient, generation: GenerationRequest) -> tuple[bytes, str]:
    """Return the secret of the seals, and the model that this request's summaries are bound to, without its aliases."""
    asked = generation.content.model
    with hiding_models(generation):
        pool = await client.served_pool(asked, key=generation.key)
    return await client.responses.seal_key(), pool.model if asked in names_of(pool) else asked


async def _check_seals(client: AsyncClient, generation: GenerationRequest, seals: Sequence[Any]) -> None:
    key, model = await seal_of(client, generation)
    for index, *seal in seals:
        if not is_genuine(Seal(*seal), key, tenant=generation.tenant, model=model):
            message = (
                f"input: item {index}: its encrypted_content was not made for this tenant and model {model!r}, or it "
                "was changed; compact the conversation again, or leave the item out"
            )
            raise RequestError(message, code="foreign_compaction", param="input")


async def _with_record(
    request: Request, generation: GenerationRequest, body: ParsedBody
) -> tuple[GenerationRequest, StoredResponse]:
    """Return the request with its whole conversation and its job's id, and the record of the response."""
    client: AsyncClient = request.app.state.client
    settings: GatewaySettings = request.app.state.settings
    own, prompt = await conversation_of(request, generation, body, conversations_of(request, generation))
    options, content = body.options, replace(generation.content, prompts=[prompt])
    with hiding_models(generation):
        pool = await client.served_pool(content.model, key=generation.key)
    check_logprobs(content, pool, settings.max_logprobs)
    record = _record_of(content, options, own, pool)
    max_tokens = content.params.max_tokens
    if generation.lowers_max_tokens and max_tokens is not None and pool.max_model_len:
        record = replace(record, limits=(max_tokens, pool.max_model_len))
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
