"""The HTTP answers of the Responses API: a stream, a whole response, or the state of an open one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.contract.errors import ConflictError, NotFoundError, PenstockError, UnavailableError, error_of
from penstock.contract.output import Usage
from penstock.gateway.apis.responses.encoder import ResponseDialect, ResponseEncoder, answer_options
from penstock.gateway.apis.responses.record import RecordSource, StoredResponse, stored_record
from penstock.gateway.budget import Claim, SharedBudget
from penstock.gateway.kept.answer import keep_of
from penstock.gateway.metrics import StreamMeter
from penstock.gateway.request.earlier_reasoning import SealTerms
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import open_jobs
from penstock.gateway.stream.answer import AnswerPlan, Answers, WholeSender
from penstock.gateway.stream.dialect import AnswerHead
from penstock.gateway.stream.event_stream import (
    ChunkWriter,
    Ended,
    EventSource,
    Waiting,
    batches_of,
    ends_of,
    until_disconnected,
    while_connected,
)
from penstock.gateway.stream.writer import PIECE_BYTES, CallerGoneError, EventWriter
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.responses.answer import Status, end_of, open_members, output_parts, response_parts
from penstock.producer.responses.output import CHUNKS_PER_ROUND, OutputReader, read_chunk
from penstock.queue.broker.producer import JobStatus
from penstock.runtime.event_loop import LoopYielder

DIALECT = ResponseDialect()


async def leave(job: AsyncJob) -> None:
    """Stop reading a job. If Redis is unreachable, the next chunk without a reader detaches it."""
    with suppress(UnavailableError):
        await job.detach()


class HeldRecord:
    """The record of the response that an answer creates or reads, and the memory that it takes."""

    claim: Claim
    record: StoredResponse

    def __init__(self, client: AsyncClient, generation: GenerationRequest, source: RecordSource) -> None:
        self._client = client
        self._generation = generation
        self._source = source
        self._seal: SealTerms | None = None

    async def read(self, claim: Claim) -> None:
        """Read the record into memory that is claimed to the answer's end. Raises what the source raises."""
        self.claim = claim
        self.record = await self._source(claim)

    def facts(self) -> dict[str, Any]:
        """Return what a gateway that takes the answer over needs of the record."""
        return {"response": self.record.without_input().encode()}

    async def learn(self, job: AsyncJob) -> None:
        """Read what the answer needs beside the job: maybe another record, and what seals its reasoning."""
        await self._learn_record(job)
        if self.record.sealed_for:
            key = await self._client.servers.directory.responses.seal_key()
            self._seal = {"key": key, "tenant": self._generation.tenant, "model": self.record.sealed_for}

    async def _learn_record(self, job: AsyncJob) -> None:
        """Read the record of a job that an earlier request with the same idempotency key created.

        Raises ConflictError if one of both requests stores its response and the other does not.
        """
        if job.id == self._generation.options.get("job_id"):
            return
        client, tenant = self._client, self._generation.tenant
        if not self.record.stored:
            with suppress(NotFoundError):
                await client.servers.of_job(job.id).responses.num_bytes(job.id, tenant)
                raise _other_store("is stored, and this request has store=false")
            return
        # The other record replaces this one, whose memory the claim gives back before it grows.
        self._source = stored_record(client, job.id, tenant)
        del self.record
        try:
            self.record = await self._source(self.claim)
        except NotFoundError:
            raise _other_store("is not stored: it was created with store=false, or deleted since") from None

    def head_at(self, job: AsyncJob, *, starting_after: int = -1, finished_s: int = 0) -> AnswerHead:
        """Return what the encoder must know. `starting_after`: the number of the last event that the caller has."""
        record, body = self.record, self._generation.body
        options = answer_options(record, self._seal, starting_after=starting_after, finished_s=finished_s)
        return AnswerHead([job.id], body.model, record.created_s, body.params, record.format, options=options)


def _other_store(reason: str) -> ConflictError:
    message = f"this idempotency key belongs to a response that {reason}"
    return ConflictError(message, code="idempotency_conflict", param="idempotency_key")


