"""Answers of the generation routes in any dialect: one JSON object, or a stream of events.

A response sends nothing until the queue delivers the first chunk or a refusal, so that a refusal gets a real HTTP
status.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import NotFoundError, PenstockError, UnavailableError, error_of
from penstock.contract.job import lowered_max_tokens, pool_of
from penstock.contract.output import Usage
from penstock.contract.tools import reasoning_parser_for
from penstock.gateway.budget import Claim, SharedBudget
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.request.reading import generation_request_of, read_body
from penstock.gateway.route_doc import RouteDoc
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.flow import (
    Batch,
    Ended,
    EventSink,
    Waiting,
    batches_of,
    ends_of,
    is_large,
    until_disconnected,
    waiting_comment,
    while_connected,
)
from penstock.gateway.stream.framing import framing_of, note_broken_event
from penstock.gateway.stream.generation_request import GenerationRequest, RequestContent, naming_prompt, open_jobs
from penstock.gateway.stream.limits import check_logprobs, check_num_jobs
from penstock.gateway.stream.writer import (
    KEEP_ALIVE,
    KEEP_ALIVE_BETWEEN_IDS,
    PIECE_BYTES,
    BodyWriter,
    CallerGoneError,
    EventWriter,
    direct_body_of,
)
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.building import no_call_format
from penstock.producer.client.request import choose_pool
from penstock.producer.openai.parsed_text import PLAIN, AnswerFormat
from penstock.producer.openai.tool_calls import CALL_FORMS
from penstock.queue.broker.producer import ServedPool
from penstock.queue.results import PackedResult
from penstock.runtime.cooperative import LoopYielder

# The base of the HTTP responses that read jobs, and of those that stream events.


class JobResponse(Response):
    """A response about jobs. Called as an ASGI app, it raises a PenstockError only if nothing has been sent yet."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._client: AsyncClient = request.app.state.client
        self._settings: GatewaySettings = request.app.state.settings
        self._metrics: GatewayMetrics = request.app.state.metrics
        self._yielder: LoopYielder = request.app.state.yielder
        self._result_budget: SharedBudget = request.app.state.result_budget


