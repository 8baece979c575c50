"""`POST /v1/responses` and `/v1/responses/input_tokens`: from a body to a job with its conversation.

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
from penstock.contract.job import PackedPrompt, ResponseRecord
from penstock.contract.problems import rename
from penstock.contract.webhook import EVENT_TYPES, MAX_WEBHOOKS
from penstock.gateway.budget import Claim, SharedBudget
from penstock.gateway.request.generation import GenerationRequest, ParsedBody, RequestContent
from penstock.gateway.request.jobs import check_logprobs, count_prompt_tokens
from penstock.gateway.request.reading import RequestReader, caller_of
from penstock.gateway.responses.answers import ResponseAnswer, ResponseAnswers
from penstock.gateway.responses.body import SHOWN_SAMPLING, ResponseBody
from penstock.gateway.responses.compaction import Seal, is_genuine
from penstock.gateway.responses.conversation import Conversations
from penstock.gateway.responses.record import PackedMessages, StoredResponse, new_record
from penstock.gateway.responses.tools import CalledTool
from penstock.gateway.route_doc import NUMBER, RouteDoc, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.flow import until_disconnected, while_connected
from penstock.gateway.stream.writer import CallerGoneError
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import answer_format, names_of, with_defaults
from penstock.queue.broker.producer import ServedPool
from penstock.queue.wire import MAX_BYTES

RESPONSE_EVENTS = tuple(name for name in EVENT_TYPES if name.startswith("response."))


@contextlib.contextmanager
def naming_fields(body: ParsedBody) -> Iterator[None]:
    """Let errors of the block name the fields as the body does."""
    try:
        yield
    except PenstockError as error:
        rename(error, body.content.names)
        raise


class ConversationReader:
    """Reads what the conversation of a request needs beside its body: earlier responses, and the key of the seals."""

    def __init__(self, client: AsyncClient, result_budget: SharedBudget, max_bytes: int) -> None:
        """`max_bytes` limits the texts and calls of a conversation."""
        self._client = client
        self._budget = result_budget
        self._max_bytes = max_bytes

    def conversations_of(self, tenant: str, *, keeps_user: bool = False) -> Conversations:
        """Return the builder of a request's conversation."""
        return Conversations(self._client, tenant, self._max_bytes, self._budget, keeps_user=keeps_user)

    async def conversation_of(
        self, generation: GenerationRequest, body: ParsedBody, conversations: Conversations
    ) -> tuple[PackedMessages, PackedPrompt]:
        """Return the messages of a body's own input, and the whole conversation. The seals of summaries are checked."""
        options = body.options
        if options["seals"]:
            await self._check_seals(generation, options["seals"])
        own = await conversations.resolved(generation.content.prompts[0], options["num_calls"], options["references"])
        return own, await conversations.prompt_of(own, options["instructions"], options["previous"])

    async def seal_of(self, generation: GenerationRequest) -> tuple[bytes, str]:
        """Return the secret of the seals, and the model that this request's summaries are bound to, without aliases."""
        asked = generation.content.model
        pool = await self._client.served_pool(asked, key=generation.key, hides_models=generation.hides_models)
        return await self._client.responses.seal_key(), pool.model if asked in names_of(pool) else asked

    async def _check_seals(self, generation: GenerationRequest, seals: Sequence[Any]) -> None:
        key, model = await self.seal_of(generation)
        for index, *seal in seals:
            if not is_genuine(Seal(*seal), key, tenant=generation.tenant, model=model):
                message = (
                    f"input: item {index}: its encrypted_content was not made for this tenant and model {model!r}, or "
                    "it was changed; compact the conversation again, or leave the item out"
                )
                raise RequestError(message, code="foreign_compaction", param="input")


