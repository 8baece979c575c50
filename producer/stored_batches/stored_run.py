"""One batch over stored files, run under its lease: check, expand, collect, end.

A window of its rows is in the queue. A row's job has an idempotency key that only batch and custom_id decide. So after
the death of a holder, the next one finds the jobs of all rows that no part has, and their results.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from penstock.contract.errors import (
    BusyError,
    InvariantError,
    JobCancelledError,
    JobFailedError,
    NotFoundError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.producer.batch.results import row_id_of
from penstock.producer.batch.runner import answer
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import choose_pool
from penstock.producer.files.service import Files
from penstock.producer.stored_batches.parts import BatchEnding, PartWriter, save_joined
from penstock.producer.stored_batches.row_client import RowClient, RowCounter, require_lease
from penstock.producer.stored_batches.rows import (
    KINDS,
    OUTPUT,
    FinishedRow,
    InputCheck,
    InputLimits,
    RowReader,
    StoredRow,
    checked_input,
    format_of,
    is_committed,
)
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, BatchLease, BatchRecord, RowProblem, is_of_messages
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import BATCH_OUTPUT, MESSAGE_RESULTS, object_of
from penstock.runtime.event_loop import CALLS_AT_ONCE, cancel_until_done, try_all

_LOG = logging.getLogger(__package__)
MIN_WINDOW, MAX_WINDOW = 64, 4096
"""Rows of a batch that are in the queue: at least, also without a node, and at most."""
WINDOW_PER_SLOT = 2
MAX_WINDOW_BYTES = 32 << 20
"""Bytes of the lines whose rows are in the queue, but for the last of them."""
MAX_BYTES_ON_LOOP = 64 << 10
STOP_WAIT_S = 10.0
"""Seconds that canceled jobs of a batch may take to end. Rows whose jobs take longer count as not answered."""
_TICK_S = 0.25
_RETRY_S = 2.0
_JITTER = 0.2
_RATE_S = 60.0
"""Seconds over which the rows a second are counted."""
_STOPPED = {
    CANCELLED_ROW: "the batch was cancelled before this request was answered",
    EXPIRED_ROW: "the completion window of the batch ended before this request was answered",
}
INPUT_LOST = RowProblem("input_lost", "the storage has lost the input file", param="input_file_id")
T = TypeVar("T")


class _StoppedError(Exception):
    """The batch is canceled, or its window is over, before its input is checked."""


class StoredBatchRun:
    """The run of one batch by the holder of its lease."""

    def __init__(
        self,
        client: AsyncClient,
        files: Files,
        batches: BatchRecords,
        lease: BatchLease,
        batch: BatchRecord,
        share: Callable[[], int],
        counter: RowCounter,
    ) -> None:
        """`share` returns among how many batches this process divides the window."""
        self._files = files
        self._batches = batches
        self._lease = lease
        self._batch = batch
        self._share = share
        self._client = client
        self._counter = counter
        self._rows = RowClient(client, batches, batch, lease, counter)
        self._parts = PartWriter(files, batches, lease, counter)
        self._format = format_of(batch.batch_id, batch.spec)
        self._taken = bytearray()
        """A bit per row that is in a part or in the queue."""
        self._tasks: dict[asyncio.Task[None], StoredRow] = {}
        self._num_bytes = 0
        self._finished: asyncio.Queue[FinishedRow] = asyncio.Queue()
        self._failure: BaseException | None = None
        """An error that is no row's fault. It ends the run, and the next holder goes on."""
        self._stopped = ""
        """The code of the rows that will not be answered; empty while the batch goes on."""
        self._progress: deque[tuple[float, int]] = deque()
        self._window = MIN_WINDOW
        self._window_until_s = 0.0

    async def run(self) -> None:
        """Run the batch to its end. Raises BatchTakenError if another process has it."""
        try:
            await self._run()
        except NotFoundError as error:
            if error.code != "no_object" or await self._patiently(self._has_input):
                raise
            # Which rows were not answered is lost with the input. Those that were are kept.
            await self._patiently(lambda: self._finish("failed", [INPUT_LOST]))

    async def _has_input(self) -> bool:
        storage = await self._files.storage()
        return await self._files.on_thread(storage.exists, object_of(self._batch.spec.input_file_id))

    async def _run(self) -> None:
        if self._lease.status == "validating":
            with suppress(_StoppedError):
                if not await self._start():
                    return
        self._batch = await self._batches.find(self._batch.batch_id)
        ending = self._batch.ending
        if self._lease.status != "finalizing":
            ending = await self._answered()
            await self._patiently(lambda: self._batches.finalize(self._lease, ending))
        await self._patiently(lambda: self._finish(ending))
        await self._files.delete_garbage(f"parts/{self._batch.batch_id}/")
        if is_of_messages(self._batch.batch_id):
            await self._files.delete_garbage(object_of(self._batch.spec.input_file_id))

    async def _answered(self) -> str:
        """Let every row have a part, with its answer or its error. Return the state in which the batch ends."""
        if "in_progress" not in self._batch.times:
            # It ends before its input was checked.
            self._must_stop()
            return "expired" if self._stopped == EXPIRED_ROW else "cancelled"
        self._taken = bytearray(await self._batches.committed_rows(self._batch.batch_id))
        try:
            await self._answer_all()
            if self._stopped:
                await self._stop()
        finally:
            await cancel_until_done([*self._tasks])
        rows = await self._patiently(lambda: self._batches.committed_rows(self._batch.batch_id))
        if (num_rows := sum(byte.bit_count() for byte in rows)) != self._batch.num_rows:
            raise InvariantError(f"{num_rows} of {self._batch.num_rows} rows of {self._batch.batch_id} are committed")
        return {CANCELLED_ROW: "cancelled", EXPIRED_ROW: "expired"}.get(self._stopped, "completed")

    async def _finish(self, ending: str, problems: Sequence[RowProblem] = ()) -> None:
        retention_ms, life_s = self._files.settings.retention_ms, self._batch.spec.output_life_s
        if is_of_messages(self._batch.batch_id):
            # They live from the creation of the batch on. A retention of any length leaves the record as long.
            age_ms = int(self._batches.now_s() * 1000) - self._batch.times["created"]
            life_ms = max(1, 1000 * (life_s or 0) - age_ms)
            saved = (MESSAGE_RESULTS, {OUTPUT: "results"}, life_ms, max(life_ms, retention_ms))
        else:
            life_ms = retention_ms if life_s is None else 1000 * life_s
            saved = (BATCH_OUTPUT, {kind: kind for kind in KINDS}, life_ms, retention_ms)
        end = BatchEnding(self._batch.tenant, ending, *saved, problems)
        await save_joined(self._files, self._batches, self._lease, end)

    # The check of the input.

    async def _start(self) -> bool:
        """Check the input and start the batch. Return whether it has rows to answer."""
        limits = InputLimits(
            self._batch.spec.endpoint, self._files.settings.max_batch_rows, self._files.settings.max_batch_inputs
        )
        found = await self._patiently(lambda: self._checked(limits), may_stop=True)
        found.problems += await self._patiently(lambda: self._unknown_models(found), may_stop=True)
        if found.problems and self._lease.status == "validating":
            life_ms = self._files.settings.retention_ms
            await self._patiently(lambda: self._batches.fail(self._lease, found.problems, life_ms))
            return False
        max_rows = self._files.settings.max_tenant_rows
        start = partial(self._batches.start, self._lease, found.num_rows, max_rows)
        status = await self._patiently(start, may_stop=True)
        self._lease.status = status
        return True

    async def _checked(self, limits: InputLimits) -> InputCheck:
        storage = await self._files.storage()

        def check() -> InputCheck:
            with storage.reader(object_of(self._batch.spec.input_file_id)) as source:
                return checked_input(source, limits, lambda: self._lease.is_lost or self._lease.status == "cancelling")

        return await self._files.on_thread(check)

    async def _unknown_models(self, found: InputCheck) -> list[RowProblem]:
        key = await self._rows.key()
        pools = (await self._client.pools(renewed=True)).values()
        problems = []
        for name, line in found.models.items():
            try:
                model = name if key is None else key.model_of(name)
                choose_pool(pools, model or None, hides_models=key is not None and bool(key.models))
            except RequestError as error:
                problems.append(RowProblem(error.code, error.message, line, "model"))
            except UnavailableError:
                # The model is known, and its nodes may return.
                continue
        return problems

    # The answers.

    async def _answer_all(self) -> None:
        """Answer all rows that no part has. Return when all are committed, or when the batch is to stop."""
        reader: RowReader | None = None
        waiting_rows: deque[StoredRow] = deque()
        is_read = False
        try:
            while not is_read or waiting_rows or self._tasks or not self._finished.empty():
                if self._must_stop():
                    return
                if reader is None and not is_read:
                    reader = await self._patiently(self._reader)
                while reader is not None and not waiting_rows and self._free() > 0:
                    found = await self._next_rows(reader)
                    if found is None:
                        reader = None
                        break
                    if not found:
                        is_read = True
                        reader.close()
                        reader = None
                        break
                    waiting_rows.extend(found)
                while waiting_rows and self._free() > 0:
                    self._begin(waiting_rows.popleft())
                await self._collect()
            await self._commit()
        finally:
            if reader is not None:
                reader.close()

    def _must_stop(self) -> bool:
        if self._lease.status == "cancelling":
            self._stopped = CANCELLED_ROW
        elif self._batches.now_s() * 1000 >= self._batch.times["expires"]:
            self._stopped = EXPIRED_ROW
        return bool(self._stopped)

    async def _reader(self) -> RowReader:
        storage = await self._files.storage()
        source = await self._files.on_thread(storage.reader, object_of(self._batch.spec.input_file_id))
        return RowReader(source, bytes(self._taken))

    async def _next_rows(self, reader: RowReader) -> list[StoredRow] | None:
        """Return the next rows; None if the storage failed, so that they are to be read anew."""
        try:
            rows = await self._files.on_thread(reader.window, await self._window_rows())
        except (UnavailableError, BusyError) as error:
            reader.close()
            await self._wait_for(error)
            return None
        for row in rows:
            self._take(row.number)
        return rows

    def _take(self, number: int) -> None:
        at = number >> 3
        self._taken += bytes(max(0, at + 1 - len(self._taken)))
        self._taken[at] |= 0x80 >> (number & 7)

    def _free(self) -> int:
        if self._lease.is_paused or self._num_bytes >= MAX_WINDOW_BYTES:
            return 0
        return self._window - len(self._tasks)

    async def _window_rows(self) -> int:
        """Return how many rows may be in the queue: its share of twice the sequences of the live nodes."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._window_until_s:
            slots = 0
            for pool in self._rows.pools_used:
                with suppress(PenstockError):
                    slots += sum(node.max_num_seqs for node in (await self._client.pressure(pool)).nodes)
            whole = min(MAX_WINDOW, max(MIN_WINDOW, WINDOW_PER_SLOT * slots))
            self._window = max(MIN_WINDOW, whole // max(1, self._share()))
            self._window_until_s = now_s + 1
        return self._window

    def _begin(self, row: StoredRow) -> None:
        task = asyncio.create_task(self._answer(row), name=f"penstock {self._batch.batch_id} row {row.number}")
        self._tasks[task] = row
        self._num_bytes += row.num_bytes
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._num_bytes -= self._tasks.pop(task).num_bytes
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    async def _answer(self, row: StoredRow) -> None:
        key = self._key_of(row)
        try:
            # A check of megabytes would hold the event loop.
            read, is_small = self._format.request_of, row.num_bytes <= MAX_BYTES_ON_LOOP
            request = read(row.fields) if is_small else await self._files.on_thread(read, row.fields)
            job_id, body = await self._with_retries(lambda: answer(self._rows, request, None, key, in_feed=False))
            finished = self._format.answered(row, body, job_id)
        except (RequestError, JobFailedError) as error:
            if self._stopped and isinstance(error, JobCancelledError):
                finished = self._unanswered(row)
            else:
                finished = self._format.failed(row, error)
        finally:
            self._rows.open_jobs.pop(key, None)
        self._finished.put_nowait(finished)

    def _unanswered(self, row: StoredRow) -> FinishedRow:
        reason = PenstockError(_STOPPED[self._stopped], code=self._stopped)
        return self._format.stopped(row, reason)

    async def _with_retries(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until the queue takes the row: a limit of the tenant or of the pool, or an outage, fails no row."""
        while True:
            try:
                return await ask()
            except (BusyError, UnavailableError) as error:
                if self._stopped:
                    raise JobCancelledError(error.message) from None
                self._lease.waiting = error.message
                self._counter.refused()
                await asyncio.sleep(error.retry_after_ms / 1000 * random.uniform(1, 1 + _JITTER))

    async def _collect(self) -> None:
        """Wait shortly for finished rows, and commit what is due."""
        require_lease(self._lease)
        if self._failure is not None:
            raise self._failure
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                self._add(await self._finished.get())
        for _ in range(min(self._finished.qsize(), CALLS_AT_ONCE)):
            self._add(self._finished.get_nowait())
        if self._parts.is_due:
            await self._commit()
        await self._window_rows()

    def _add(self, row: FinishedRow) -> None:
        self._parts.add(row)
        self._lease.waiting = ""

    async def _commit(self) -> None:
        jobs = await self._patiently(self._parts.commit)
        now_s = asyncio.get_running_loop().time()
        self._progress.append((now_s, self._parts.num_committed))
        while len(self._progress) > 2 and now_s - self._progress[0][0] > _RATE_S:
            self._progress.popleft()
        (first_s, first), (_, last) = self._progress[0], self._progress[-1]
        self._lease.rows_per_s = (last - first) / (now_s - first_s) if now_s > first_s else 0.0
        with suppress(UnavailableError):
            # Otherwise they expire by themselves.
            await self._client.ack(*jobs, tenant=self._batch.tenant)

    # The end before all rows are answered.

    def _key_of(self, row: StoredRow) -> str:
        return row_id_of(self._batch.batch_id, row.custom_id)

    async def _stop(self) -> None:
        """Cancel the jobs in the queue, keep what is answered by then, and give every other row its error."""
        # Rows that wait for the queue must not enter it any more.
        open_jobs = self._rows.open_jobs
        await cancel_until_done([task for task, row in self._tasks.items() if self._key_of(row) not in open_jobs])
        left = await self._patiently(self._left_rows)
        of_others = await self._jobs_of_earlier_holders(left)
        job_ids = {job.id for jobs in self._rows.open_jobs.values() for job in jobs} | {*of_others.values()}
        await try_all([partial(self._client.cancel, job_id, tenant=self._batch.tenant) for job_id in job_ids])
        for row in await self._patiently(lambda: self._left_rows(with_bodies=of_others)):
            if row.fields and not is_committed(self._taken, row.number):
                self._take(row.number)
                self._begin(row)
        deadline_s = asyncio.get_running_loop().time() + STOP_WAIT_S
        while (self._tasks or not self._finished.empty()) and asyncio.get_running_loop().time() < deadline_s:
            await self._collect()
        await cancel_until_done([*self._tasks])
        while not self._finished.empty():
            await self._collect()
        await self._commit()
        for row in await self._patiently(self._left_rows):
            self._parts.add(self._unanswered(row))
            if self._parts.is_due:
                await self._commit()
        await self._commit()

    async def _left_rows(self, with_bodies: Collection[str] = ()) -> list[StoredRow]:
        """Return all rows that no part has, without their fields unless they are among these keys."""
        committed = await self._batches.committed_rows(self._batch.batch_id)
        storage = await self._files.storage()

        def read() -> list[StoredRow]:
            with storage.reader(object_of(self._batch.spec.input_file_id)) as source:
                rows = list[StoredRow]()
                for row in RowReader(source, committed).in_order():
                    # There may be 256 MB of them.
                    is_wanted = self._key_of(row) in with_bodies
                    rows.append(row if is_wanted else replace(row, fields={}, num_bytes=0))
                return rows

        return await self._files.on_thread(read)

    async def _jobs_of_earlier_holders(self, left: list[StoredRow]) -> dict[str, str]:
        pools = [*await self._client.pools()]
        found: dict[str, str] = {}
        for at in range(0, len(left), 500):
            keys = [self._key_of(row) for row in left[at : at + 500]]
            found |= await self._batches.job_ids(pools, self._batch.tenant, keys)
        return found

    # Waiting.

    async def _patiently(self, call: Callable[[], Awaitable[T]], *, may_stop: bool = False) -> T:
        """Return the answer of `call`, repeated while the storage or Redis is away. Its batch says why it waits.

        `may_stop`: it ends with _StoppedError for a batch that is to end without answers.
        """
        while True:
            require_lease(self._lease)
            if may_stop and self._must_stop():
                raise _StoppedError
            try:
                return await call()
            except NotFoundError:
                raise
            except (UnavailableError, BusyError) as error:
                await self._wait_for(error)

    async def _wait_for(self, error: PenstockError) -> None:
        self._lease.waiting = error.message
        _LOG.warning("a batch waits", extra={"batch_id": self._batch.batch_id, "reason": error.reason})
        await asyncio.sleep(_RETRY_S)
