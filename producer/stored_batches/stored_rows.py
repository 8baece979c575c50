"""The rows of a batch over stored files that no part has: how many may be in the queue, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress

from penstock.contract.errors import BusyError, PenstockError, UnavailableError
from penstock.producer.batch.finished import FinishedRow, RowFormat
from penstock.producer.batch.lines import InputRow, RowReader, is_marked
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.stored_batches.row_client import BatchPatience, BatchStoppedError, RowClient, require_lease
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, BatchLease, BatchRecord
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import object_of

MIN_WINDOW, MAX_WINDOW = 64, 4096
"""Rows of a batch that are in the queue: at least, also without a node, and at most."""
WINDOW_PER_SLOT = 2


class BatchWindow:
    """How many rows of a batch may be in the queue, and whether it has to stop."""

    def __init__(
        self, client: AsyncClient, lease: BatchLease, batch: BatchRecord, rows: RowClient, share: Callable[[], int]
    ) -> None:
        """`share` returns among how many batches this process divides the window."""
        self._client = client
        self._lease = lease
        self._batch = batch
        self._rows = rows
        self._share = share
        self._window = MIN_WINDOW
        self._window_until_s = 0.0
        self.stopped = ""
        """The code of the rows that will not be answered; empty while the batch goes on."""

    def must_stop(self) -> bool:
        """Return whether the batch is canceled, or its window is over."""
        if self._lease.status == "cancelling":
            self.stopped = CANCELLED_ROW
        elif self._client.batches.now_s() * 1000 >= self._batch.times["expires"]:
            self.stopped = EXPIRED_ROW
        return bool(self.stopped)

    async def rows(self) -> int:
        """Return how many rows may be in the queue: its share of twice the sequences of the live nodes."""
        require_lease(self._lease)
        if self.must_stop() or self._lease.is_paused:
            return 0
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


class StoredRows:
    """Reads the input of a batch whose rows wait for nothing."""

    has_more = False

    def __init__(
        self,
        files: Files,
        batches: BatchRecords,
        batch: BatchRecord,
        patiently: BatchPatience,
        window: BatchWindow,
        form: RowFormat,
    ) -> None:
        self._files = files
        self._batches = batches
        self._batch = batch
        self._patiently = patiently
        self._window = window
        self._form = form
        self._reader: RowReader | None = None
        self._taken = bytearray()
        """A bit per row that is in a part or in the queue."""

    @property
    def stopped(self) -> str:
        """The code of the rows that will not be answered; empty while the batch goes on."""
        return self._window.stopped

    @property
    def num_rows(self) -> int:
        """The number of all rows."""
        return self._batch.num_rows

    async def open(self, batch: BatchRecord) -> None:
        """Begin to read the rows of a batch that no part has. It is the record as it is now."""
        self._batch = batch
        self._taken = bytearray(await self._batches.committed_rows(batch.batch_id))

    async def window(self) -> int:
        """Return how many rows may be in the queue now."""
        return await self._window.rows()

    async def next_rows(self, limit: int) -> Sequence[InputRow]:
        """Return the next rows; none at the end, and once the batch has stopped."""
        with suppress(BatchStoppedError):
            rows = await self._patiently(lambda: self._read(limit), self._window.must_stop)
            for row in rows:
                self.take(row.number)
            return rows
        return ()

    async def _read(self, limit: int) -> list[InputRow]:
        if self._reader is None:
            storage = await self._files.storage()
            source = await self._files.on_thread(storage.lines, object_of(self._batch.spec.input_file_id))
            self._reader = RowReader(source, bytes(self._taken))
        try:
            return await self._files.on_thread(self._reader.window, limit)
        except (UnavailableError, BusyError):
            await self.close()
            raise

    def take(self, number: int) -> bool:
        """Note that a row is in the queue. Return whether it was not before."""
        if is_marked(self._taken, number):
            return False
        at = number >> 3
        self._taken += bytes(max(0, at + 1 - len(self._taken)))
        self._taken[at] |= 0x80 >> (number & 7)
        return True

    async def left_rows(self, with_bodies: Collection[str] = ()) -> list[InputRow]:
        """Return all rows that no part has, without their fields unless they are among these keys."""
        committed = await self._batches.committed_rows(self._batch.batch_id)
        storage = await self._files.storage()

        def read() -> list[InputRow]:
            with closing(storage.lines(object_of(self._batch.spec.input_file_id))) as source:
                rows = list[InputRow]()
                for row in RowReader(source, committed).in_order():
                    # There may be 256 MB of them.
                    is_wanted = self._form.key_of(row) in with_bodies
                    rows.append(row if is_wanted else row.without_body())
                return rows

        return await self._files.on_thread(read)

    def note_finished(self, row: FinishedRow) -> bool:
        """Return False, because no row waits for another one."""
        return False

    async def note_stored(self, rows: Sequence[FinishedRow]) -> None:
        """Do nothing, because no row waits for another one."""

    async def close(self) -> None:
        """Close the input. The next rows are read from its start, without those that are taken."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