class EventStream(JobResponse):
    """A response of events. It sends keep-alives while it is silent, and reports an error as its last event."""

    @property
    def _comment(self) -> bytes:
        """The comment that a silent stream sends if it has no `_keep_alive`."""
        return KEEP_ALIVE

    @property
    def _keep_alive(self) -> bytes | None:
        """The bytes that a silent stream sends. None: `_comment`, with the position of a waiting job."""
        return None

    @property
    def _is_new(self) -> bool:
        """Whether the stream begins with its job's first token."""
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the caller leaves."""
        settings, keep_alive = self._settings, self._keep_alive or self._comment
        writer = EventWriter(send, framing_of(scope), keep_alive=keep_alive, body=direct_body_of(scope))
        watch = writer.watch(
            first_wait_s=settings.first_chunk_wait_s,
            interval_s=settings.keep_alive_s,
            send_timeout_s=settings.send_timeout_s,
        )
        with contextlib.suppress(CallerGoneError), self._metrics.stream(is_measured=self._is_new) as self._meter:
            try:
                await while_connected(self._answer(writer), until_disconnected(receive), watch)
            except asyncio.CancelledError:
                if writer.is_within_event:
                    note_broken_event(scope)
                raise

    async def _answer(self, writer: EventWriter) -> None:
        try:
            await self._send_events(writer)
        except PenstockError as error:
            if not writer.started:
                raise
            self._metrics.refused(error)
            if writer.is_within_event:
                # No reader can tell an error from the rest of that event. The server closes the connection instead.
                raise CallerGoneError from error
            await writer.fail(error, self._error_event(error))
        await writer.end()

    @abstractmethod
    async def _send_events(self, writer: EventWriter) -> None:
        """Send all events of a stream that does not fail."""

    @abstractmethod
    def _error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""

    def _show_position(self, job: AsyncJob, writer: EventWriter) -> None:
        """Add the job's queue position to the stream's comments until the first chunk."""
        if self._keep_alive is None:
            writer.keep_alive_source = partial(waiting_comment, job, self._comment)

    async def _write(self, encoder: StreamEncoder, batch: Batch, writer: EventWriter) -> None:
        slows_others = is_large(batch)
        writer.keep_alive_source = None
        if slows_others:
            await self._yielder.wait()
        for events in encoder.parts_of(batch):
            await writer.write(events)
            self._meter.sent()
            if slows_others:
                await self._yielder.wait()


# The HTTP responses of the generation routes: one JSON object, or a stream of events.
#
# A response sends nothing until the queue delivers the first chunk or a refusal, so that a refusal gets a real HTTP
# status. A stream waits at most `first_chunk_wait_s`; after that it sends status 200 and reports errors as events.

JOB_HEADER = "X-Penstock-Job"
MAX_JOBS_SHOWN = 64
"""Most job ids in JOB_HEADER. A longer line is too long for common HTTP clients."""
IGNORED_HEADER = "X-Penstock-Ignored-Fields"
"""Response header with the fields, and parts of them, that the gateway ignored, percent-encoded as in URLs."""
MAX_IGNORED_CHARS = 2048
"""Most characters of that header; further names are left out. Many proxies refuse a head of more than 8 KiB."""
READ_COPIES = 2
"""The memory that a large result takes while it is read from Redis, divided by its size."""
MAX_TOKENS_HEADER = "X-Penstock-Max-Tokens"
"""Response header with the limit to which the context lowered `max_tokens`; of several prompts, the smallest one. If
the head of a stream is sent before the prompt is tokenized, it is what the context leaves at most."""


class Answer(JobResponse):
    """The base of both responses. The request's jobs live as long as the response and end if the caller disconnects."""

    _claim: Claim | None = None
    """The memory that the answer holds to its end, beside that of a result."""

    def __init__(
        self,
        request: Request,
        generation: GenerationRequest,
        dialect: Dialect,
        options: Mapping[str, Any],
        ignored: Sequence[str] = (),
    ) -> None:
        """`options` and `ignored` are those of `ParsedBody`."""
        super().__init__(request)
        self._generation = generation
        self._dialect = dialect
        self._options = options
        self._ignored = ignored
        self._pools: Mapping[str, ServedPool] = {}
        """The records of the pools by name, or empty if `_check` did not need them."""
        self._max_total_tokens: int | None = None
        """The most tokens of prompt and output together, to which `max_tokens` is lowered."""
        self._lowered_limit: int | None = None
        """The value of MAX_TOKENS_HEADER, if it is sent."""

    async def _check(self) -> None:
        """Refuse too many jobs or log-probabilities, and tools that the model cannot call, before any job is queued."""
        content = self._generation.content
        has_tools = content.tool_use.tools is not None and content.task is None
        needs_pool = has_tools or content.needs_token_details or len(content.prompts) > 1
        if self._generation.cut_at is not None or not needs_pool:
            return
        self._pools = await self._client.pools()
        # If the model is unknown here, the submission looks it up again and raises the error.
        with contextlib.suppress(NotFoundError, UnavailableError):
            record = choose_pool(self._pools.values(), content.model or None)
            check_num_jobs(content, self._generation.terms, record)
            check_logprobs(content, record, self._settings.max_logprobs)
            if has_tools:
                _require_tool_parser(record)

    async def _form_of(self, pool: str) -> AnswerFormat:
        """Return how to parse tool calls and reasoning from this answer's text.

        Raises RequestError if the request offers tools and no parser exists for the model's calls.
        """
        if not self._dialect.parses_text:
            return PLAIN
        return answer_format(self._generation.content, await self._record_of(pool))

    async def _record_of(self, pool: str) -> ServedPool | None:
        return self._pools.get(pool) or (await self._client.pools()).get(pool)

    async def _learn_limit(self, job: AsyncJob) -> None:
        """Learn the context of the job's model, and what it leaves of `max_tokens` at most."""
        if not self._generation.lowers_max_tokens or self._generation.content.params.max_tokens is None:
            return
        record = await self._record_of(job.pool)
        self._max_total_tokens = None if record is None else record.max_model_len or None
        self._lower_limit(1)

    def _lower_limit(self, num_prompt_tokens: int) -> None:
        max_tokens = self._generation.content.params.max_tokens
        self._lowered_limit = lowered_max_tokens(max_tokens, self._max_total_tokens, num_prompt_tokens)

    async def _head(self, jobs: Sequence[AsyncJob]) -> AnswerHead:
        generation, content = self._generation, self._generation.content
        return AnswerHead(
            [job.id for job in jobs],
            content.model,
            int(time.time()),
            content.params,
            await self._form_of(jobs[0].pool),
            content.echoes,
            self._options,
            generation.cut_at,
            generation.replay_from_start,
            generation.event_ids,
            content.prompts if self._dialect.shows_prompts else (),
            self._max_total_tokens,
        )

    def _response_headers(self, jobs: Sequence[AsyncJob]) -> dict[str, str]:
        headers = {JOB_HEADER: ", ".join(job.id for job in jobs[:MAX_JOBS_SHOWN])}
        if self._lowered_limit is not None:
            headers[MAX_TOKENS_HEADER] = str(self._lowered_limit)
        return headers | {IGNORED_HEADER: _shown_names(self._ignored)} if self._ignored else headers


