"""The routes of the Responses API.

`POST /v1/responses/compact` makes a conversation the user's messages and a summary of the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.durability import TOKEN_DURABILITY, Durability, checked_durability
from penstock.contract.errors import InvariantError, JobFailedError, NotFoundError, PromptTooLongError, RequestError
from penstock.contract.job import RETURN_PROGRESS, SubmitOptions
from penstock.contract.output import Usage
from penstock.gateway.apis.responses.answers import ResponseAnswers, leave
from penstock.gateway.apis.responses.body import CompactBody, ResponseBody, ResponseOfJob
from penstock.gateway.apis.responses.create import ConversationReader, CountInputTokens, CreateResponse, naming_fields
from penstock.gateway.apis.responses.record import (
    MAX_SHOWN_CHARS,
    bytes_to_claim,
    compaction_id,
    input_item_id,
    job_id_of,
    no_response,
    record_of,
    stored_record,
)
from penstock.gateway.budget import SharedBudget
from penstock.gateway.http.dialect import Complete, HttpDialect, JobBody, Services
from penstock.gateway.request.earlier_reasoning import seal_terms_of
from penstock.gateway.request.generation import GenerationRequest, StreamPosition
from penstock.gateway.request.reading import MAX_NUMBER_DIGITS, RequestReader, caller_of
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import Answers, WholeAnswer
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.writer import PIECE_BYTES, BodyWriter, CallerGoneError
from penstock.producer.client import AsyncClient
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.responses.answer import response_id_of, usage_of
from penstock.producer.responses.body import INCLUDABLE
from penstock.producer.responses.compaction import MIN_SUMMARY_TOKENS, sealed, summary_limit
from penstock.producer.responses.output import OutputReader, reading_of
from penstock.queue.results import PackedResult
from penstock.runtime.event_loop import LoopYielder

# `POST /v1/responses/compact`.

_ANSWER = object_of(
    id=TEXT,
    object={"const": "response.compaction"},
    created_at=NUMBER,
    output=list_of({"type": "object"}),
    usage={"type": "object"},
)


class Compact:
    """The ASGI app of the route. The summary is an ordinary job, whose text the answer seals. Nothing is stored."""

    schema = CompactBody
    doc = RouteDoc("Shorten a conversation to the user's messages and a sealed summary of the rest.", _ANSWER)

    def __init__(
        self, client: AsyncClient, reader: RequestReader, conversations: ConversationReader, answers: Answers
    ) -> None:
        self._client = client
        self._reader = reader
        self._conversations = conversations
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        async with self._reader.held(request, self.schema) as body:
            answer = await self._answer_to(request, body)
            del body
        await answer(scope, receive, send)

    async def _answer_to(self, request: Request, body: ParsedBody) -> WholeAnswer:
        generation = self._reader.generation_of(request, body).with_options(lower_max_tokens=True)
        with naming_fields(body):
            generation = await self._conversations.checked(generation)
            conversations = self._conversations.conversations_of(generation.tenant, keeps_user=True)
            _, prompt = await self._conversations.conversation_of(generation, conversations)
            seal = await seal_terms_of(self._client, generation)
        max_tokens = summary_limit(prompt.num_text_bytes + prompt.num_tool_bytes)
        params = body.params.model_copy(update={"max_tokens": max_tokens})
        kept = [(item_id, text.encode()) for item_id, text in body.options["kept"]]
        options = {"kept": [*conversations.user_items, *kept], "seal": seal}
        asked = replace(generation.body, prompts=[prompt], params=params, options=options)
        return self._answers.whole(self._answers.plan(replace(generation, body=asked), CompactionDialect()))


class CompactionDialect(Dialect):
    """Answers of `/v1/responses/compact`."""

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Raise InvariantError, because no body of this route asks for a stream."""
        raise InvariantError("a compaction has no stream")

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of the answer."""
        return CompactionEncoder(head)


class CompactionEncoder(WholeEncoder):
    """Encodes the messages of the user and the sealed summary."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._kept: Sequence[tuple[str, bytes]] = head.options["kept"]

    def head(self) -> bytes:
        """Return nothing: an error must come before the first part."""
        return b""

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the answer up to the usage. Raises what `_summary_of` raises before the first part."""
        job_id = result.job_id
        summary = self._summary_of(result)
        begun = {"id": response_id_of(job_id), "object": "response.compaction", "created_at": self._head.created_s}
        yield to_json(begun)[:-1] + b',"output":['
        for number, (item_id, text) in enumerate(self._kept):
            yield b'{"id":' + to_json(item_id or input_item_id(number, job_id)) + b","
            for at in range(1, len(text), PIECE_BYTES):
                yield text[at : at + PIECE_BYTES]
            yield b","
        content = sealed(summary, **self._head.options["seal"])
        yield to_json({"id": compaction_id(job_id), "type": "compaction", "encrypted_content": content})

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage."""
        (usage,) = usages
        used = None if usage is None else usage_of(usage)
        return b'],"usage":' + to_json(used) + b"}"

    def _summary_of(self, result: PackedResult) -> str:
        """Return the summary. Raises PromptTooLongError if none fits, and JobFailedError if there is none."""
        reader = OutputReader(result.job_id, self._head.format)
        for _ in reading_of(result, reader):
            pass
        summary = "".join(text for item in reader.items if item.kind == "message" for text in item.texts).strip()
        num_tokens = 0 if result.usage is None else result.usage.completion_tokens
        if reader.finish_reason == "length" and num_tokens < MIN_SUMMARY_TOKENS:
            message = (
                f"input: the conversation leaves {num_tokens} tokens of the model's context, too few for its summary; "
                f"it must leave at least {MIN_SUMMARY_TOKENS}, so leave out its longest items"
            )
            raise PromptTooLongError(message, param="input")
        if not summary:
            message = "the model wrote no summary; the conversation is unchanged, so send it again"
            raise JobFailedError(message, code="no_summary")
        return summary


