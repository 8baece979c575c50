"""The Responses API from a body to a job with its conversation, and to the HTTP response."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from typing import Any

import uuid_utils
from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import (
    ConflictError,
    NotFoundError,
    PenstockError,
    RequestError,
    TooLargeError,
    UnavailableError,
    error_of,
)
from penstock.contract.output import Usage
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.problems import rename
from penstock.contract.response_record import ResponseRecord
from penstock.gateway.budget import Claim, SharedBudget
from penstock.gateway.http.entry import caller_of
from penstock.gateway.prompt_counter import count_prompt_tokens
from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.request.reading import generation_request_of, held_body, read_body
from penstock.gateway.responses.body import SHOWN_SAMPLING
from penstock.gateway.responses.compaction import Seal, is_genuine
from penstock.gateway.responses.conversation import Conversations
from penstock.gateway.responses.encoder import (
    ResponseDialect,
    ResponseEncoder,
    Status,
    answer_options,
    end_of,
    open_members,
    output_parts,
    response_parts,
)
from penstock.gateway.responses.output import CHUNKS_PER_ROUND, OutputReader, read_chunk
from penstock.gateway.responses.record import PackedMessages, RecordSource, StoredResponse, new_record, stored_record
from penstock.gateway.responses.tools import CalledTool
from penstock.gateway.route_doc import NUMBER, RouteDoc, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import Answer, StreamAnswer, WholeAnswer, answer_format
from penstock.gateway.stream.dialect import AnswerHead, StreamEncoder
from penstock.gateway.stream.flow import Batch, Ended, Waiting, batches_of, ends_of, until_disconnected, while_connected
from penstock.gateway.stream.generation_request import GenerationRequest, RequestContent, hiding_models, open_jobs
from penstock.gateway.stream.limits import check_logprobs
from penstock.gateway.stream.writer import PIECE_BYTES, CallerGoneError, EventWriter
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import names_of, with_defaults
from penstock.queue.broker.producer import JobStatus, ServedPool
from penstock.queue.msgpack_codec import MAX_BYTES

# The HTTP responses of the Responses API: a stream, a whole response, or the state of an open one.

DIALECT = ResponseDialect()


async def leave(job: AsyncJob) -> None:
    """Stop reading a job. If Redis is unreachable, the next chunk without a reader detaches it."""
    with suppress(UnavailableError):
        await job.detach()


class _ResponseAnswer(Answer):
    """The base of the answers: a request, and the record of the response that it creates or reads."""

    _claim: Claim
    """The memory of the record, until the answer's end."""
    _record: StoredResponse

    def __init__(
        self,
        request: Request,
        generation: GenerationRequest,
        source: RecordSource,
        claim: Claim | None = None,
        *,
        starting_after: int = -1,
        ignored: Sequence[str] = (),
    ) -> None:
        """`claim`: the memory that the source's record takes already. `ignored` is that of `ParsedBody`."""
        super().__init__(request, generation, DIALECT, {}, ignored)
        self._source = source
        self._first_claim = claim
        self._starting_after = starting_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Get the record and send the answer. Raises what the source of the record raises."""
        # An answer has one claim for records. With two it might wait for one while it holds the other.
        first = self._first_claim
        taken = self._result_budget.taken(self._generation.tenant) if first is None else nullcontext(first)
        async with taken as self._claim:
            self._record = await self._source(self._claim)
            await super().__call__(scope, receive, send)

    async def _learn(self, job: AsyncJob) -> None:
        """Read the record of a job that an earlier request with the same idempotency key created.

        Raises ConflictError if one of both requests stores its response and the other does not.
        """
        if job.id == self._generation.job_id:
            return
        client, tenant = self._client, self._generation.tenant
        if not self._record.stored:
            with suppress(NotFoundError):
                await client.responses.num_bytes(job.id, tenant)
                raise _other_store("is stored, and this request has store=false")
            return
        # The other record replaces this one, whose memory the claim gives back before it grows.
        self._source = stored_record(client, job.id, tenant)
        del self._record
        try:
            self._record = await self._source(self._claim)
        except NotFoundError:
            raise _other_store("is not stored: it was created with store=false, or deleted since") from None

    def _head_at(self, job: AsyncJob, *, finished_s: int = 0) -> AnswerHead:
        record, content = self._record, self._generation.content
        options = answer_options(record, starting_after=self._starting_after, finished_s=finished_s)
        return AnswerHead([job.id], content.model, record.created_s, content.params, record.form, options=options)


def _other_store(reason: str) -> ConflictError:
    message = f"this idempotency key belongs to a response that {reason}"
    return ConflictError(message, code="idempotency_conflict", param="idempotency_key")


class ResponseStream(_ResponseAnswer, StreamAnswer):
    """The stream of a response, new or stored. A failed job is an event of it, unless nothing has been sent yet."""

    _encoder: ResponseEncoder | None = None

    def _error_event(self, error: PenstockError) -> bytes:
        return super()._error_event(error) if self._encoder is None else self._encoder.error(error)

    async def _send_events(self, writer: EventWriter) -> None:
        async with open_jobs(self._client, self._generation, has_begun=lambda: writer.started) as jobs:
            (job,) = jobs
            await self._learn_limit(job)
            writer.headers.update(self._response_headers(jobs))
            await self._learn(job)
            self._show_position(job, writer)
            self._encoder = encoder = DIALECT.stream(self._head_at(job))
            # The caller may need the id before the first token. Progress follows the events of the opening.
            generation = self._generation
            if self._record.background or generation.cut_at is not None or generation.shows_waiting:
                await self._send_all(encoder.opening(), writer)
            await self._relay_events(job, encoder, writer)

    async def _relay_events(self, job: AsyncJob, encoder: ResponseEncoder, writer: EventWriter) -> None:
        num_tokens = 0
        async with aclosing(batches_of([job], with_waiting=self._generation.shows_waiting)) as batches:
            async for batch in batches:
                if isinstance(batch, Waiting):
                    await writer.write(encoder.waiting(batch.job_id, batch.update))
                    continue
                outcome = batch[-1].outcome
                failed = outcome is not None and outcome.state != "done"
                if outcome is not None and failed and self._generation.cut_at is None and not writer.started:
                    raise error_of(outcome)
                await self._write(encoder, batch, writer)
                num_tokens += sum(len(chunk.token_ids) for chunk in batch)
                if outcome is not None:
                    self._meter.ended(num_tokens)
                    status = await job.status()
                    await self._send_all(encoder.closing(outcome, status.finished_ms // 1000), writer)

    async def _write(self, encoder: StreamEncoder, batch: Batch, writer: EventWriter) -> None:
        # Events that the caller has already got give no parts, so a long batch would not be interrupted.
        for at in range(0, len(batch), CHUNKS_PER_ROUND):
            if at:
                await self._yielder.wait()
            await super()._write(encoder, batch[at : at + CHUNKS_PER_ROUND], writer)

    async def _send_all(self, parts: Iterator[bytes], writer: EventWriter) -> None:
        piece, size = list[bytes](), 0
        for part in parts:
            piece.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                await writer.write(b"".join(piece))
                piece, size = [], 0
                await self._yielder.wait()
        if size:
            await writer.write(b"".join(piece))


class ResponseWhole(_ResponseAnswer, WholeAnswer):
    """The whole response of a new job, after its end. A failed job is an error."""

    async def _answer(self, send: Send) -> None:
        async with open_jobs(self._client, self._generation) as jobs:
            (job,) = jobs
            await self._learn(job)
            (end,) = await ends_of(jobs)
            status = await job.status()
        await self._send_whole(job, end, status, send)

    async def _send_whole(self, job: AsyncJob, end: Ended, status: JobStatus, send: Send) -> None:
        if end.num_bytes > PIECE_BYTES:
            await self._yielder.wait()
        encoder = DIALECT.whole(self._head_at(job, finished_s=status.finished_ms // 1000))
        await self._learn_limit(job)
        await self._learn_exact_limit([job], [end])
        await self._send_body(self._parts(encoder, [job], [end]), [job], send)


class ResponseState(ResponseWhole):
    """The present state of a response: whole if its job is done, and what there is of it otherwise."""

    async def _answer(self, send: Send) -> None:
        async with open_jobs(self._client, self._generation) as jobs:
            (job,) = jobs
            await self._learn(job)
            status = await job.status()
            if status.outcome is not None and status.outcome.state == "done":
                (end,) = await ends_of(jobs)
                await self._send_whole(job, end, status, send)
            else:
                await self._send_body(self._unfinished_parts(job, status), jobs, send)
            await leave(job)

    async def _unfinished_parts(self, job: AsyncJob, status: JobStatus) -> AsyncGenerator[bytes, None]:
        record = self._record
        output: Iterable[bytes] = ()
        if status.outcome is None:
            members = open_members(_open_status(status, record))
        else:
            reader = OutputReader(job.id, record.form, record.called)
            usage = await self._read_all(job, reader)
            members = end_of(record, status.outcome, status.finished_ms // 1000, usage, reader).members
            output = output_parts(reader.items)
        for part in response_parts(job.id, record, members, output):
            yield part

    async def _read_all(self, job: AsyncJob, reader: OutputReader) -> Usage | None:
        """Read the chunks of a job that was cut short."""
        usage = None
        async with aclosing(job.batches()) as batches:
            async for batch in batches:
                for at, chunk in enumerate(batch):
                    if at % CHUNKS_PER_ROUND == 0:
                        await self._yielder.wait()
                    read_chunk(chunk, reader)
                    usage = chunk.usage or usage
        for _ in reader.end():
            pass
        return usage


def _open_status(status: JobStatus, record: StoredResponse) -> Status:
    return "queued" if record.background and status.state == "queued" else "in_progress"


# `POST /v1/responses` and `/v1/responses/input_tokens`: from a body to a job with its conversation, and to its answer.
#
# The job of a response has a stored record.

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
