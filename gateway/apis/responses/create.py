"""`POST /v1/responses` and `/v1/responses/input_tokens`: from a body to a job with its conversation.

The conversation has its instructions, the stored responses before it, and its own input. The job of a response has a
stored record.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgpack
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import NotFoundError, PenstockError, RequestError, TooLargeError
from penstock.contract.job import MAX_MESSAGES, PackedPrompt, ResponseRecord
from penstock.contract.problems import rename
from penstock.contract.tasks import GENERATE
from penstock.contract.tools import MAX_CALLS_OF_CHAT
from penstock.contract.webhook import EVENT_TYPES, MAX_WEBHOOKS
from penstock.gateway.apis.responses.answers import ResponseAnswer, ResponseAnswers
from penstock.gateway.apis.responses.auto_compaction import compacted
from penstock.gateway.apis.responses.body import ResponseBody
from penstock.gateway.apis.responses.record import (
    MAX_BYTES_ON_LOOP,
    MAX_SHOWN_CHARS,
    PackedMessages,
    RecordSource,
    StoredResponse,
    bytes_to_claim,
    decoded_record,
    decoding_bytes_to_claim,
    job_id_of,
    new_record,
    place_of,
)
from penstock.gateway.apis.responses.truncation import shortened
from penstock.gateway.budget import Claim, SharedBudget
from penstock.gateway.kept.answer import record_of
from penstock.gateway.request.earlier_reasoning import seal_terms_of, without_foreign_reasoning
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import check_logprobs, count_prompt_tokens
from penstock.gateway.request.kept import generation_of_record
from penstock.gateway.request.reading import RequestReader, caller_of
from penstock.gateway.route_doc import NUMBER, RouteDoc, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.event_stream import until_disconnected, while_connected
from penstock.gateway.stream.writer import CallerGoneError
from penstock.producer.client import AsyncClient
from penstock.producer.client.pool_choice import names_of
from penstock.producer.client.request import answer_format, pack_prompt_of, with_defaults
from penstock.producer.openai.seals import THOUGHTS, Seal
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.responses.answer import SHOWN_SAMPLING, echo_of
from penstock.producer.responses.compaction import is_genuine
from penstock.producer.responses.output import OutputItem, OutputReader, message_of, reading_of
from penstock.producer.responses.tools import CalledTool
from penstock.queue.broker.producer import ServedPool
from penstock.queue.results import PackedResult
from penstock.queue.wire import MAX_BYTES, array_header
from penstock.runtime.event_loop import in_rounds

# The conversation.

MAX_CHAIN = 256
"""Most responses of a chain of `previous_response_id`. Each one is read from Redis by itself."""
MAX_REFERENCED = 64
"""Most responses to which the items of one request may refer."""
MAX_STORED_BYTES = 64 << 20
"""Most bytes of stored records and results that one request reads. They hold more than the messages that are limited:
reasoning, and what repeats their requests."""


READ_RESULT_SIZE = 6
"""What a result takes while its items are read, in sizes of the result. Text beyond ASCII takes up to four bytes for a
character, and is held twice for a moment."""


class Conversations:
    """Builds the conversations of one tenant's requests."""

    def __init__(
        self, client: AsyncClient, tenant: str, max_bytes: int, budget: SharedBudget, *, keeps_user: bool = False
    ) -> None:
        """`max_bytes` limits the texts and calls of a conversation. `budget` has the memory of what is read for it.

        `keeps_user`: also collect the input items that are messages of the user, in `user_items`.
        """
        self.user_items: list[tuple[str, bytes]] = []
        """The messages of the user in the earlier responses: ids, and the other members as JSON in UTF-8."""
        self._keeps_user = keeps_user
        self._client = client
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._budget = budget
        self._num_stored_bytes = 0

    async def resolved(
        self, packed: PackedPrompt, num_calls: int, references: Sequence[tuple[int, Sequence[str]]]
    ) -> PackedMessages:
        """Return a request's own messages. Each reference becomes the items of the stored response that it names."""
        own = PackedMessages.of(packed, num_calls)
        if not references:
            return own
        items = await self._referenced(item_id for _, item_ids in references for item_id in item_ids)
        rows = [_rows_of([items[item_id] for item_id in item_ids]) for _, item_ids in references]
        num_chars = sum(_num_chars(item) for of_place in rows for row in of_place for item in row)
        # An empty message stood for each place.
        num_messages = own.num_messages - len(references)
        self._check(PackedMessages(b"", num_messages + sum(map(len, rows)), 0, own.num_text_bytes + num_chars))
        before, *others = own.split_at([index for index, _ in references])
        parts = [PackedMessages(before, num_messages, *_sizes(own)[1:])]
        for of_place, after in zip(rows, others, strict=True):
            parts += [_packed_message(row) async for row in in_rounds(of_place)]
            parts.append(PackedMessages(after))
        return _joined(parts)

    async def prompt_of(self, own: PackedMessages, instructions: str | None, previous: str | None) -> PackedPrompt:
        """Return the whole conversation. Raises RequestError if it exceeds a limit, or if a response is missing."""
        parts = [own]
        if previous is not None:
            parts = [*await self._chain(previous, own), own]
        if instructions:
            parts.insert(0, _message(pack_prompt_of([{"role": "system", "content": instructions}])))
        whole = _joined(parts)
        self._check(whole)
        data = array_header(whole.num_messages) + whole.data
        return PackedPrompt("messages", data, whole.num_text_bytes, None, whole.num_tool_bytes)

    async def _chain(self, previous: str, own: PackedMessages) -> list[PackedMessages]:
        parts: list[PackedMessages] = []
        num_responses, whole = 0, own
        while previous:
            num_responses += 1
            if num_responses > MAX_CHAIN:
                message = f"previous_response_id: the chain has more than {MAX_CHAIN} responses"
                raise RequestError(message, param="previous_response_id")
            record, output = await self._read(previous)
            parts += [output, record.messages]
            self.user_items[:0] = record.items
            whole = _joined(PackedMessages(b"", *_sizes(part)) for part in (whole, *parts[-2:]))
            self._check(whole)
            previous = record.previous
        return parts[::-1]

    def _check(self, whole: PackedMessages) -> None:
        for what, number, limit in (
            ("messages", whole.num_messages, MAX_MESSAGES),
            ("tool calls", whole.num_calls, MAX_CALLS_OF_CHAT),
            ("bytes", whole.num_bytes, self._max_bytes),
        ):
            if number > limit:
                message = f"input: the conversation with its earlier responses has more than {limit} {what}"
                raise RequestError(message, code="conversation_too_large", param="input")

    async def _read(self, response_id: str) -> tuple[StoredResponse, PackedMessages]:
        """Return a response of the chain, and its output as a message."""
        try:
            job_id = job_id_of(response_id)
            record, items = await self._stored(job_id)
        except NotFoundError:
            message = f"Previous response with id {response_id[:MAX_SHOWN_CHARS]!r} not found."
            raise RequestError(message, code="previous_response_not_found", param="previous_response_id") from None
        if items is None:
            message = f"previous_response_id: response {response_id!r} has not been completed"
            raise RequestError(message, code="previous_response_not_completed", param="previous_response_id")
        return record, _packed_message(items)

    async def _referenced(self, item_ids: Iterable[str]) -> dict[str, OutputItem]:
        """Return the items by their ids. Each response is read once, and only what is named of it is kept."""
        places: dict[str, dict[str, int]] = {}
        for item_id in item_ids:
            if (place := place_of(item_id)) is None:
                raise _no_item(item_id)
            places.setdefault(place[0], {})[item_id] = place[1]
        if len(places) > MAX_REFERENCED:
            raise RequestError(f"input: items refer to more than {MAX_REFERENCED} responses", param="input")
        found: dict[str, OutputItem] = {}
        for job_id, indexes in places.items():
            items = await self._items_of_reference(next(iter(indexes)), job_id)
            for item_id, index in indexes.items():
                if index >= len(items) or items[index].id != item_id:
                    raise _no_item(item_id)
                found[item_id] = items[index]
            self._check(PackedMessages(num_text_bytes=sum(map(_num_chars, found.values()))))
        return found

    async def _items_of_reference(self, item_id: str, job_id: str) -> list[OutputItem]:
        try:
            _, items = await self._stored(job_id)
        except NotFoundError:
            raise _no_item(item_id) from None
        if items is None:
            raise _no_item(item_id)
        return items

    async def _stored(self, job_id: str) -> tuple[StoredResponse, list[OutputItem] | None]:
        """Return a response and its output, or None in place of the output if its job is not done."""
        stored = self._client.servers.of_job(job_id).responses
        num_bytes = await stored.num_bytes(job_id, self._tenant)
        self._count_stored(num_bytes.record)
        async with self._budget.taken(self._tenant, decoding_bytes_to_claim(num_bytes.record)):
            record = await decoded_record(await stored.read(job_id, self._tenant))
            record = replace(record.without_request(), items=record.items_of_user(job_id) if self._keeps_user else [])
        async with self._budget.taken(self._tenant, READ_RESULT_SIZE * bytes_to_claim(num_bytes.result)):
            result = await self._client.packed_result(job_id, tenant=self._tenant)
            if result is None or result.outcome.state != "succeeded":
                return record, None
            self._count_stored(result.num_bytes)
            if result.num_bytes > MAX_BYTES_ON_LOOP:
                return record, await asyncio.to_thread(_items_of, result, record)
            return record, _items_of(result, record)

    def _count_stored(self, num_bytes: int) -> None:
        self._num_stored_bytes += num_bytes
        if self._num_stored_bytes > MAX_STORED_BYTES:
            message = f"input: its earlier responses take more than {MAX_STORED_BYTES} bytes as they are stored"
            raise RequestError(message, code="conversation_too_large", param="input")


