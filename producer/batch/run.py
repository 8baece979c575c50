"""The run of a batch's rows: it has a window of a source's rows in the queue, and a sink stores them as they finish.

A row's job has an idempotency key that only batch and custom_id decide. So a killed run can be repeated: its source has
the rows that are not stored, and the jobs that were already submitted for them are found.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from penstock.contract.errors import BusyError, JobCancelledError, JobFailedError, RequestError, UnavailableError
from penstock.producer.batch.answer import Submitter, answer
from penstock.producer.batch.finished import FinishedRow, RowFormat
from penstock.producer.batch.lines import InputRow
from penstock.producer.batch.records import RowTerms
from penstock.producer.client import AsyncJob
from penstock.producer.parsed_body import ParsedBody
from penstock.runtime.event_loop import cancel_until_done

MAX_WINDOW_BYTES = 32 << 20
"""Bytes of the lines whose rows are in the queue, but for the last of them."""
MAX_BYTES_ON_LOOP = 64 << 10
MAX_BEGUN_AT_ONCE = 32
"""Rows that begin in one round of the event loop, because other callers of the process wait for its end."""
_TICK_S = 0.25
_JITTER = 0.2
"""The share by which a pause between two attempts is randomly lengthened, so that rows do not retry at once."""


class RowSource(Protocol):
    """The rows of a batch that are not stored yet."""

    @property
    def stopped(self) -> str:
        """The code of the rows that will not be answered; empty while the batch goes on."""

    async def window(self) -> int:
        """Return how many rows may be in the queue now. Raises an error if this process may not go on."""

    @property
    def has_more(self) -> bool:
        """Whether rows may follow although `next_rows` has just returned none: they wait for others to be stored."""

    async def next_rows(self, limit: int) -> Sequence[InputRow | FinishedRow]:
        """Return the next rows, of which it has not returned any before; none at the end.

        Those that need no answer of a model have finished.
        """


class RowSink(Protocol):
    """Where finished rows are stored."""

    @property
    def is_full(self) -> bool:
        """Whether what was added is to be stored before more is added."""

    @property
    def due_in_s(self) -> float | None:
        """Seconds until what was added is to be stored; 0: now, None: nothing was added."""

    def add(self, row: FinishedRow) -> None:
        """Add a row. It is not called while `store` runs."""

    async def store(self) -> list[str]:
        """Store what was added, and return the jobs whose results are stored then."""

    def report(self, waiting: str) -> None:
        """Tell why rows wait to be submitted; empty: no row waits, and rows were stored."""


class RowRun:
    """Answers the rows of one batch, as long as this process may."""

    def __init__(
        self,
        client: Submitter,
        source: RowSource,
        sink: RowSink,
        form: RowFormat,
        terms: RowTerms,
        on_submit: Callable[[], None],
    ) -> None:
        self._client = client
        self._source = source
        self._sink = sink
        self._form = form
        self._terms = terms
        self._on_submit = on_submit
        self._tasks: dict[asyncio.Task[FinishedRow], InputRow] = {}
        self._num_bytes = 0
        self._finished: deque[FinishedRow] = deque()
        self._storing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        """An error that is no row's fault. It ends the run, and another run goes on."""
        self._changed = asyncio.Event()
        # Of one request.
        self.open_jobs: dict[str, list[AsyncJob]] = {}
        """The jobs whose rows are not finished, by the key of the row. A row of embeddings has a job for each text."""

    @property
    def is_busy(self) -> bool:
        """Whether a row has not finished, or was not handed to the sink."""
        return bool(self._tasks or self._finished)

    async def answer_all(self) -> None:
        """Answer all rows. Return when all are stored, or when the source has stopped."""
        waiting, is_read = deque[InputRow](), False
        while True:
            window = await self._source.window()
            if self._source.stopped:
                return
            while not is_read and not waiting and self._has_room(window):
                found = await self._source.next_rows(window)
                for row in found:
                    if isinstance(row, FinishedRow):
                        self._finish(row)
                    else:
                        waiting.append(row)
                if not found:
                    is_read = not self._source.has_more
                    break
            if is_read and not waiting and not self.is_busy:
                break
            await self._begin_all(waiting, window)
            await self.collect()
        await self.store_all()

    async def _begin_all(self, waiting: deque[InputRow], window: int) -> None:
        """Begin the rows for which there is room, some in each round of the event loop."""
        num_begun = 0
        while waiting and self._has_room(window):
            self.begin(waiting.popleft())
            num_begun += 1
            if num_begun % MAX_BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _has_room(self, window: int) -> bool:
        # While the sink stores rows, others go on, but not without limit.
        is_within = len(self._tasks) < window and len(self._finished) < window
        return is_within and self._num_bytes < MAX_WINDOW_BYTES

    def begin(self, row: InputRow) -> None:
        """Submit a row, and wait for its answer."""
        task = asyncio.create_task(self._answer(row), name=f"penstock row {row.custom_id}")
        self._tasks[task] = row
        self._num_bytes += row.num_bytes
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[FinishedRow]) -> None:
        self._num_bytes -= self._tasks.pop(task).num_bytes
        self._changed.set()
        if task.cancelled():
            return
        if (error := task.exception()) is None:
            self._finish(task.result())
        else:
            self._failure = error

    def _finish(self, row: FinishedRow) -> None:
        self._finished.append(row)
        self._changed.set()

    async def collect(self) -> None:
        """Wait shortly for finished rows, hand them to the sink, and let it store what is due."""
        is_storing = self._storing is not None and not self._storing.done()
        due_in_s = None if is_storing else self._sink.due_in_s
        pause_s = _TICK_S if due_in_s is None else min(_TICK_S, due_in_s)
        tick = asyncio.get_running_loop().call_later(pause_s, self._changed.set)
        await self._changed.wait()
        tick.cancel()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        if self._storing is not None and not self._storing.done():
            return
        await self._end_storing()
        self._hand_over()
        if self._sink.due_in_s == 0:
            self._storing = asyncio.create_task(self._store(), name="penstock rows to store")
            self._storing.add_done_callback(self._note_stored)

    def _note_stored(self, task: asyncio.Task[None]) -> None:
        self._changed.set()
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    async def store_all(self) -> None:
        """Store all rows that have finished."""
        await self._end_storing()
        while True:
            self._hand_over()
            await self._store()
            if not self._finished:
                return

    async def _end_storing(self) -> None:
        storing, self._storing = self._storing, None
        if storing is not None:
            await storing

    def _hand_over(self) -> None:
        while self._finished and not self._sink.is_full:
            self._sink.add(self._finished.popleft())

    async def _store(self) -> None:
        job_ids = await self._sink.store()
        with suppress(UnavailableError):
            # Otherwise they expire by themselves.
            await self._client.ack(*job_ids)
        self._sink.report("")

    async def cancel(self, *, submitted: bool = True) -> None:
        """Answer no further rows. Without `submitted`, rows whose jobs are in the queue go on."""
        rows = [task for task, row in self._tasks.items() if submitted or self._form.key_of(row) not in self.open_jobs]
        await cancel_until_done(rows)

    async def close(self) -> None:
        """End all work, also that of storing."""
        await cancel_until_done([*self._tasks, *([] if self._storing is None else [self._storing])])

    async def _answer(self, row: InputRow) -> FinishedRow:
        key, terms = self._form.key_of(row), self._terms
        if row.priority != terms.priority:
            terms = replace(terms, priority=row.priority)
        try:
            # A check of megabytes would hold the event loop.
            read, is_small = self._form.request_of, row.num_bytes <= MAX_BYTES_ON_LOOP
            request = read(row) if is_small else await asyncio.to_thread(read, row)
            job_id, body = await self._with_retries(request, key, terms)
            return self._form.answered(row, body, job_id)
        except (RequestError, JobFailedError) as error:
            if self._source.stopped and isinstance(error, JobCancelledError):
                return self._form.stopped(row, self._source.stopped)
            return self._form.failed(row, error)
        finally:
            self.open_jobs.pop(key, None)

    async def _with_retries(self, request: ParsedBody, key: str, terms: RowTerms) -> tuple[str, dict[str, Any]]:
        """Ask until the queue takes the row: a limit of the tenant or of the pool, or an outage, fails no row."""

        def note(job: AsyncJob) -> None:
            self.open_jobs.setdefault(key, []).append(job)
            self._on_submit()

        while True:
            try:
                return await answer(self._client, request, key, terms, on_submit=note)
            except (BusyError, UnavailableError) as error:
                if self._source.stopped:
                    raise JobCancelledError(error.message) from None
                self._sink.report(error.message)
                await asyncio.sleep(error.retry_after_ms / 1000 * random.uniform(1, 1 + _JITTER))
