"""Finished rows of a batch on their way to its files: immutable parts, which a script commits, and their join.

A part is named by the token of its writer's lease. So a process that slept through its lease writes other objects than
the present holder, and the script does not commit them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.producer.batch.finished import KINDS, FinishedRow
from penstock.producer.files.service import Files
from penstock.producer.stored_batches.row_client import BatchPatience, RowCounter
from penstock.queue.files.batch import BatchLease, Part, PartCounts, RowProblem
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import NewFile

MAX_PART_ROWS = 512
MAX_PART_BYTES = 4 << 20
FIRST_PART_S, LONGEST_PART_S, PARTS_OF_RUN = 1.0, 60.0, 500
"""Seconds that a finished row waits for its part: at first, at most, and so many parts of the time that the batch has
run. So a batch of a day has some thousands of parts, and the first rows of any batch appear at once."""
_RATE_S = 60.0
"""Seconds over which the rows a second are counted."""


class WaitingRows(Protocol):
    """The rows of a flow that wait for others to be stored."""

    def note_finished(self, row: FinishedRow) -> bool:
        """Note a row that is in no part yet. Return whether rows wait for nothing else than parts now."""

    async def note_stored(self, rows: Sequence[FinishedRow]) -> None:
        """Note that a part has these rows."""


class PartWriter:
    """The part that grows, and those that are committed, for one lease of a batch."""

    def __init__(
        self,
        files: Files,
        batches: BatchRecords,
        lease: BatchLease,
        counter: RowCounter,
        patiently: BatchPatience,
        waiting: WaitingRows,
    ) -> None:
        self._counter = counter
        self._waiting = waiting
        self._files = files
        self._batches = batches
        self._lease = lease
        self._patiently = patiently
        self._began_s = asyncio.get_running_loop().time()
        self._rows: list[FinishedRow] = []
        self._lines: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
        self._num_bytes = 0
        self._oldest_s = self._stored_s = 0.0
        self._is_awaited = False
        """Whether other rows of a flow could go on if the part was stored."""
        self._number = 0
        self._num_committed = 0
        self._progress: deque[tuple[float, int]] = deque()

    def add(self, row: FinishedRow) -> None:
        """Add a finished row to the part that grows."""
        self._lease.waiting = ""
        if not self._rows:
            self._oldest_s = asyncio.get_running_loop().time()
        self._rows.append(row)
        self._lines[row.kind].append(row.line)
        self._num_bytes += len(row.line)
        self._is_awaited |= self._waiting.note_finished(row)

    @property
    def is_full(self) -> bool:
        """Whether the part may grow no more."""
        return len(self._rows) >= MAX_PART_ROWS or self._num_bytes >= MAX_PART_BYTES

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the part is to be committed; 0: now, None: it has no rows."""
        if not self._rows:
            return None
        if self.is_full:
            return 0
        now_s = asyncio.get_running_loop().time()
        spaced_s = (now_s - self._began_s) / PARTS_OF_RUN
        due_s = self._oldest_s + min(LONGEST_PART_S, max(FIRST_PART_S, spaced_s))
        if self._is_awaited:
            # After a pause at once, but many rows of a wide flow share a part.
            due_s = min(due_s, self._stored_s + min(FIRST_PART_S, spaced_s))
        return max(0.0, due_s - now_s)

    def report(self, waiting: str) -> None:
        """Note why rows wait to be submitted."""
        if waiting:
            self._lease.waiting = waiting
            self._counter.refused()

    async def store(self) -> list[str]:
        """Commit the part that grows, and return the jobs whose results are stored then. Raises BatchTakenError."""
        jobs = await self._patiently(self._commit)
        now_s = self._stored_s = asyncio.get_running_loop().time()
        self._progress.append((now_s, self._num_committed))
        while len(self._progress) > 2 and now_s - self._progress[0][0] > _RATE_S:
            self._progress.popleft()
        (first_s, first), (_, last) = self._progress[0], self._progress[-1]
        self._lease.rows_per_s = (last - first) / (now_s - first_s) if now_s > first_s else 0.0
        return jobs

    async def _commit(self) -> list[str]:
        """Write and commit the part.

        After an error it may be called again: the part has the same name and content. Raises BatchTakenError, and
        UnavailableError or BusyError of the storage and of Redis.
        """
        if not self._rows:
            return []
        part, storage = (
            f"parts/{self._lease.batch_id}/{self._lease.token:08d}-{self._number:06d}",
            await self._files.storage(),
        )
        written, counts = [], PartCounts()
        for kind in KINDS:
            if lines := self._lines[kind]:
                content = b"".join(lines)
                name = f"{part}.{kind}"

                def write(name: str = name, content: bytes = content) -> None:
                    writer = storage.writer(name)
                    try:
                        writer.write(content)
                        writer.commit()
                    except BaseException:
                        writer.discard()
                        raise

                await self._files.on_thread(write)
                written.append(Part(name, kind, len(content)))
        for one in self._rows:
            if one.outcome == "completed":
                counts.completed += 1
                counts.add(one.usage)
            else:
                counts.failed += 1
                counts.stopped += one.outcome == "stopped"
        numbers, made = [], []
        for one in self._rows:
            numbers.append(one.row.number)
            if one.num_made:
                made.append((one.row.number, one.num_made))
        await self._batches.commit(self._lease, part, written, numbers, counts, made)
        await self._waiting.note_stored(self._rows)
        self._is_awaited = False
        self._counter.stored(counts)
        jobs = [one.job_id for one in self._rows if one.job_id is not None]
        self._num_committed += len(self._rows)
        self._number += 1
        self._rows, self._lines, self._num_bytes = [], {kind: [] for kind in KINDS}, 0
        return jobs