def _items_of(result: PackedResult, record: StoredResponse) -> list[OutputItem]:
    reader = OutputReader(result.job_id, record.format, record.called, compaction=record.compaction)
    for _ in reading_of(result, reader):
        pass
    reader.join_texts()
    return reader.items


def _num_chars(item: OutputItem) -> int:
    """Return the characters of an item that come into a conversation."""
    return sum(map(len, item.texts))


def _rows_of(items: Iterable[OutputItem]) -> list[list[OutputItem]]:
    """Return the items in rows, of which each becomes a message: those of one response, one after another."""
    rows = [list(row) for _, row in groupby(items, key=lambda item: item.job_id)]
    return [row for row in rows if any(item.is_shown for item in row)]


def _message(prompt: PackedPrompt, num_calls: int = 0) -> PackedMessages:
    return PackedMessages.of(prompt, num_calls)


def _packed_message(items: Sequence[OutputItem]) -> PackedMessages:
    """Return the message that items of an output stand for; nothing if they are reasoning and a summary alone."""
    if not any(item.is_shown for item in items):
        return PackedMessages()
    message = message_of(items)
    return _message(pack_prompt_of([message]), len(message.get("tool_calls", ())))


def _sizes(messages: PackedMessages) -> tuple[int, int, int, int]:
    return messages.num_messages, messages.num_calls, messages.num_text_bytes, messages.num_tool_bytes


