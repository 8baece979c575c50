"""Deliver a job's chunks in order, none lost or repeated, whatever happens to the messages.

Chunks come from the mailbox. The log fills gaps. Once the log has expired, the rest comes from the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from penstock.contract.output import TERMINAL_STATES, Chunk, Result
from penstock.producer.client.cursor import ChunkVerdict, StreamCursor, rest_of
from penstock.producer.client.mailbox import Feed, Mailbox
from penstock.producer.client.stats import ClientStats
from penstock.queue.broker.decoding import has_logprobs
from penstock.queue.broker.producer import Attached

LOG_PAGE_CHUNKS = 1000
LARGE_CHUNKS_PER_PAGE = 8
"""Page size for chunks with log-probabilities: some hundred kilobytes at most, since a page also ends early."""


class ChunkSource(Protocol):
    """A reader's access to its job; `JobSource` implements it."""

    feed: Feed

    async def attach(self) -> Attached:
        """Register this process as a reader, perhaps again, and return the job's state."""

    async def receive_published(self) -> None:
        """Wait until everything published before the call is in the mailboxes."""

    async def log(self, start: int, count: int) -> list[Chunk]:
        """Return up to `count` chunks of the job's log, from index `start`."""

    async def result(self) -> Result | None:
        """Return the job's result, or None before its end."""


class ChunkSink(Protocol):
    """Takes plain chunks, those of tokens and text only, at the moment at which they arrive.

    The reader's own task then does not wake up. All other chunks, and all while the sink is not ready, are yielded.
    """

    @property
    def is_ready(self) -> bool:
        """Whether the sink takes the next chunk."""

    def take(self, chunk: Chunk) -> None:
        """Take the next chunk of the job. An exception ends the reader."""


class StreamReader:
    """One reader of one job: read the mailbox, fill gaps, and deliver each chunk once."""

    def __init__(
        self,
        source: ChunkSource,
        open_box: Callable[[], AbstractContextManager[Mailbox]],
        cursor: StreamCursor,
        stats: ClientStats,
        sink: ChunkSink | None = None,
    ) -> None:
        self._source = source
        self._open_box = open_box
        self._cursor = cursor
        self._stats = stats
        self._sink = sink
        self._arrived: deque[Chunk] = deque()

    async def batches(self) -> AsyncGenerator[list[Chunk], None]:
        """Yield chunks as they become available, in lists that are never empty. The terminal chunk is the last one."""
        deliver = None if self._sink is None else self._deliver
        with self._open_box() as box:
            self._box = box
            while self._cursor.outcome is None:
                await box.wait(self._source.feed.poll_s, deliver)
                self._arrived.extend(box.take_all())
                if box.take_nudge():
                    async for batch in self._catch_up():
                        yield batch
                while self._arrived:
                    if ready := self._take_arrived():
                        yield ready
                    if self._arrived:
                        async for batch in self._fill_gap():
                            yield batch

    def _deliver(self, chunk: Chunk) -> bool:
        """Give the next chunk to the sink, if it is plain, in order, and the sink is ready; return whether it was."""
        sink = self._sink
        if sink is None or chunk.logprobs or not sink.is_ready or not self._cursor.accept_plain(chunk):
            return False
        sink.take(chunk)
        return True

    def _take_arrived(self) -> list[Chunk]:
        """Return the arrived chunks that can be delivered, up to the first gap."""
        ready: list[Chunk] = []
        while self._arrived:
            fresh = self._cursor.offer(self._arrived[0])
            if fresh is ChunkVerdict.GAP:
                break
            self._arrived.popleft()
            if isinstance(fresh, Chunk):
                ready.append(fresh)
        return ready

    async def _fill_gap(self) -> AsyncGenerator[list[Chunk], None]:
        """Yield the missing chunks before the first arrived one."""
        self._stats.gaps += 1
        async for batch in self._read_log():
            yield batch
        if self._cursor.next_index < self._arrived[0].index:
            self._arrived.popleft()
            async for batch in self._catch_up():
                yield batch

    async def _catch_up(self) -> AsyncGenerator[list[Chunk], None]:
        """Yield everything that the broker has of the job and the reader lacks."""
        attached = await self._source.attach()
        if attached.num_chunks < self._cursor.next_index:
            self._cursor.rewind()
        if attached.num_chunks > self._cursor.next_index:
            if await self._comes_by_itself():
                return
            async for batch in self._read_log():
                yield batch
        if attached.state in TERMINAL_STATES and self._cursor.outcome is None:
            result = await self._source.result()
            if result is not None and (batch := self._fresh(rest_of(result, self._cursor.next_index))):
                yield batch

    async def _comes_by_itself(self) -> bool:
        """Whether the next chunk was still on its way when the broker counted it. It has then arrived by now."""
        await self._source.receive_published()
        self._arrived.extend(self._box.take_all())
        return any(chunk.index == self._cursor.next_index for chunk in self._arrived)

    async def _read_log(self) -> AsyncGenerator[list[Chunk], None]:
        count = LARGE_CHUNKS_PER_PAGE if has_logprobs(self._arrived) else LOG_PAGE_CHUNKS
        page_is_full = True
        while page_is_full:
            page = await self._source.log(self._cursor.next_index, count)
            # A page of large chunks ends early.
            page_is_full = len(page) == count or has_logprobs(page)
            count = LARGE_CHUNKS_PER_PAGE if has_logprobs(page) else LOG_PAGE_CHUNKS
            if batch := self._fresh(page):
                yield batch

    def _fresh(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        return [fresh for chunk in chunks if isinstance(fresh := self._cursor.offer(chunk), Chunk)]
