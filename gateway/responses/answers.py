"""The HTTP responses of the Responses API: a stream, a whole response, or the state of an open one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, nullcontext, suppress

from fastapi import Request
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import ConflictError, NotFoundError, PenstockError, UnavailableError, error_of
from penstock.contract.output import Usage
from penstock.gateway.responses.dialect import ResponseDialect, answer_options
from penstock.gateway.responses.events import ResponseEncoder
from penstock.gateway.responses.output import CHUNKS_PER_ROUND, OutputReader, read_chunk
from penstock.gateway.responses.record import StoredResponse
from penstock.gateway.responses.render import Status, end_of, open_members, output_parts, response_parts
from penstock.gateway.responses.stored import RecordSource, stored_record
from penstock.gateway.shared_budget import Claim
from penstock.gateway.stream.answer import Answer, StreamAnswer, WholeAnswer
from penstock.gateway.stream.body_writer import PIECE_BYTES
from penstock.gateway.stream.dialect import AnswerHead, StreamEncoder
from penstock.gateway.stream.flow import Batch, Ended, Waiting, batches_of, ends_of
from penstock.gateway.stream.generation_request import GenerationRequest, open_jobs
from penstock.gateway.stream.sse import EventWriter
from penstock.producer.client import AsyncJob
from penstock.queue.broker.producer import JobStatus

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
            if self._record.background or generation.cut_at is not None or generation.return_progress:
                await self._send_all(encoder.opening(), writer)
            await self._relay_events(job, encoder, writer)

    async def _relay_events(self, job: AsyncJob, encoder: ResponseEncoder, writer: EventWriter) -> None:
        num_tokens = 0
        async with aclosing(batches_of([job], with_waiting=self._generation.return_progress)) as batches:
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
