"""An answer that is a stream of events, whatever they are read from, and the flow of several jobs' chunks into it.

It has a source, an encoder and a writer. The source reads jobs, the encoder of the dialect makes bytes of what it
reads, and the writer sends these. Nothing is sent until the source has the first chunk or a refusal, so that a refusal
gets a real HTTP status. The stream waits at most `first_chunk_wait_s` for that; then it sends status 200 and reports
errors as events.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, StreamDivergedError
from penstock.contract.output import Chunk, QueuePosition, WaitUpdate
from penstock.gateway.kept.answer import AnswerKeep, keep_of
from penstock.gateway.metrics import GatewayMetrics, StreamMeter
from penstock.gateway.request_line import CALLER_LEFT, COMPLETE, line_of_request
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.dialect import StreamEncoder
from penstock.gateway.stream.direct_body import direct_body_of
from penstock.gateway.stream.writer import KEEP_ALIVE, CallerGoneError, EventWriter, framing_of, note_broken_event
from penstock.producer.client import AsyncJob
from penstock.producer.client.stream import ChunkSink
from penstock.queue.broker.producer import LARGE_RESULT_BYTES
from penstock.queue.results import PackedResult
from penstock.runtime.event_loop import CALLS_AT_ONCE, LoopYielder

# Detection of callers that disconnect.


async def while_connected(work: Coroutine[None, None, None], *watches: Coroutine[None, None, None]) -> None:
    """Run `work` until it ends or the caller disconnects.

    Each watch ends when the caller is gone. If a watch ends first, `work` is canceled and CallerGoneError raised.
    """
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(watch) for watch in watches]
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGoneError
        working.result()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


async def until_disconnected(receive: Receive) -> None:
    """Return when the caller disconnects. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


# The comment that a silent stream sends while its job waits in the queue.

MAX_LOOKUP_S = 1.0
"""Seconds that a comment waits for the position. Positions of all streams are read together, a few times a second."""


async def waiting_comment(job: AsyncJob, plain: bytes) -> bytes:
    """Return `plain`, a comment of one line, with the job's position if the job is in the queue."""
    update = None
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_LOOKUP_S), aclosing(job.waiting()) as updates:
            update = await anext(updates, None)
    if not isinstance(update, QueuePosition) or not update.position:
        return plain
    words = f", position {update.position}"
    if update.estimated_wait_ms is not None:
        words += f", about {-(-update.estimated_wait_ms // 1000)} s"
    if update.paused is not None:
        words += f", {update.paused} paused"
    return plain.replace(b"\n", words.encode() + b"\n", 1)


# Merging of the jobs of one request.

MAX_BATCHES = 64
"""Batches that the merged flow buffers. Beyond that, the client's bounded mailboxes fill; beyond those, chunks are read
from the jobs' logs."""
MAX_KEPT_BYTES = 1 << 20
"""Bytes of results that are kept in memory until all jobs of a request have ended."""

MAX_SMALL_BATCH = 64
"""Batches of up to this many chunks are rendered at once. A larger batch yields to other requests in between."""

Batch = list[Chunk]
"""The next chunks of one job, at least one."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job's position in the queue, or the progress of its prompt, before its first chunk."""

    job_id: str
    update: WaitUpdate


def is_large(batch: Batch) -> bool:
    """Return whether rendering the batch at once would delay other requests.

    A batch is large after a slow reader, when a log is replayed, and with the log-probabilities of a prompt.
    """
    return len(batch) > MAX_SMALL_BATCH or bool(batch[0].prompt_logprobs)


def batches_of(
    jobs: Sequence[AsyncJob], sink: ChunkSink | None = None, *, with_waiting: bool = False
) -> AsyncGenerator[Batch | Waiting, None]:
    """Yield the batches of all jobs in order of arrival until all jobs have ended.

    The batches of one job come in the order of its log. `with_waiting` adds its queue position and prompt progress
    before them. Without it, the only job of a request passes its plain chunks to the sink instead.
    """
    return jobs[0].batches(sink) if len(jobs) == 1 and not with_waiting else _merged(jobs, with_waiting=with_waiting)


