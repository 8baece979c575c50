"""Answers to requests for text or for a task, in any dialect: a stream of events, or one JSON object.

An answer sends nothing until the queue delivers the first chunk or a refusal, so that a refusal gets a real HTTP
status.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.chat_shapes import MESSAGE_OF_SHAPE
from penstock.contract.errors import NotFoundError, PenstockError, UnavailableError, error_of
from penstock.contract.job import lowered_max_tokens, pool_of
from penstock.contract.output import Usage
from penstock.contract.pool import PoolRecord, notice_of
from penstock.contract.tenant import UNLIMITED
from penstock.gateway.budget import Claim, SharedBudget
from penstock.gateway.kept.answer import AnswerKeep, keep_of, record_of
from penstock.gateway.metrics import GatewayMetrics, StreamMeter
from penstock.gateway.request.generation import GenerationRequest, StreamPosition
from penstock.gateway.request.jobs import Keeping, check_logprobs, check_num_jobs, open_jobs
from penstock.gateway.request.kept import generation_of_record
from penstock.gateway.request.reading import RequestReader
from penstock.gateway.request_line import MAX_JOBS_SHOWN, line_of_request
from penstock.gateway.route_doc import RouteDoc
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.dialect import AnswerHead, Dialect, WholeEncoder, format_of_packed, packed_format
from penstock.gateway.stream.event_stream import (
    Batch,
    ChunkWriter,
    Ended,
    EventSink,
    EventSource,
    EventStream,
    Waiting,
    batches_of,
    ends_of,
    until_disconnected,
    while_connected,
)
from penstock.gateway.stream.writer import (
    KEEP_ALIVE,
    KEEP_ALIVE_BETWEEN_IDS,
    PIECE_BYTES,
    BodyWriter,
    CallerGoneError,
    EventWriter,
)
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import answer_format, require_tool_parser
from penstock.producer.parsed_body import ParsedBody, RequestBody
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat
from penstock.producer.text_bodies import naming_prompt, pool_among, task_for
from penstock.queue.broker.producer import ServedPool
from penstock.queue.results import PackedResult
from penstock.runtime.event_loop import LoopYielder

JOB_HEADER = "X-Penstock-Job"
IGNORED_HEADER = "X-Penstock-Ignored-Fields"
"""Response header with the fields, and parts of them, that the gateway ignored, percent-encoded as in URLs."""
MAX_IGNORED_CHARS = 2048
"""Most characters of that header; further names are left out. Many proxies refuse a head of more than 8 KiB."""
READ_COPIES = 2
"""The memory that a large result takes while it is read from Redis, divided by its size."""
MAX_TOKENS_HEADER = "X-Penstock-Max-Tokens"
"""Response header with the limit to which the context lowered `max_tokens`; of several prompts, the smallest one. If
the head of a stream is sent before the prompt is tokenized, it is what the context leaves at most."""


NOTICE_HEADER = "X-Penstock-Notice"
"""Response header that says that the model's files do not claim this use, such as embeddings from a chat model."""

# What both kinds of answer know of their request.