def _joined(parts: Iterable[PackedMessages]) -> PackedMessages:
    found = list(parts)
    sizes = [sum(column) for column in zip(*map(_sizes, found), strict=True)]
    return PackedMessages(b"".join(part.data for part in found), *sizes)


def _no_item(item_id: str) -> RequestError:
    message = f"input: no item with id {item_id[:MAX_SHOWN_CHARS]!r} is stored"
    return RequestError(message, code="item_not_found", param="input")


# From a body to a job.

RESPONSE_EVENTS = tuple(name for name in EVENT_TYPES if name.startswith("response."))


@contextlib.contextmanager
def naming_fields(body: ParsedBody) -> Iterator[None]:
    """Let errors of the block name the fields as the body does."""
    try:
        yield
    except PenstockError as error:
        rename(error, body.names)
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
        self, generation: GenerationRequest, conversations: Conversations
    ) -> tuple[PackedMessages, PackedPrompt]:
        """Return the messages of a body's own input, and the whole conversation."""
        options = generation.body.options
        prompt = generation.body.prompts[0]
        packed = prompt if isinstance(prompt, PackedPrompt) else pack_prompt_of(prompt)
        own = await conversations.resolved(packed, options["num_calls"], options["references"])
        whole = await conversations.prompt_of(own, options["instructions"], options["previous"])
        return own, replace(whole, first_words=packed.first_words)

    async def checked(self, generation: GenerationRequest) -> GenerationRequest:
        """Return the request without reasoning that has no genuine seal. Raises RequestError for such a summary.

        Without its summary a conversation has lost its beginning; without reasoning it goes on.
        """
        options = generation.body.options
        if not (options["seals"] or options[THOUGHTS]):
            return generation
        terms = await seal_terms_of(self._client, generation)
        model = terms["model"]
        for index, *seal in options["seals"]:
            if not is_genuine(Seal(*seal), **terms):
                message = (
                    f"input: item {index}: its encrypted_content was not made for this tenant and model {model!r}, or "
                    "it was changed; compact the conversation again, or leave the item out"
                )
                raise RequestError(message, code="foreign_compaction", param="input")
        return without_foreign_reasoning(generation, terms, "input.reasoning")


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
            if (record := record_of(scope)) is not None:
                await (await self._answer_of_record(record, claim))(scope, receive, send)
                return
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
            generation, record = await self._with_record(generation)
        return self._answer_from(generation, await new_record(record, claim), claim)

    async def _answer_of_record(self, record: Mapping[str, Any], claim: Claim) -> ResponseAnswer:
        """Return the answer that an earlier gateway began."""
        generation = generation_of_record(record)
        source = await new_record(await decoded_record(record["response"]), claim)
        return self._answer_from(generation, source, claim)

    def _answer_from(self, generation: GenerationRequest, source: RecordSource, claim: Claim) -> ResponseAnswer:
        if generation.body.stream:
            return self._answers.stream(generation, source, claim)
        return self._answers.body(generation, source, claim, waits=not generation.options.get("background"))

    async def _with_record(self, generation: GenerationRequest) -> tuple[GenerationRequest, StoredResponse]:
        """Return the request with its whole conversation and its job's id, and the record of the response."""
        generation = await self._conversations.checked(generation)
        conversations = self._conversations.conversations_of(generation.tenant)
        own, prompt = await self._conversations.conversation_of(generation, conversations)
        asked, hides = generation.body.model or None, generation.hides_models
        pool = await self._client.served_pool(asked, key=generation.key, kind=GENERATE, hides_models=hides)
        content, previous = "", generation.body.options["previous"] or ""
        if generation.body.options["compact_threshold"] is not None:
            terms = await seal_terms_of(self._client, generation)
            if (short := await compacted(self._client, generation, prompt, pool, terms)) is not None:
                prompt, content, previous = short.prompt, short.content, ""
                own = _without_instructions(prompt, generation.body.options["instructions"])
        if generation.body.options["truncates"]:
            prompt = await shortened(self._client, generation, prompt, pool)
        body = replace(generation.body, prompts=[prompt], model=asked or pool.model)
        check_logprobs(body, pool, self._settings.max_logprobs)
        record = replace(_record_of(body, own, pool), compaction=content, previous=previous)
        max_tokens = body.params.max_tokens
        if generation.lowers_max_tokens and max_tokens is not None and pool.max_model_len:
            record = replace(record, limits=(max_tokens, pool.max_model_len))
        stored = ResponseRecord(record.encode(), round(1000 * self._settings.response_retention_s))
        if len(stored.data) > MAX_BYTES:
            message = f"input: the stored response would have more than {MAX_BYTES} bytes"
            raise TooLargeError(message, param="input")
        # The record has what the options say, which may be megabytes.
        made = replace(generation, body=replace(body, options={}), event_ids=record.stored).with_options(
            webhooks=await self._webhooks_of(generation, record),
            job_id=pool.new_job_id(),
            # A caller waits for a response whose stream is read from its start.
            background=record.background and not body.stream,
            needs_reader=not record.background or body.queueing.get("reader_grace_s") is not None,
            response=stored if record.stored else None,
        )
        return made, record

    async def _webhooks_of(self, generation: GenerationRequest, record: StoredResponse) -> Sequence[str]:
        """Return the endpoints that are told of the end: those of the body, or those that wait for such an event.

        As at OpenAI, the end of a background response is told to the endpoints that subscribed to it.
        """
        given = generation.body.queueing.get("webhooks")
        if given and not record.stored:
            message = "webhooks: only a stored response can be told of; set store to true"
            raise RequestError(message, param="webhooks")
        if given is not None or not (record.stored and record.background):
            return given or ()
        return (await self._client.webhooks.subscribed(generation.tenant, RESPONSE_EVENTS))[:MAX_WEBHOOKS]