class WholeAnswer(Answer):
    """A response of one JSON object after all jobs have ended. It is rendered and sent in pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the jobs and send the answer."""
        with contextlib.suppress(CallerGoneError):
            await while_connected(self._answer(send), until_disconnected(receive))

    async def _answer(self, send: Send) -> None:
        await self._check()
        async with open_jobs(self._client, self._generation) as jobs:
            await self._learn_limit(jobs[0])
            encoder = self._dialect.whole(await self._head(jobs))
            self._forget_prompts()
            ends = await ends_of(jobs, partial(naming_prompt, self._generation.content))
        await self._learn_exact_limit(jobs, ends)
        if sum(end.num_bytes for end in ends) > PIECE_BYTES:
            await self._yielder.wait()
        await self._send_body(self._parts(encoder, jobs, ends), jobs, send)

    def _forget_prompts(self) -> None:
        """Keep only the number of the prompts. The client has those of open jobs, and drops them when the jobs end."""
        content = self._generation.content
        prompts = ("",) * len(content.prompts)
        self._generation = replace(self._generation, content=replace(content, prompts=prompts))

    async def _learn_exact_limit(self, jobs: Sequence[AsyncJob], ends: Sequence[Ended]) -> None:
        if self._max_total_tokens is None:
            return
        usages = [
            end.result.usage if end.result is not None else (await job.status()).ledger.usage
            for job, end in zip(jobs, ends, strict=True)
        ]
        self._lower_limit(max((usage.prompt_tokens for usage in usages if usage is not None), default=1))

    async def _send_body(self, parts: AsyncGenerator[bytes, None], jobs: Sequence[AsyncJob], send: Send) -> None:
        timeout_s = self._settings.send_timeout_s
        sender = BodyWriter(send, self._response_headers(jobs), self._yielder, timeout_s=timeout_s)
        try:
            await sender.send_all(parts)
        except PenstockError as error:
            if not sender.started:
                raise
            # Leave the body incomplete: the server then closes the connection, and the caller sees that it was cut off.
            self._metrics.refused(error)

    async def _parts(
        self, encoder: WholeEncoder, jobs: Sequence[AsyncJob], ends: Sequence[Ended]
    ) -> AsyncGenerator[bytes, None]:
        yield encoder.head()
        usages: list[Usage | None] = []
        for index, (job, end) in enumerate(zip(jobs, ends, strict=True)):
            async with self._result_of(job, end) as result:
                usages.append(result.usage)
                for part in encoder.parts_of(index, result):
                    yield part
        yield encoder.tail(usages)

    @contextlib.asynccontextmanager
    async def _result_of(self, job: AsyncJob, end: Ended) -> AsyncIterator[PackedResult]:
        if end.result is not None:
            yield end.result
            return
        num_read = READ_COPIES * end.num_bytes
        async with self._result_budget.taken(self._generation.tenant, num_read, beside=self._claim) as claim:
            result = await job.packed_result()
            claim.shrink_to(end.num_bytes)
            yield result