class ResponseEvents(EventSource):
    """The events of a response, new or stored. A failed job is one of them, unless nothing has been sent yet."""

    def __init__(self, plan: AnswerPlan, held: HeldRecord, yielder: LoopYielder, *, starting_after: int) -> None:
        self._plan = plan
        self._held = held
        self._yielder = yielder
        self._starting_after = starting_after
        self._encoder: ResponseEncoder | None = None
        self.keep_alive = DIALECT.keep_alive
        self.is_new = plan.generation.cut_at is None

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails."""
        return DIALECT.error_event(error) if self._encoder is None else self._encoder.error(error)

    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Submit or attach to the job, and send its events."""
        plan, held, generation = self._plan, self._held, self._plan.generation
        plan.keep = self.keep
        keeping = plan.keeping(is_stream=True, facts=held.facts())
        async with open_jobs(plan.client, generation, has_begun=lambda: writer.started, keeping=keeping) as jobs:
            (job,) = jobs
            await plan.learn_pool(job)
            writer.headers.update(plan.headers_of(jobs))
            await held.learn(job)
            self.show_position(job, writer)
            self._encoder = encoder = DIALECT.stream(held.head_at(job, starting_after=self._starting_after))
            # The caller may need the id before the first token. Progress follows the events of the opening.
            if held.record.background or generation.cut_at is not None or generation.shows_waiting:
                await self._send_all(encoder.opening(), writer)
            await self._relay(job, encoder, writer, meter)

    async def _relay(self, job: AsyncJob, encoder: ResponseEncoder, writer: EventWriter, meter: StreamMeter) -> None:
        plan, generation = self._plan, self._plan.generation
        chunks = ChunkWriter(encoder, writer, meter, self._yielder)
        num_tokens = 0
        async with aclosing(batches_of([job], with_waiting=generation.shows_waiting)) as batches:
            async for batch in batches:
                if isinstance(batch, Waiting):
                    await writer.write(encoder.waiting(batch.job_id, batch.update))
                    continue
                outcome = batch[-1].outcome
                failed = outcome is not None and outcome.state != "succeeded"
                if outcome is not None and failed and generation.cut_at is None and not writer.started:
                    raise error_of(outcome)
                # Events that the caller has already got give no parts, so a long batch would not be interrupted.
                for at in range(0, len(batch), CHUNKS_PER_ROUND):
                    if at:
                        await self._yielder.wait()
                    part = batch[at : at + CHUNKS_PER_ROUND]
                    if not writer.started:
                        plan.show_exact_limit(part, writer)
                    await chunks.write(part)
                num_tokens += sum(len(chunk.token_ids) for chunk in batch)
                if outcome is not None:
                    if failed:
                        meter.failed(error_of(outcome), counts=generation.cut_at is None)
                    meter.ended(num_tokens)
                    status = await job.status()
                    await self._send_all(encoder.closing(outcome, status.finished_ms // 1000), writer)

    async def _send_all(self, parts: Iterator[bytes], writer: EventWriter) -> None:
        piece, size = list[bytes](), 0
        for part in parts:
            piece.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                await writer.write(b"".join(piece), 0)
                piece, size = [], 0
                await self._yielder.wait()
        if size:
            await writer.write(b"".join(piece), 0)


class ResponseObject:
    """An answer of one JSON object: the whole response after the end of its job, or the state of an open one."""

    def __init__(
        self, plan: AnswerPlan, held: HeldRecord, sender: WholeSender, yielder: LoopYielder, *, waits: bool
    ) -> None:
        """`waits`: wait for the end of a new job, which is an error if the job fails. Otherwise, show what there is."""
        self._plan = plan
        self._held = held
        self._sender = sender
        self._yielder = yielder
        self._waits = waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the job and send the answer."""
        self._plan.keep = keep_of(scope)
        with suppress(CallerGoneError):
            await while_connected(
                self._when_done(send) if self._waits else self._now(send), until_disconnected(receive)
            )

    async def _when_done(self, send: Send) -> None:
        keeping = self._plan.keeping(is_stream=False, facts=self._held.facts())
        async with open_jobs(self._plan.client, self._plan.generation, keeping=keeping) as jobs:
            (job,) = jobs
            await self._held.learn(job)
            (end,) = await ends_of(jobs)
            status = await job.status()
        await self._send_whole(job, end, status, send)

    async def _now(self, send: Send) -> None:
        async with open_jobs(self._plan.client, self._plan.generation) as jobs:
            (job,) = jobs
            await self._held.learn(job)
            status = await job.status()
            if status.outcome is not None and status.outcome.state == "succeeded":
                (end,) = await ends_of(jobs)
                await self._send_whole(job, end, status, send)
            else:
                parts = self._unfinished_parts(job, status)
                await self._sender.send_parts(send, self._plan.headers_of(jobs), parts)
            await leave(job)

    async def _send_whole(self, job: AsyncJob, end: Ended, status: JobStatus, send: Send) -> None:
        plan, held = self._plan, self._held
        if end.num_bytes > PIECE_BYTES:
            await self._yielder.wait()
        encoder = DIALECT.whole(held.head_at(job, finished_s=status.finished_ms // 1000))
        await plan.learn_pool(job)
        await plan.learn_exact_limit([job], [end])
        await self._sender.send_results(send, plan, encoder, [job], [end], beside=held.claim)

    async def _unfinished_parts(self, job: AsyncJob, status: JobStatus) -> AsyncGenerator[bytes, None]:
        record = self._held.record
        output: Iterable[bytes] = ()
        if status.outcome is None:
            is_queued = record.background and status.state in ("scheduled", "queued")
            state: Status = "queued" if is_queued else "in_progress"
            members = open_members(state)
        else:
            reader = OutputReader(job.id, record.format, record.called, compaction=record.compaction)
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


class ResponseAnswer(Response):
    """An answer of the Responses API. The memory of its record is held from the reading to the end."""

    def __init__(self, memory: AbstractAsyncContextManager[Claim], held: HeldRecord, answer: ASGIApp) -> None:
        """`answer` shows the record."""
        super().__init__()
        self._memory = memory
        self._held = held
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Get the record and send the answer. Raises what the source of the record raises."""
        async with self._memory as claim:
            await self._held.read(claim)
            await self._answer(scope, receive, send)


class ResponseAnswers:
    """Makes the answers of the Responses API."""

    def __init__(
        self,
        client: AsyncClient,
        answers: Answers,
        sender: WholeSender,
        result_budget: SharedBudget,
        yielder: LoopYielder,
    ) -> None:
        self._client = client
        self._answers = answers
        self._sender = sender
        self._result_budget = result_budget
        self._yielder = yielder

    def stream(
        self,
        generation: GenerationRequest,
        source: RecordSource,
        claim: Claim | None = None,
        *,
        starting_after: int = -1,
    ) -> ResponseAnswer:
        """Return the stream of a response.

        `claim`: the memory that the source's record takes already. `starting_after`: the number of the last event that
        the caller has.
        """
        plan, held = self._answers.plan(generation, DIALECT), HeldRecord(self._client, generation, source)
        events = ResponseEvents(plan, held, self._yielder, starting_after=starting_after)
        return ResponseAnswer(self._memory(generation, claim), held, self._answers.stream(events))

    def body(
        self, generation: GenerationRequest, source: RecordSource, claim: Claim | None = None, *, waits: bool
    ) -> ResponseAnswer:
        """Return a response as one JSON object. `waits` is that of ResponseObject, the rest as for `stream`."""
        plan, held = self._answers.plan(generation, DIALECT), HeldRecord(self._client, generation, source)
        shown = ResponseObject(plan, held, self._sender, self._yielder, waits=waits)
        return ResponseAnswer(self._memory(generation, claim), held, shown)

    def _memory(self, generation: GenerationRequest, first: Claim | None) -> AbstractAsyncContextManager[Claim]:
        # An answer has one claim for records. With two it might wait for one while it holds the other.
        return self._result_budget.taken(generation.tenant) if first is None else nullcontext(first)
