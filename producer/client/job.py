"""A submitted or attached job: its stream, its result, its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from penstock.contract.errors import error_of
from penstock.contract.job import Chunk, Outcome, Result, pool_of
from penstock.producer.client.cursor import StreamCursor
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.job_source import JobSource
from penstock.producer.client.mailbox import Mailbox
from penstock.producer.client.stream import StreamReader
from penstock.queue.broker.producer import JobStatus
from penstock.queue.packed_result import PackedResult

AnyResult = TypeVar("AnyResult", Result, PackedResult)


class AsyncJob:
    """A handle; any number of readers may stream from it, each gets everything from where the handle starts.

    A submitted job's first mailbox is open since before the submission, so that its first reader needs no log. Who
    waits for the result is one too, or thousands of handles would keep what nobody is going to read.
    """

    def __init__(
        self, source: JobSource, inbox: ClientInbox, *, after: int = -1, first_box: Mailbox | None = None
    ) -> None:
        self._source = source
        self._inbox = inbox
        self._start = after + 1
        self._first_box = first_box
        self.id = source.job_id
        self.pool = pool_of(source.job_id)

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}>"

    async def stream(self) -> AsyncGenerator[Chunk, None]:
        """The job's chunks in order; behind the last one, raises the job's error when it did not end `done`."""
        outcome: Outcome | None = None
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                outcome = batch[-1].outcome
                for chunk in batch:
                    yield chunk
        if outcome is not None and outcome.state != "done":
            raise error_of(outcome)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The job's chunks in order; the last one carries the outcome, whatever it is."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield chunk

    def batches(self) -> AsyncGenerator[list[Chunk], None]:
        """The job's chunks in order, as many at once as have arrived."""
        # Not a generator around the reader's: it would cost as much as a token's whole way through the reader.
        return StreamReader(self._source, self._box_to_read, StreamCursor(self._start), self._inbox.stats).batches()

    async def result(self, *, check: bool = True) -> Result:
        """The job's result once it has ended; raises the job's error when it did not end `done`, unless told not to.

        A stream that begins later reads from the log what it would have found waiting.
        """
        return await self._once_ended(self._source.result, check=check)

    async def packed_result(self) -> PackedResult:
        """The same, of which a part is decoded when it is asked for."""
        return await self._once_ended(self._source.packed_result, check=True)

    async def _once_ended(self, read: Callable[[], Awaitable[AnyResult | None]], *, check: bool) -> AnyResult:
        feed = self._source.feed
        box = self._take_first_box() or self._open_box(behind=all(other.nudged for other in feed.boxes), max_chunks=1)
        try:
            while True:
                await self._wait_for_end(box)
                if (result := await read()) is not None:
                    break
                # Redis lost the end that it had told of.
                feed.ended = False
                box.nudge()
        finally:
            self._inbox.close_box(feed, box)
        if check and result.outcome.state != "done":
            raise error_of(result.outcome)
        return result

    async def status(self) -> JobStatus:
        """Where the job stands."""
        return await self._source.status()

    async def cancel(self) -> str:
        """Cancels the job; answers its state: `cancelled`, `running` (it ends within a step) or the terminal one."""
        return await self._source.cancel()

    async def detach(self) -> None:
        """Says that nobody reads here any more, unless somebody does; a non-background job is then cancelled."""
        if box := self._take_first_box():
            self._inbox.close_box(self._source.feed, box)
        if not self._source.feed.boxes:
            await self._inbox.detach(self.id)

    @contextmanager
    def _box_to_read(self) -> Iterator[Mailbox]:
        box = self._take_first_box() or self._open_box(behind=True)
        try:
            yield box
        finally:
            self._inbox.close_box(self._source.feed, box)

    def _take_first_box(self) -> Mailbox | None:
        box, self._first_box = self._first_box, None
        return box

    def _open_box(self, *, behind: bool, max_chunks: int | None = None) -> Mailbox:
        """A fresh mailbox; a reader that may have missed something first asks where the job stands."""
        box = self._inbox.open_box(self._source.feed, max_chunks)
        if behind:
            box.nudge()
        return box

    async def _wait_for_end(self, box: Mailbox) -> None:
        while not self._source.feed.ended:
            await box.wait(self._source.feed.poll_s)
            box.take_all()
            if box.take_nudge():
                await self._source.attach()