class StreamAnswer(EventStream, Answer):
    """A response of events, one for each token chunk. The request says how they are framed."""

    @property
    def _comment(self) -> bytes:
        return KEEP_ALIVE_BETWEEN_IDS if self._generation.event_ids else KEEP_ALIVE

    @property
    def _keep_alive(self) -> bytes | None:
        return self._dialect.keep_alive

    @property
    def _is_new(self) -> bool:
        return self._generation.cut_at is None

    def _error_event(self, error: PenstockError) -> bytes:
        return self._dialect.error_event(error)

    async def _send_events(self, writer: EventWriter) -> None:
        generation, content = self._generation, self._generation.content
        if generation.cut_at is not None:
            form = await self._form_of(pool_of(generation.cut_at.job_id))
            # With several choices, only the whole log tells which choices have begun.
            needs_log = content.needs_token_details or self._dialect.needs_whole_log(self._options)
            replay_from_start = form != PLAIN or needs_log or content.params.n > 1
            generation = self._generation = replace(generation, replay_from_start=replay_from_start)
        await self._check()
        async with open_jobs(self._client, generation, has_begun=lambda: writer.started) as jobs:
            await self._learn_limit(jobs[0])
            writer.headers.update(self._response_headers(jobs))
            self._show_position(jobs[0], writer)
            await self._relay(jobs, writer)

    async def _write(self, encoder: StreamEncoder, batch: Batch, writer: EventWriter) -> None:
        if not writer.started and self._max_total_tokens is not None and len(self._generation.content.prompts) == 1:
            self._show_exact_limit(batch, writer)
        await super()._write(encoder, batch, writer)

    def _show_exact_limit(self, batch: Batch, writer: EventWriter) -> None:
        num_prompt_tokens = next((c.num_prompt_tokens for c in batch if c.num_prompt_tokens is not None), None)
        if num_prompt_tokens is None:
            return  # A resumed stream begins after the chunk that has the number.
        self._lower_limit(num_prompt_tokens)
        if self._lowered_limit is not None:
            writer.headers[MAX_TOKENS_HEADER] = str(self._lowered_limit)

    async def _relay(self, jobs: Sequence[AsyncJob], writer: EventWriter) -> None:
        encoder = self._dialect.stream(await self._head(jobs))
        usages: list[Usage] = []
        numbers = {job.id: number for number, job in enumerate(jobs)}
        # A resumed stream checks each chunk before the one at which it was cut.
        sink = EventSink(encoder, writer) if self._generation.cut_at is None else None
        async with aclosing(batches_of(jobs, sink, with_waiting=self._generation.shows_waiting)) as batches:
            async for batch in batches:
                if isinstance(batch, Waiting):
                    await writer.write(encoder.waiting(batch.job_id, batch.update))
                    continue
                outcome = batch[-1].outcome
                failed = outcome is not None and outcome.state != "done"
                if writer.started or not failed:
                    await self._write(encoder, batch, writer)
                if outcome is not None and failed:
                    with naming_prompt(self._generation.content, numbers[batch[-1].job_id]):
                        raise error_of(outcome)
                usages += [chunk.usage for chunk in batch if chunk.usage is not None]
        if not usages and self._generation.cut_at is not None:
            # The usage was in a chunk before the one at which the stream was cut.
            usages += [usage for job in jobs if (usage := (await job.status()).ledger.usage) is not None]
        num_choices = len(jobs) * self._generation.content.params.n
        self._meter.ended(sum(usage.completion_tokens for usage in usages) / num_choices)
        await writer.write(encoder.end(usages))


def _shown_names(names: Sequence[str]) -> str:
    """Return as many of the names as IGNORED_HEADER may have."""
    shown = ""
    for name in map(quote, names):
        if len(shown) + len(name) + 2 > MAX_IGNORED_CHARS:
            break
        shown += f", {name}" if shown else name
    return shown


def answer_format(content: RequestContent, record: ServedPool | None) -> AnswerFormat:
    """Return how to parse the text of an answer from this pool.

    Raises RequestError if the request offers tools and no parser exists for the model's calls.
    """
    use = content.tool_use
    if content.params.structured_outputs is not None and use.tools is None:
        return PLAIN
    if use.tools is None:
        return PLAIN if record is None else AnswerFormat("none", _reasoning_parser(content, record))
    record = _require_tool_parser(record)
    reasoning = _reasoning_parser(content, record)
    return AnswerFormat(record.tool_parser, reasoning, one_call=not use.parallel, is_named=use.is_named)


def _reasoning_parser(content: RequestContent, record: ServedPool) -> str:
    return reasoning_parser_for(record.reasoning_parser, record.thinking_switches, content.template_kwargs)


def _require_tool_parser(record: ServedPool | None) -> ServedPool:
    """Return the pool's record if a parser exists for its model's tool calls; otherwise raise RequestError."""
    if record is None or record.tool_parser not in CALL_FORMS:
        raise no_call_format()
    return record


# The ASGI app of a route whose requests become jobs, in any dialect.


class Generate:
    """The ASGI app of one such route. It bypasses FastAPI: a call of FastAPI costs as much as the whole work here."""

    def __init__(self, form: str, dialect: Dialect, doc: RouteDoc | None = None) -> None:
        """`form` is a key of `parsed_body.BODIES`. `doc` describes the route in the OpenAPI document."""
        self.form = form
        self.doc = doc or RouteDoc()
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        await (await self._answer_to(request))(scope, receive, send)

    async def _answer_to(self, request: Request) -> Answer:
        body = await read_body(request, self.form)
        return answer_of(request, generation_request_of(request, body), body, self._dialect)


def answer_of(request: Request, generation: GenerationRequest, body: ParsedBody, dialect: Dialect) -> Answer:
    """Return the answer that the body asks for, streamed or whole."""
    form = StreamAnswer if body.stream else WholeAnswer
    return form(request, generation, dialect, body.options, body.ignored)