# The list of a stored response's input items, sent in pieces.

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
"""Items of one page."""
_ORDERS = ("asc", "desc")

Items = Sequence[tuple[str, bytes]]
"""Ids and the other members as JSON."""


class InputItemList(Response):
    """One page of a stored response's input items."""

    def __init__(
        self,
        client: AsyncClient,
        result_budget: SharedBudget,
        yielder: LoopYielder,
        job_id: str,
        tenant: str,
        query: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> None:
        """`query` asks for the page. timeout_s: how long the caller may delay the body (see BodyWriter)."""
        super().__init__()
        self._client = client
        self._budget = result_budget
        self._yielder = yielder
        self._job_id = job_id
        self._tenant = tenant
        self._query = query
        self._timeout_s = timeout_s

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


class ResponseRoutes:
    """The routes of stored responses."""

    def __init__(
        self,
        client: AsyncClient,
        settings: GatewaySettings,
        answers: ResponseAnswers,
        result_budget: SharedBudget,
        yielder: LoopYielder,
    ) -> None:
        self._client = client
        self._timeout_s, self._token_durability = settings.send_timeout_s, settings.token_durability
        self._answers = answers
        self._result_budget = result_budget
        self._yielder = yielder
        self.router = APIRouter()
        path = "/v1/responses/{response_id}"
        self.router.add_api_route(path, self.retrieve_response)
        self.router.add_api_route(f"{path}/cancel", self.cancel_response, methods=["POST"])
        self.router.add_api_route(path, self.delete_response, methods=["DELETE"])
        self.router.add_api_route(f"{path}/input_items", self.list_input_items)

    async def retrieve_response(self, request: Request, response_id: str) -> Response:
        """Return a stored response, or with `?stream=true` its events, after the one that `starting_after` names.

        With `?return_progress=true`, further events report queue position and prompt progress before the first token.
        With `?token_durability=fsync` or `replicated`, output comes once Redis's disk, or a replica, has it.
        """
        known = "stream", "starting_after", RETURN_PROGRESS, "include_obfuscation", TOKEN_DURABILITY
        query = _query_of(request, *known, *_INCLUDE)
        is_stream, with_progress = _truth_of(query, "stream"), _truth_of(query, RETURN_PROGRESS)
        starting_after = query.get("starting_after", "-1")
        if query.get("include_obfuscation", "false") != "false":
            raise RequestError("include_obfuscation: not supported; omit it or send false", param="include_obfuscation")
        for name in () if is_stream else ("starting_after", RETURN_PROGRESS):
            if name in query:
                raise RequestError(f"{name}: allowed only when stream is true", param=name)
        if starting_after != "-1" and not (starting_after.isdecimal() and len(starting_after) <= MAX_NUMBER_DIGITS):
            raise RequestError("starting_after must be the sequence number of an event", param="starting_after")
        job_id, tenant = job_id_of(response_id), caller_of(request).tenant
        record = stored_record(self._client, job_id, tenant)
        durability = checked_durability(query.get(TOKEN_DURABILITY), TOKEN_DURABILITY) or self._token_durability
        reading = _reading(job_id, tenant, return_progress=with_progress, token_durability=durability)
        if is_stream:
            return self._answers.stream(reading, record, starting_after=int(starting_after))
        return self._answers.body(reading, record, waits=False)

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Cancel a background response and return it. A response that has ended stays as it is."""
        _query_of(request)
        job_id, tenant = job_id_of(response_id), caller_of(request).tenant
        stored = stored_record(self._client, job_id, tenant)
        async with self._result_budget.taken(tenant) as claim:
            is_background = (await stored(claim)).background
        if not is_background:
            message = "Only responses created with background=true can be cancelled; close the connection of this one."
            raise RequestError(message, code="not_a_background_response", param="response_id")
        if await self._client.cancel(job_id, tenant=tenant) == "cancelling":
            await _wait_for_end(self._client, job_id, tenant)
        reading = _reading(job_id, tenant, token_durability=self._token_durability)
        return self._answers.body(reading, stored, waits=False)

    async def delete_response(self, request: Request, response_id: str) -> dict[str, Any]:
        """Delete a stored response with its output. A response that has not ended is canceled.

        With `?durability=fsync` or `replicated`, the answer comes once Redis's disk, or a replica, has the deletion.
        """
        durability = checked_durability(_query_of(request, "durability").get("durability"))
        try:
            job_id = job_id_of(response_id)
            await self._client.servers.of_job(job_id).responses.delete(job_id, caller_of(request).tenant, durability)
        except NotFoundError:
            raise no_response(response_id) from None
        return {"id": response_id, "object": "response", "deleted": True}

    async def list_input_items(self, request: Request, response_id: str) -> Response:
        """Return a page of the input items that the response was created with, without those of earlier responses."""
        query = _query_of(request, "after", "limit", "order", *_INCLUDE)
        return InputItemList(
            self._client,
            self._result_budget,
            self._yielder,
            job_id_of(response_id),
            caller_of(request).tenant,
            query,
            timeout_s=self._timeout_s,
        )


def _reading(
    job_id: str, tenant: str, *, return_progress: bool = False, token_durability: Durability | None
) -> GenerationRequest:
    """Return the request that reads a job from its first chunk on."""
    body = ParsedBody(queueing={"return_progress": return_progress})
    cut_at = StreamPosition(job_id, 0, 0)
    options: SubmitOptions = {"tenant": tenant, "job_id": job_id, "token_durability": token_durability}
    return GenerationRequest(body, options, cut_at, replay_from_start=True)


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


def _routes(services: Services) -> list[Route | APIRouter]:
    client, settings, reader, budget = services.client, services.settings, services.reader, services.result_budget
    conversations = ConversationReader(client, budget, settings.max_body_bytes)
    answers = ResponseAnswers(client, services.answers, services.sender, budget, services.yielder)
    create = CreateResponse(client, settings, reader, conversations, answers, budget)
    count_tokens = CountInputTokens(client, reader, conversations)
    compact = Compact(client, reader, conversations, services.answers)
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count_tokens, methods=["POST"]),
        Route("/v1/responses/compact", compact, methods=["POST"]),
        ResponseRoutes(client, settings, answers, budget, services.yielder).router,
    ]


def _with_conversation(services: Services) -> Complete:
    """Return what adds the whole conversation to the request of a job that holds a response."""
    reader = ConversationReader(services.client, services.result_budget, services.settings.max_body_bytes)

    async def complete(generation: GenerationRequest) -> GenerationRequest:
        generation = await reader.checked(generation)
        _, prompt = await reader.conversation_of(generation, reader.conversations_of(generation.tenant))
        return replace(generation, body=replace(generation.body, prompts=[prompt]))

    return complete


RESPONSES = HttpDialect(
    _routes,
    bodies=(ResponseBody, CompactBody),
    socket_bodies={"/v1/responses": ResponseBody},
    job_bodies={"/v1/responses": JobBody(ResponseOfJob, _with_conversation)},
)