class AnswerPlan:
    """One request for text: what its pool says about it, and what follows for its answer."""

    def __init__(self, client: AsyncClient, max_logprobs: int, generation: GenerationRequest, dialect: Dialect) -> None:
        """`max_logprobs` limits the answer."""
        self.client = client
        self.generation = generation
        self.dialect = dialect
        self._max_logprobs = max_logprobs
        self._pools: Mapping[str, ServedPool] = {}
        """The records of the pools by name, or empty if `check` did not need them."""
        self.max_total_tokens: int | None = None
        """The most tokens of prompt and output together, to which `max_tokens` is lowered."""
        self._lowered_limit: int | None = None
        """The value of MAX_TOKENS_HEADER, if it is sent."""
        self._notice = ""
        """The value of NOTICE_HEADER, if it is sent."""
        self._ignored: Sequence[str] = ()
        """Fields that have no effect with this model, and messages that the node merges or moves for its template."""
        self.keep: AnswerKeep | None = None
        """The slot of the answer, if a keeper holds its connection."""

    @property
    def record(self) -> Mapping[str, Any] | None:
        """The record, if the answer was taken over."""
        return None if self.keep is None else self.keep.record

    def keeping(self, *, is_stream: bool, facts: Mapping[str, Any] | None = None) -> Keeping | None:
        """Return how the answer is kept, or None if it is not. `facts`: what the API adds to its record."""
        if self.keep is None:
            return None
        return Keeping(self.keep, facts or {}, shows_prompts=self.dialect.shows_prompts, is_stream=is_stream)

    async def check(self) -> None:
        """Refuse too many jobs or log-probabilities, and tools that the model cannot call, before any job is queued."""
        if self.record is not None:
            return  # An earlier gateway has checked it.
        self.generation = await self.dialect.completed(self.client, self.generation)
        body = self.generation.body
        has_tools = body.tool_use.tools is not None and body.task is None
        needs_pool = has_tools or body.needs_token_details or len(body.prompts) > 1
        if self.generation.cut_at is not None or not needs_pool:
            return
        self._pools = await self.client.pools()
        # If the model is unknown here, the submission looks it up again and raises the error.
        with contextlib.suppress(NotFoundError, UnavailableError):
            hides = self.generation.hides_models
            record = pool_among(self._pools.values(), body, body.model or None, hides_models=hides)
            check_num_jobs(body, self.generation.options.get("terms") or UNLIMITED, record)
            check_logprobs(body, record, self._max_logprobs)
            if has_tools:
                require_tool_parser(record)

    async def decide_replay(self, cut_at: StreamPosition) -> None:
        """Decide whether a resumed stream is read from its start, because later events depend on earlier chunks."""
        body = self.generation.body
        answer_format = await self._format_of(pool_of(cut_at.job_id))
        # With several choices, only the whole log tells which choices have begun.
        needs_log = body.needs_token_details or self.dialect.needs_whole_log(body.options)
        replay_from_start = answer_format != PLAIN or needs_log or body.params.n > 1
        self.generation = replace(self.generation, replay_from_start=replay_from_start)

    def forget_prompts(self) -> None:
        """Keep only the number of the prompts. The client has those of open jobs, and drops them when the jobs end."""
        body = self.generation.body
        self.generation = replace(self.generation, body=replace(body, prompts=("",) * len(body.prompts)))

    async def _format_of(self, pool: str) -> AnswerFormat:
        """Return how to parse tool calls and reasoning from this answer's text.

        Raises RequestError if the request offers tools and no parser exists for the model's calls.
        """
        if not self.dialect.parses_text:
            return PLAIN
        body = self.generation.body
        return answer_format(body.tool_use, body.params, body.template_kwargs, await self._record_of(pool))

    async def _record_of(self, pool: str) -> ServedPool | None:
        return self._pools.get(pool) or (await self.client.pools()).get(pool)

    async def learn_pool(self, job: AsyncJob) -> None:
        """Learn what the model is not made for, its context, and what that leaves of `max_tokens` at most."""
        known = None
        with contextlib.suppress(UnavailableError):
            known = await self._record_of(job.pool)
        body = self.generation.body
        self._notice = notice_of(known, task_for(body, known))
        self._ignored = moved_names(body, known)
        if known is not None and known.reasoning_parser == "none" and body.params.reasoning_budget is not None:
            self._ignored = [*self._ignored, body.names.get("reasoning_budget", "reasoning_budget")]
        if not self.generation.lowers_max_tokens or self.generation.body.params.max_tokens is None:
            return
        known = known or await self._record_of(job.pool)
        self.max_total_tokens = None if known is None else known.max_model_len or None
        self._lower_limit(1)

    async def learn_exact_limit(self, jobs: Sequence[AsyncJob], ends: Sequence[Ended]) -> None:
        """Learn from the ended jobs what the context left of `max_tokens`."""
        if self.max_total_tokens is None:
            return
        usages = [
            end.result.usage if end.result is not None else (await job.status()).ledger.usage
            for job, end in zip(jobs, ends, strict=True)
        ]
        self._lower_limit(max((usage.prompt_tokens for usage in usages if usage is not None), default=1))

    def show_exact_limit(self, batch: Batch, writer: EventWriter) -> None:
        """Put into the head of a stream what the context leaves of `max_tokens`, if its first chunks tell it."""
        if self.max_total_tokens is None or len(self.generation.body.prompts) != 1:
            return
        num_prompt_tokens = next((c.num_prompt_tokens for c in batch if c.num_prompt_tokens is not None), None)
        if num_prompt_tokens is None:
            return  # A resumed stream begins after the chunk that has the number.
        self._lower_limit(num_prompt_tokens)
        if self._lowered_limit is not None:
            writer.headers[MAX_TOKENS_HEADER] = str(self._lowered_limit)

    def _lower_limit(self, num_prompt_tokens: int) -> None:
        max_tokens = self.generation.body.params.max_tokens
        self._lowered_limit = lowered_max_tokens(max_tokens, self.max_total_tokens, num_prompt_tokens)

    async def head_of(self, jobs: Sequence[AsyncJob]) -> AnswerHead:
        """Return what the encoder must know before the first token, and note it for a gateway that takes it over."""
        generation, body, pool = self.generation, self.generation.body, jobs[0].pool
        facts = None if self.record is None else self.record.get("head")
        if facts is None:
            record = None if body.model and body.task is None else await self._record_of(pool)
            model = body.model or (pool if record is None else record.model)
            similarity = "cosine" if record is None else record.similarity
            form = await self._format_of(pool)
            facts = (model, int(time.time()), packed_format(form), self.max_total_tokens, similarity)
            if self.keep is not None:
                self.keep.add({"head": facts})
        model, created_s, packed_form, self.max_total_tokens, similarity = facts
        return AnswerHead(
            [job.id for job in jobs],
            model,
            created_s,
            body.params,
            format_of_packed(packed_form),
            body.echoes,
            body.options,
            generation.cut_at,
            generation.replay_from_start,
            generation.event_ids,
            body.prompts if self.dialect.shows_prompts else (),
            self.max_total_tokens,
            similarity,
        )

    def headers_of(self, jobs: Sequence[AsyncJob]) -> dict[str, str]:
        """Return penstock's headers of the answer."""
        headers = {JOB_HEADER: ", ".join(job.id for job in jobs[:MAX_JOBS_SHOWN])}
        if self._lowered_limit is not None:
            headers[MAX_TOKENS_HEADER] = str(self._lowered_limit)
        if self._notice:
            headers[NOTICE_HEADER] = self._notice
        ignored = [*self.generation.body.ignored, *self._ignored]
        return headers | {IGNORED_HEADER: _shown_names(ignored)} if ignored else headers