async def _merged(jobs: Sequence[AsyncJob], *, with_waiting: bool) -> AsyncGenerator[Batch | Waiting, None]:
    queue: asyncio.Queue[Batch | Waiting | Exception] = asyncio.Queue(MAX_BATCHES)
    readers = [asyncio.create_task(_watch(job, queue)) for job in jobs if with_waiting]
    readers += [asyncio.create_task(_read(job, queue)) for job in jobs]
    num_open = len(jobs)
    have_begun: set[str] = set()
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Waiting):
                if item.job_id not in have_begun:
                    yield item
                continue
            have_begun.add(item[0].job_id)
            num_open -= item[-1].outcome is not None
            yield item
    finally:
        await _cancel(readers)


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a job that ended successfully."""

    num_bytes: int
    """Size of the result."""
    result: PackedResult | None
    """The result, or None if it is too large to keep until all jobs have ended."""


async def ends_of(
    jobs: Sequence[AsyncJob], naming: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
) -> list[Ended]:
    """Wait until all jobs have ended and return their results. The first job that fails raises its error at once.

    `naming` is entered with a job's index; it may name the job in the error. At most MAX_KEPT_BYTES of results are kept
    in memory. The others are fetched when they are rendered; a large one of them is not fetched before.
    """
    num_kept = 0

    def keeps(num_bytes: int) -> bool:
        nonlocal num_kept
        if num_kept + num_bytes > MAX_KEPT_BYTES:
            return False
        num_kept += num_bytes
        return True

    async def end_of(index: int, job: AsyncJob) -> Ended:
        with naming(index):
            result = await job.packed_result(keeps)
        is_small = result.num_bytes <= LARGE_RESULT_BYTES
        is_kept = keeps(result.num_bytes) if is_small else result.is_fetched
        return Ended(result.num_bytes, result if is_kept else None)

    waiting: list[asyncio.Task[Ended]] = []
    try:
        for index, job in enumerate(jobs):
            waiting.append(asyncio.create_task(end_of(index, job)))
            if len(waiting) % CALLS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return await asyncio.gather(*waiting)
    finally:
        await _cancel(waiting)


async def _watch(job: AsyncJob, queue: asyncio.Queue[Batch | Waiting | Exception]) -> None:
    async with aclosing(job.waiting()) as updates:
        async for update in updates:
            await queue.put(Waiting(job.id, update))


async def _read(job: AsyncJob, queue: asyncio.Queue[Batch | Waiting | Exception]) -> None:
    try:
        async with aclosing(job.batches()) as batches:
            async for batch in batches:
                await queue.put(batch)
    except Exception as error:
        # Pass on any kind of error: if this task died silently, the caller would wait forever.
        await queue.put(error)


async def _cancel(tasks: Sequence[asyncio.Task[None]] | Sequence[asyncio.Task[Ended]]) -> None:
    try:
        for start in range(0, len(tasks), CALLS_AT_ONCE):
            group = tasks[start : start + CALLS_AT_ONCE]
            for task in group:
                task.cancel()
            await asyncio.gather(*group, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()


class EventSink:
    """Sends the plain chunks of one job as events at once, while the task of the stream waits for chunks.

    A wake-up of the task would take longer than encoding and writing the event. See `ChunkSink`.
    """

    __slots__ = ("_encoder", "_writer")

    def __init__(self, encoder: StreamEncoder, writer: EventWriter) -> None:
        self._encoder = encoder
        self._writer = writer

    @property
    def is_ready(self) -> bool:
        """Whether the response has begun, and its reader keeps up."""
        return self._writer.is_ready

    def take(self, chunk: Chunk) -> None:
        """Send the events of the next chunk."""
        for events in self._encoder.parts_of((chunk,)):
            self._writer.write_now(events)


# The stream: its source, and its sending.


class EventSource(ABC):
    """What a stream sends: it reads the events' content, and knows how they are encoded."""

    comment: bytes = KEEP_ALIVE
    """What a silent stream sends if there is no `keep_alive`: a comment, with the position of a waiting job."""
    keep_alive: bytes | None = None
    """What a silent stream sends instead of a comment."""
    is_new: bool = True
    """Whether the stream begins with its job's first token."""
    keep: AnswerKeep | None = None
    """The slot of the answer, if a keeper holds its connection."""

    @abstractmethod
    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Send all events of a stream that does not fail."""

    @abstractmethod
    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""

    def show_position(self, job: AsyncJob, writer: EventWriter) -> None:
        """Add the job's queue position to the stream's comments until the first chunk."""
        if self.keep_alive is None:
            writer.keep_alive_source = partial(waiting_comment, job, self.comment)


class EventStream(Response):
    """A response of events. It sends keep-alives while it is silent, and reports an error as its last event.

    Called as an ASGI app, it raises a PenstockError only if nothing has been sent yet.
    """

    def __init__(self, source: EventSource, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        super().__init__()
        self._source = source
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the caller leaves."""
        source, settings = self._source, self._settings
        keep_alive = source.keep_alive or source.comment
        source.keep = keep = keep_of(scope)
        writer = EventWriter(send, framing_of(scope), keep_alive=keep_alive, body=direct_body_of(scope), keep=keep)
        watch = writer.watch(
            first_wait_s=settings.first_chunk_wait_s,
            interval_s=settings.keep_alive_s,
            send_timeout_s=settings.send_timeout_s,
        )
        line = line_of_request()
        is_measured = source.is_new and (keep is None or keep.record is None)
        with self._metrics.stream(is_measured=is_measured) as meter:
            try:
                await while_connected(self._answer(writer, meter), until_disconnected(receive), watch)
                line.outcome = line.outcome or COMPLETE
            except CallerGoneError:
                line.outcome = line.outcome or CALLER_LEFT
            except asyncio.CancelledError:
                if writer.is_within_event:
                    note_broken_event(scope)
                raise

    async def _answer(self, writer: EventWriter, meter: StreamMeter) -> None:
        keep = self._source.keep
        try:
            if keep is not None and keep.has_head:
                await writer.begin()
            await self._source.send_events(writer, meter)
            if keep is not None and keep.is_behind:
                raise StreamDivergedError("the log of the job has become shorter than its stream was")
        except PenstockError as error:
            if not writer.started:
                raise
            meter.failed(error)
            if writer.is_within_event:
                # No reader can tell an error from the rest of that event. The server closes the connection instead.
                raise CallerGoneError from error
            await writer.fail(error, self._source.error_event(error))
        await writer.end()


class ChunkWriter:
    """Writes the chunks of one stream as events. While it writes many, other requests are served."""

    def __init__(
        self,
        encoder: StreamEncoder,
        writer: EventWriter,
        meter: StreamMeter,
        yielder: LoopYielder,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """`numbers`: the number of each job, if the stream has several."""
        self._numbers = numbers
        self._encoder = encoder
        self._writer = writer
        self._meter = meter
        self._yielder = yielder

    async def write(self, batch: Batch) -> None:
        """Write the events of one job's next chunks."""
        slows_others = is_large(batch)
        self._writer.keep_alive_source = None
        self._meter.used(batch)
        if slows_others:
            await self._yielder.wait()
        for events in self._encoder.parts_of(batch):
            await self._writer.write(events, 0 if self._numbers is None else self._numbers[batch[0].job_id])
            self._meter.sent()
            if slows_others:
                await self._yielder.wait()