def _without_instructions(prompt: PackedPrompt, instructions: str | None) -> PackedMessages:
    """Return the messages of a whole conversation without the instructions, which are those of one request."""
    messages = msgpack.unpackb(prompt.data)
    return PackedMessages.of(pack_prompt_of(messages[1:] if instructions else messages), 0)


def _record_of(body: ParsedBody, own: PackedMessages, pool: ServedPool) -> StoredResponse:
    options = body.options
    asked = body.model
    model = pool.model if not asked or asked in names_of(pool) else asked
    # What the caller did not set is as the pool's model recommends it.
    params = with_defaults(body.params, pool)
    learned = {"model": body.model} | {name: getattr(params, name) for name in SHOWN_SAMPLING}
    form = answer_format(body.tool_use, body.params, body.template_kwargs, pool)
    return StoredResponse(
        created_s=int(time.time()),
        background=options["background"],
        format=form,
        echo=echo_of(options["echo"], learned),
        items=[(item_id, text.encode()) for item_id, text in options["items"]],
        messages=own,
        stored=options["store"],
        called={name: CalledTool(*called) for name, *called in options["called"]},
        sealed_for=model if options["seals_reasoning"] and form.reasoning_parser != "none" else "",
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
        generation = replace(self._reader.generation_of(request, body), cut_at=None).with_options(idempotency_key=None)
        with naming_fields(body):
            generation = await self._conversations.checked(generation)
            conversations = self._conversations.conversations_of(generation.tenant)
            _, prompt = await self._conversations.conversation_of(generation, conversations)
        generation = replace(generation, body=replace(generation.body, prompts=[prompt]))

        async def answer() -> None:
            num_tokens = await count_prompt_tokens(self._client, generation)
            await JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})(scope, receive, send)

        with contextlib.suppress(CallerGoneError):
            await while_connected(answer(), until_disconnected(receive))