def moved_names(body: ParsedBody, record: PoolRecord | None) -> list[str]:
    """Return the names of messages that a node merges or moves, because the chat template refuses their order."""
    shapes = set(body.shapes) & set(() if record is None else record.moved_messages)
    field = body.names.get("prompt", "messages")
    return sorted({f"{field}.{MESSAGE_OF_SHAPE[shape]}" for shape in shapes})


def _shown_names(names: Sequence[str]) -> str:
    """Return as many of the names as IGNORED_HEADER may have."""
    shown = ""
    for name in map(quote, names):
        if len(shown) + len(name) + 2 > MAX_IGNORED_CHARS:
            break
        shown += f", {name}" if shown else name
    return shown


# The answers of the generation routes. Jobs live as long as the answer, and end if the caller disconnects.


class GenerationEvents(EventSource):
    """The events of a new or resumed request, one for each token chunk."""

    def __init__(self, plan: AnswerPlan, yielder: LoopYielder) -> None:
        self._plan = plan
        self._yielder = yielder
        self.comment = KEEP_ALIVE_BETWEEN_IDS if plan.generation.event_ids else KEEP_ALIVE
        self.keep_alive = plan.dialect.keep_alive
        self.is_new = plan.generation.cut_at is None

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails."""
        return self._plan.dialect.error_event(error)

    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Submit or attach to the jobs, and send their events."""
        plan = self._plan
        plan.keep = self.keep
        if plan.generation.cut_at is not None and plan.record is None:
            await plan.decide_replay(plan.generation.cut_at)
        await plan.check()
        keeping = plan.keeping(is_stream=True)
        async with open_jobs(plan.client, plan.generation, has_begun=lambda: writer.started, keeping=keeping) as jobs:
            await plan.learn_pool(jobs[0])
            writer.headers.update(plan.headers_of(jobs))
            self.show_position(jobs[0], writer)
            await self._relay(jobs, writer, meter)

    async def _relay(self, jobs: Sequence[AsyncJob], writer: EventWriter, meter: StreamMeter) -> None:
        plan = self._plan
        encoder = plan.dialect.stream(await plan.head_of(jobs))
        plan.forget_prompts()
        generation = plan.generation
        usages: list[Usage] = []
        numbers = {job.id: number for number, job in enumerate(jobs)}
        chunks = ChunkWriter(encoder, writer, meter, self._yielder, numbers)
        # A resumed stream checks each chunk before the one at which it was cut.
        sink = EventSink(encoder, writer) if generation.cut_at is None else None
        async with aclosing(batches_of(jobs, sink, with_waiting=generation.shows_waiting)) as batches:
            async for batch in batches:
                if isinstance(batch, Waiting):
                    await writer.write(encoder.waiting(batch.job_id, batch.update))
                    continue
                outcome = batch[-1].outcome
                failed = outcome is not None and outcome.state != "succeeded"
                if writer.started or not failed:
                    if not writer.started:
                        plan.show_exact_limit(batch, writer)
                    await chunks.write(batch)
                if outcome is not None and failed:
                    with naming_prompt(generation.body, numbers[batch[-1].job_id]):
                        raise error_of(outcome)
                usages += [chunk.usage for chunk in batch if chunk.usage is not None]
        if not usages and generation.cut_at is not None:
            # The usage was in a chunk before the one at which the stream was cut.
            usages += [usage for job in jobs if (usage := (await job.status()).ledger.usage) is not None]
        num_choices = len(jobs) * generation.body.params.n
        meter.ended(sum(usage.completion_tokens for usage in usages) / num_choices)
        await writer.write(encoder.end(usages), 0 if len(jobs) == 1 else len(jobs))


