"""The rows of a batch over stored files that no part has: how many may be in the queue, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.contract.errors import BusyError, PenstockError, UnavailableError
from penstock.producer.batch.lines import InputRow, RowReader, is_marked
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.stored_batches.row_client import BatchPatience, BatchStoppedError, RowClient, require_lease
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, BatchLease, BatchRecord
from penstock.queue.files.file_records import object_of

MIN_WINDOW, MAX_WINDOW = 64, 4096
"""Rows of a batch that are in the queue: at least, also without a node, and at most."""
WINDOW_PER_SLOT = 2


class StoredRows:
    """Reads the input of a batch, and says how many of its rows may be in the queue."""

    def __init__(
        self,
        client: AsyncClient,
        files: Files,
        lease: BatchLease,
        batch: BatchRecord,
        rows: RowClient,
        patiently: BatchPatience,
        share: Callable[[], int],
    ) -> None:
        """`share` returns among how many batches this process divides the window."""
        self._client = client
        self._files = files
        self._lease = lease
        self._batch = batch
        self._rows = rows
        self._patiently = patiently
        self._share = share
        self._reader: RowReader | None = None
        self._window = MIN_WINDOW
        self._window_until_s = 0.0
        self.taken = bytearray()
        """A bit per row that is in a part or in the queue."""
        self.stopped = ""

    def must_stop(self) -> bool:
        """Return whether the batch is canceled, or its window is over."""
        if self._lease.status == "cancelling":
            self.stopped = CANCELLED_ROW
        elif self._client.batches.now_s() * 1000 >= self._batch.times["expires"]:
            self.stopped = EXPIRED_ROW
        return bool(self.stopped)

    async def window(self) -> int:
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

    async def next_rows(self, limit: int) -> Sequence[InputRow]:
        """Return the next rows; none at the end, and once the batch has stopped."""
        with suppress(BatchStoppedError):
            rows = await self._patiently(lambda: self._read(limit), self.must_stop)
            for row in rows:
                self.take(row.number)
            return rows
        return ()

    async def _read(self, limit: int) -> list[InputRow]:
        if self._reader is None:
            storage = await self._files.storage()
            source = await self._files.on_thread(storage.lines, object_of(self._batch.spec.input_file_id))
            self._reader = RowReader(source, bytes(self.taken))
        try:
            return await self._files.on_thread(self._reader.window, limit)
        except (UnavailableError, BusyError):
            self.close()
            raise

    def take(self, number: int) -> bool:
        """Note that a row is in the queue. Return whether it was not before."""
        if is_marked(self.taken, number):
            return False
        at = number >> 3
        self.taken += bytes(max(0, at + 1 - len(self.taken)))
        self.taken[at] |= 0x80 >> (number & 7)
        return True

    def close(self) -> None:
        """Close the input. The next rows are read from its start, without those that are taken."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