class CreateResponse:
    """The ASGI app of the route. The record is stored in the same step as the job.

    One script call writes both. So a crash leaves both or none, and a repeated call writes nothing twice.
    """

    schema = ResponseBody
    doc = RouteDoc("Answer with a response, whole or as a stream of typed events.")

    def __init__(
        self,
        client: AsyncClient,
        settings: GatewaySettings,
        reader: RequestReader,
        conversations: ConversationReader,
        answers: ResponseAnswers,
        result_budget: SharedBudget,
    ) -> None:
        self._client = client
        self._settings = settings
        self._reader = reader
        self._conversations = conversations
        self._answers = answers
        self._result_budget = result_budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        async with self._result_budget.taken(caller_of(request).tenant) as claim:
            # Other large bodies wait unread while this one waits for the memory of its answer.
            async with self._reader.held(request, self.schema) as body:
                answer = await self._answer_to(request, body, claim)
                del body
            await answer(scope, receive, send)

    async def _answer_to(self, request: Request, body: ParsedBody, claim: Claim) -> ResponseAnswer:
        generation = self._reader.generation_of(request, body)
        if generation.cut_at is not None:
            message = "after: continue a response with GET /v1/responses/{id}?stream=true&starting_after=<number>"
            raise RequestError(message, param="after")
        with naming_fields(body):
            generation, record = await self._with_record(generation, body)
        source = await new_record(record, claim)
        if body.stream:
            return self._answers.stream(generation, source, claim, ignored=body.ignored)
        return self._answers.body(generation, source, claim, waits=not generation.background, ignored=body.ignored)

    async def _with_record(
        self, generation: GenerationRequest, body: ParsedBody
    ) -> tuple[GenerationRequest, StoredResponse]:
        """Return the request with its whole conversation and its job's id, and the record of the response."""
        conversations = self._conversations.conversations_of(generation.tenant)
        own, prompt = await self._conversations.conversation_of(generation, body, conversations)
        content = replace(generation.content, prompts=[prompt])
        hides = generation.hides_models
        pool = await self._client.served_pool(content.model, key=generation.key, hides_models=hides)
        check_logprobs(content, pool, self._settings.max_logprobs)
        record = _record_of(content, body.options, own, pool)
        max_tokens = content.params.max_tokens
        if generation.lowers_max_tokens and max_tokens is not None and pool.max_model_len:
            record = replace(record, limits=(max_tokens, pool.max_model_len))
        stored = ResponseRecord(record.encode(), round(1000 * self._settings.response_retention_s))
        if len(stored.data) > MAX_BYTES:
            message = f"input: the stored response would have more than {MAX_BYTES} bytes"
            raise TooLargeError(message, param="input")
        generation = replace(
            generation,
            content=content,
            queueing={**generation.queueing, "webhooks": await self._webhooks_of(generation, record)},
            job_id=f"{pool.pool}.{uuid_utils.uuid7()}",
            event_ids=record.stored,
            # A caller waits for a response whose stream is read from its start.
            background=record.background and not body.stream,
            needs_reader=not record.background or generation.queueing.get("reader_grace_s") is not None,
            response=stored if record.stored else None,
        )
        return generation, record

    async def _webhooks_of(self, generation: GenerationRequest, record: StoredResponse) -> Sequence[str]:
        """Return the endpoints that are told of the end: those of the body, or those that wait for such an event.

        As at OpenAI, the end of a background response is told to the endpoints that subscribed to it.
        """
        given = generation.queueing.get("webhooks")
        if given and not record.stored:
            message = "webhooks: only a stored response can be told of; set store to true"
            raise RequestError(message, param="webhooks")
        if given is not None or not (record.stored and record.background):
            return given or ()
        return (await self._client.webhooks.subscribed(generation.tenant, RESPONSE_EVENTS))[:MAX_WEBHOOKS]


def _record_of(content: RequestContent, options: Any, own: PackedMessages, pool: ServedPool) -> StoredResponse:
    # What the caller did not set is as the pool's model recommends it.
    params = with_defaults(content.params, pool)
    return StoredResponse(
        created_s=int(time.time()),
        background=options["background"],
        format=answer_format(content.tool_use, content.params, content.template_kwargs, pool),
        echo=options["echo"][:-1] + b"," + to_json({name: getattr(params, name) for name in SHOWN_SAMPLING})[1:],
        items=[(item_id, text.encode()) for item_id, text in options["items"]],
        messages=own,
        previous=options["previous"] or "",
        stored=options["store"],
        called={name: CalledTool(*called) for name, *called in options["called"]},
    )


class CountInputTokens:
    """The ASGI app that counts the tokens of the conversation that a response with the same body would get."""

    schema = ResponseBody
    doc = RouteDoc(
        "Return how many input tokens a response with this body would have.",
        object_of(object={"const": "response.input_tokens"}, input_tokens=NUMBER),
        has_streams=False,
    )

    def __init__(self, client: AsyncClient, reader: RequestReader, conversations: ConversationReader) -> None:
        self._client = client
        self._reader = reader
        self._conversations = conversations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        body = await self._reader.read(request, self.schema)
        # The key belongs to the response that the caller may create with it.
        generation = replace(self._reader.generation_of(request, body), idempotency_key=None, cut_at=None)
        with naming_fields(body):
            conversations = self._conversations.conversations_of(generation.tenant)
            _, prompt = await self._conversations.conversation_of(generation, body, conversations)
        generation = replace(generation, content=replace(generation.content, prompts=[prompt]))

        async def answer() -> None:
            num_tokens = await count_prompt_tokens(self._client, generation)
            await JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})(scope, receive, send)

        with contextlib.suppress(CallerGoneError):
            await while_connected(answer(), until_disconnected(receive))