async def parts_content(files: Files, parts: Sequence[Part], start: int, end: int) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of joined parts from `start` to before `end`.

    Raises UnavailableError if a part is gone: the batch has ended meanwhile, and its file has the same bytes.
    """
    try:
        for part in parts:
            if start < part.num_bytes and end > 0:
                async with aclosing(files.object_content(part.name, max(0, start), min(end, part.num_bytes))) as blocks:
                    async for block in blocks:
                        yield block
            start, end = start - part.num_bytes, end - part.num_bytes
    except NotFoundError:
        message = "the batch ends at this moment; its rows are in a file soon"
        raise UnavailableError(message, code="files_unavailable", retry_after_ms=1000) from None


@dataclass(frozen=True, slots=True)
class BatchEnding:
    """How a batch ends, and how its files are saved."""

    tenant: str
    status: str
    purpose: str
    names: Mapping[str, str]
    """Kind of a file → what its name has behind the batch's id."""
    life_ms: int
    """Milliseconds for which its files are kept."""
    record_life_ms: int
    """Milliseconds for which its record is kept."""
    problems: Sequence[RowProblem] = ()
    """Why it failed."""


async def save_joined(files: Files, batches: BatchRecords, lease: BatchLease, ending: BatchEnding) -> None:
    """Join the committed parts of a batch to its output and its error file, and end the batch with them.

    A file without any line is not made.
    """
    parts, saved = await batches.parts(lease.batch_id), dict[str, NewFile]()
    async with AsyncExitStack() as uploads:
        for kind in KINDS:
            of_kind = [part for part in parts if part.kind == kind]
            if not of_kind:
                continue
            num_bytes = sum(part.num_bytes for part in of_kind)
            upload = await uploads.enter_async_context(await files.begin(ending.tenant, num_bytes, limited=False))
            for part in of_kind:
                await upload.append(part.name)
            await upload.finish()
            saved[kind] = upload.saved(f"{lease.batch_id}_{ending.names[kind]}.jsonl", ending.purpose, ending.life_ms)
        await batches.finish(lease, ending.status, saved, ending.record_life_ms, ending.problems)