class WholeSender:
    """Sends answers of one JSON object in pieces. A large result waits for memory before it is read."""

    def __init__(
        self, settings: GatewaySettings, metrics: GatewayMetrics, yielder: LoopYielder, result_budget: SharedBudget
    ) -> None:
        self._timeout_s = settings.send_timeout_s
        self._metrics = metrics
        self._yielder = yielder
        self._budget = result_budget

    async def send_results(
        self,
        send: Send,
        plan: AnswerPlan,
        encoder: WholeEncoder,
        jobs: Sequence[AsyncJob],
        ends: Sequence[Ended],
        *,
        beside: Claim | None = None,
    ) -> None:
        """Send the results of ended jobs. `beside`: the memory that the answer holds already, beside a result's."""
        parts = self._parts(plan, encoder, jobs, ends, beside)
        await self.send_parts(send, plan.headers_of(jobs), parts, plan.keep)

    async def send_parts(
        self, send: Send, headers: Mapping[str, str], parts: AsyncGenerator[bytes, None], keep: AnswerKeep | None = None
    ) -> None:
        """Send all parts as one body. An error after the first bytes cuts the body off. `keep` has its slot."""
        writer = BodyWriter(send, headers, self._yielder, timeout_s=self._timeout_s, keep=keep)
        try:
            await writer.send_all(parts)
        except PenstockError as error:
            if not writer.started:
                raise
            # Leave the body incomplete: the server then closes the connection, and the caller sees that it was cut off.
            self._metrics.failed(error)

    async def _parts(
        self,
        plan: AnswerPlan,
        encoder: WholeEncoder,
        jobs: Sequence[AsyncJob],
        ends: Sequence[Ended],
        beside: Claim | None,
    ) -> AsyncGenerator[bytes, None]:
        yield encoder.head()
        usages: list[Usage | None] = []
        for index, (job, end) in enumerate(zip(jobs, ends, strict=True)):
            async with self._result_of(job, end, plan.generation.tenant, beside) as result:
                usages.append(result.usage)
                line_of_request().note_usage(result.usage)
                for part in encoder.parts_of(index, result):
                    yield part
        yield encoder.tail(usages)

    @contextlib.asynccontextmanager
    async def _result_of(
        self, job: AsyncJob, end: Ended, tenant: str, beside: Claim | None
    ) -> AsyncIterator[PackedResult]:
        if end.result is not None:
            yield end.result
            return
        async with self._budget.taken(tenant, READ_COPIES * end.num_bytes, beside=beside) as claim:
            result = await job.packed_result()
            claim.shrink_to(end.num_bytes)
            yield result


