"""The chunks of a job as a log of messages: one message for each event of `/v1/jobs/ID/stream`.

An offset is `<chunks>_<tokens>`: the number of chunks before it, and the tokens of the last one's choice up to its end.
Both have ten digits, so offsets sort as texts. The tokens tell whether the log is still the one that was read. Once the
log has expired, the result has the same chunks, so an offset is valid as long as the result is kept.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from pydantic_core import to_json

from penstock.contract.durability import Durability
from penstock.contract.errors import GoneError, NotFoundError, RequestError, StreamDivergedError
from penstock.contract.output import Chunk
from penstock.gateway.apis.jobs.answers import chunk_object
from penstock.gateway.apis.jobs.log_reader import NOW, OFFSET, START, Page
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.queue.broker.producer import JobStatus
from penstock.runtime.event_loop import LoopYielder

PRESENT_S = 30.0
"""Seconds after a read for which its caller counts as a reader of the job: it polls again."""
MAX_PRESENT_JOBS = 10_000
"""Jobs that have such readers at one gateway. Further ones have none between two reads."""
MAX_PAGE_MESSAGES = 1000
MAX_PAGE_BYTES = 256 << 10
"""A page ends behind the message that reaches this size."""
_OFFSET = re.compile(r"(\d{10})_(\d{10})")


class PresentReaders:
    """The jobs that are read by polls. Each counts as read until its next poll is overdue."""

    def __init__(self) -> None:
        # Keyed by id: job id.
        self._present: dict[str, tuple[ExitStack, asyncio.TimerHandle]] = {}

    def stay(self, job: AsyncJob) -> None:
        """Let the job count as read for PRESENT_S."""
        loop = asyncio.get_running_loop()
        if (known := self._present.pop(job.id, None)) is not None:
            stack, timer = known
            timer.cancel()
        elif len(self._present) < MAX_PRESENT_JOBS:
            stack = ExitStack()
            stack.enter_context(job.present())
        else:
            return
        self._present[job.id] = stack, loop.call_later(PRESENT_S, self._leave, job.id)

    def _leave(self, job_id: str) -> None:
        stack, _ = self._present.pop(job_id)
        stack.close()


@dataclass(slots=True)
class _Position:
    """A place in a job's log."""

    index: int
    """Chunks before it."""
    num_tokens: int | None = 0
    """Tokens of the last one's choice up to its end; None if it is not known yet."""
    is_closed: bool = False
    """Whether that chunk was the last one."""

    @property
    def place(self) -> tuple[int, int]:
        """The place as two numbers."""
        return self.index, self.num_tokens or 0

    def page(self, messages: Sequence[bytes], *, is_up_to_date: bool) -> Page:
        """Return the page that ends here."""
        place = self.place
        return Page(messages, _offset_at(place), is_up_to_date=is_up_to_date, is_closed=self.is_closed, place=place)

    def pass_over(self, chunk: Chunk) -> None:
        """Move behind a chunk."""
        self.index, self.num_tokens = chunk.index + 1, chunk.position + len(chunk.token_ids)
        self.is_closed = chunk.outcome is not None


class JobLog:
    """A job of one tenant as a `MessageLog`."""

    content_type = "application/json"

    def __init__(
        self,
        client: AsyncClient,
        present: PresentReaders | None,
        yielder: LoopYielder,
        job_id: str,
        tenant: str,
        token_durability: Durability | None,
    ) -> None:
        """`present`: what counts the caller as a reader after its read; None for one that only looks."""
        self.name = job_id
        self.headers: Mapping[str, str] = {JOB_HEADER: job_id}
        self._client = client
        self._present = present
        self._yielder = yielder
        self._tenant = tenant
        self._token_durability = token_durability

    async def pages(self, offset: str) -> AsyncGenerator[Page, None]:
        """Yield the messages behind an offset; see `MessageLog`."""
        status = await self._client.status(self.name, tenant=self._tenant)
        at = _position_of(offset, status)
        if at.index > status.num_chunks and status.outcome is not None:
            raise _gone(offset)
        # The chunk before the offset is read again, to compare its end.
        job = await self._client.attach(
            self.name, after=max(at.index - 2, -1), tenant=self._tenant, token_durability=self._token_durability
        )
        self._stay(job)
        try:
            if at.index > status.num_chunks or not status.num_chunks:
                yield at.page([], is_up_to_date=True)
            async with aclosing(self._read(job, at, status.num_chunks)) as pages:
                async for page in pages:
                    yield page
        except StreamDivergedError:
            raise _gone(offset) from None
        except NotFoundError as error:
            if error.code != "result_expired":
                raise
            raise _gone(offset) from None
        finally:
            if not at.is_closed:
                self._stay(job)

    async def _read(self, job: AsyncJob, at: _Position, num_chunks: int) -> AsyncGenerator[Page, None]:
        """Yield the pages from a position on, the first one once it has all of the `num_chunks` that there are."""
        messages, size = list[bytes](), 0
        is_checked = not at.index
        async with aclosing(job.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    if is_checked:
                        messages.append(to_json(chunk_object(chunk), ensure_ascii=True))
                        size += len(messages[-1])
                    else:
                        _check(chunk, at)
                        is_checked = True
                    at.pass_over(chunk)
                    if (len(messages) >= MAX_PAGE_MESSAGES or size >= MAX_PAGE_BYTES) and chunk is not batch[-1]:
                        yield at.page(messages, is_up_to_date=False)
                        messages, size = [], 0
                        await self._yielder.wait()
                if at.index >= num_chunks or len(messages) >= MAX_PAGE_MESSAGES or size >= MAX_PAGE_BYTES:
                    yield at.page(messages, is_up_to_date=at.index >= num_chunks)
                    messages, size = [], 0

    def offset_at(self, place: tuple[int, int]) -> str:
        """Return the offset of a page's place."""
        return _offset_at(place)

    def _stay(self, job: AsyncJob) -> None:
        if self._present is not None:
            self._present.stay(job)


def _offset_at(place: tuple[int, int]) -> str:
    return "{:010d}_{:010d}".format(*place)


def _position_of(offset: str, status: JobStatus) -> _Position:
    """Return the place that an offset names. Raises RequestError for an offset of another form."""
    if offset == START:
        return _Position(0)
    if offset == NOW:
        return _Position(status.num_chunks, None if status.num_chunks else 0)
    if (found := _OFFSET.fullmatch(offset)) is None:
        message = f"offset must be {START}, {NOW}, or the Stream-Next-Offset of an earlier answer"
        raise RequestError(message, param=OFFSET)
    return _Position(int(found[1]), int(found[2]))


def _check(chunk: Chunk, at: _Position) -> None:
    """Raise StreamDivergedError unless this chunk is the one before the place."""
    if at.num_tokens is not None and (chunk.index + 1, chunk.position + len(chunk.token_ids)) != (
        at.index,
        at.num_tokens,
    ):
        raise StreamDivergedError(f"chunk {at.index - 1} of job {chunk.job_id} is no longer the one that was delivered")


def _gone(offset: str) -> GoneError:
    message = f"offset: the job's log has {offset} no more; read it again from {START}"
    return GoneError(message, param=OFFSET)