class WholeAnswer(Response):
    """A response of one JSON object after all jobs have ended. It is rendered and sent in pieces."""

    def __init__(self, plan: AnswerPlan, sender: WholeSender, yielder: LoopYielder) -> None:
        super().__init__()
        self._plan = plan
        self._sender = sender
        self._yielder = yielder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the jobs and send the answer."""
        self._plan.keep = keep_of(scope)
        with contextlib.suppress(CallerGoneError):
            await while_connected(self._answer(send), until_disconnected(receive))

    async def _answer(self, send: Send) -> None:
        plan = self._plan
        await plan.check()
        async with open_jobs(plan.client, plan.generation, keeping=plan.keeping(is_stream=False)) as jobs:
            await plan.learn_pool(jobs[0])
            encoder = plan.dialect.whole(await plan.head_of(jobs))
            plan.forget_prompts()
            ends = await ends_of(jobs, partial(naming_prompt, plan.generation.body))
        await plan.learn_exact_limit(jobs, ends)
        if sum(end.num_bytes for end in ends) > PIECE_BYTES:
            await self._yielder.wait()
        await self._sender.send_results(send, plan, encoder, jobs, ends)


class Answers:
    """Makes the answers of a gateway, in any dialect."""

    def __init__(
        self,
        client: AsyncClient,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        yielder: LoopYielder,
        sender: WholeSender,
    ) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._yielder = yielder
        self._sender = sender

    def plan(self, generation: GenerationRequest, dialect: Dialect) -> AnswerPlan:
        """Return the plan of one answer."""
        return AnswerPlan(self._client, self._settings.max_logprobs, generation, dialect)

    def stream(self, source: EventSource) -> EventStream:
        """Return an answer that streams the events of a source."""
        return EventStream(source, self._settings, self._metrics)

    def whole(self, plan: AnswerPlan) -> WholeAnswer:
        """Return an answer of one JSON object."""
        return WholeAnswer(plan, self._sender, self._yielder)

    def answer(self, generation: GenerationRequest, dialect: Dialect) -> Response:
        """Return the answer that a body asks for, streamed or whole."""
        plan = self.plan(generation, dialect)
        return self.stream(GenerationEvents(plan, self._yielder)) if generation.body.stream else self.whole(plan)


class Generate:
    """The ASGI app of a route whose requests become jobs, in any dialect.

    It bypasses FastAPI: a call of FastAPI costs as much as the whole work here.
    """

    def __init__(
        self,
        schema: type[RequestBody],
        dialect: Dialect,
        reader: RequestReader,
        answers: Answers,
        doc: RouteDoc | None = None,
    ) -> None:
        """`schema` is that of the body. `doc` describes the route in the OpenAPI document."""
        self.schema = schema
        self.doc = doc or RouteDoc()
        self._dialect = dialect
        self._reader = reader
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if (record := record_of(scope)) is not None:
            generation = generation_of_record(record)
        else:
            request = Request(scope, receive, send)
            body = await self._reader.read(request, self.schema)
            generation = self._reader.generation_of(request, body)
        answer = self._answers.answer(generation, self._dialect)
        await answer(scope, receive, send)
