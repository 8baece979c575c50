"""The rows of a flow: each is given out once parts have all that it waits for, with their texts in its prompt.

What a flow knows is in its input and in its parts, so any process can go on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import Any

from pydantic_core import from_json, to_json

from penstock.contract.errors import (
    BusyError,
    DamagedDataError,
    DamagedRecordError,
    JobFailedError,
    NotFoundError,
    RequestError,
    UnavailableError,
)
from penstock.contract.json_text import without_mark
from penstock.producer.batch.finished import ERROR, FinishedRow, OpenAiRows
from penstock.producer.batch.lines import MAX_READ_BYTES, InputRow, is_marked, lines_of, prompt_of
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.files.storage import Storage
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.flows.marks import ALL, ITEM, Mark, answer_text, filled, part_of, shown, value_at
from penstock.producer.flows.progress import End, FlowProgress
from penstock.producer.flows.rows import FLOW_FIELDS, MAX_ITEMS, FlowRow
from penstock.producer.stored_batches.spool import Spool, Spooled
from penstock.producer.stored_batches.stored_rows import BatchWindow
from penstock.queue.files.batch import BatchRecord, Part
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import object_of
from penstock.queue.wire import WireError
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger(__package__)
PARENT_FAILED, ROW_SKIPPED = "parent_failed", "row_skipped"
"""Codes of rows that did not run because of a parent."""
_BETWEEN_TEXTS = "\n\n"


def end_of_line(line: dict[str, Any]) -> End:
    """Return how a row ended whose line is in an output or an error file."""
    if line.get("error") is None:
        return "succeeded"
    return "skipped" if line["error"].get("code") == ROW_SKIPPED else "failed"


def read_graph(storage: Storage, batch: BatchRecord) -> FlowGraph:
    """Return the rows of a flow whose input was checked. It blocks."""
    graph = FlowGraph()
    with closing(storage.lines(object_of(batch.spec.input_file_id))) as source:
        for line, raw in lines_of(source):
            fields = from_json(without_mark(raw))
            graph.add(line, fields["custom_id"], fields)
    return graph


def progress_of(graph: FlowGraph, batch: BatchRecord, ends: Mapping[int, End] | None = None) -> FlowProgress:
    """Return how far a flow is. Raises DamagedRecordError for a record that does not fit its input."""
    makers = {row.number for row in graph.rows if row.for_each is not None}
    if any(number not in makers or not 0 < count <= MAX_ITEMS for number, count in batch.made):
        raise DamagedRecordError(f"the field made of batch {batch.batch_id} is damaged")
    return FlowProgress(graph, batch.made, ends)


class FlowRows:
    """Gives the rows of a flow to their run."""

    def __init__(
        self,
        client: AsyncClient,
        files: Files,
        batches: BatchRecords,
        batch: BatchRecord,
        window: BatchWindow,
        form: OpenAiRows,
    ) -> None:
        self._client = client
        self._files = files
        self._batches = batches
        self._batch = batch
        self._window = window
        self._form = form
        self._max_rows = files.settings.max_batch_rows
        self._spool = Spool()
        self._places: list[Spooled] = []
        self._progress = FlowProgress(FlowGraph())
        self._wanted: tuple[set[int], set[str]] = set(), set()
        # Texts of rows by number. None: an answer without text.
        self._texts = dict[int, Spooled | None]()
        # Of one request.
        self._job_texts = dict[str, Spooled | None]()
        self._given = set[int]()
        self._making = dict[int, int]()
        """Rows that will make others once a part has them, and how many."""
        self._list: tuple[int, list[Any]] = -1, []
        """The last list of a `for_each`, and the row that has it."""
        self._jobs: list[asyncio.Task[None]] = []
        self.checked: FlowGraph | None = None
        """The rows, if this process has checked the input."""

    @property
    def stopped(self) -> str:
        """The code of the rows that will not be answered; empty while the flow goes on."""
        return self._window.stopped

    @property
    def num_rows(self) -> int:
        """The number of all rows that there are by now."""
        return self._progress.num_rows

    @property
    def has_more(self) -> bool:
        """Whether rows wait for others, or are still to be made."""
        return not self.stopped and (len(self._given) < self._progress.num_rows or bool(self._making))

    async def open(self, batch: BatchRecord) -> None:
        """Find out how far the flow is."""
        self._batch = batch
        storage = await self._files.storage()
        committed = await self._batches.committed_rows(batch.batch_id)
        parts = await self._batches.parts(batch.batch_id)
        await self._files.on_thread(self._load, storage, committed, parts)
        self._given = {number for number in range(self.num_rows) if self._progress.end_of(number) is not None}
        for job_id in self._progress.open_jobs:
            self._jobs.append(asyncio.create_task(self._await_job(job_id), name=f"penstock flow waits for {job_id}"))

    def _load(self, storage: Storage, committed: bytes, parts: Sequence[Part]) -> None:
        graph = read_graph(storage, self._batch) if self.checked is None else self.checked
        with closing(storage.lines(object_of(self._batch.spec.input_file_id))) as source:
            self._places = self._spool.add_all(raw for _, raw in lines_of(source))
        if len(self._places) != len(graph.rows):
            raise DamagedRecordError(f"the input of batch {self._batch.batch_id} has changed since it was checked")
        self._progress = progress_of(graph, self._batch)
        self._wanted = self._progress.texts_wanted()
        numbers = {self._progress.name_of(number): number for number in range(self._progress.num_rows)}
        ends = dict[int, End]()
        for part in parts:
            with closing(storage.lines(part.name)) as source:
                for _, raw in lines_of(source):
                    line = from_json(raw)
                    number = numbers[line["custom_id"]]
                    if is_marked(committed, number):
                        ends[number] = end_of_line(line)
                        self._keep_text(number, ends[number], line)
        self._progress = progress_of(graph, self._batch, ends)

    def _keep_text(self, number: int, end: End, line: dict[str, Any]) -> None:
        row, _ = self._progress.row_of(number)
        if end == "succeeded" and row.number in self._wanted[0]:
            text = answer_text(line["response"]["body"])
            self._texts[number] = None if text is None else self._spool.add(text.encode(errors="surrogatepass"))

    async def _await_job(self, job_id: str) -> None:
        """Wait for the end of an earlier job. It belongs to the flow's tenant: others' jobs do not exist for it."""
        while True:
            try:
                result = await self._client.result(job_id, tenant=self._batch.tenant, check=False)
                break
            except (NotFoundError, DamagedDataError, WireError):
                # It is gone, or nothing can read it any more.
                self._progress.end_job(job_id, "failed")
                return
            except (BusyError, UnavailableError) as error:
                _LOG.info("a flow waits for a job", extra={"job_id": job_id, "reason": error.reason})
                await asyncio.sleep(error.retry_after_ms / 1000)
        has_succeeded = result.outcome.state == "succeeded"
        if has_succeeded and job_id in self._wanted[1]:
            text = result.choices[0].text if result.choices else None
            data = None if text is None else text.encode(errors="surrogatepass")
            self._job_texts[job_id] = None if data is None else self._spool.add(data)
        self._progress.end_job(job_id, "succeeded" if has_succeeded else "failed")

    async def window(self) -> int:
        """Return how many rows may be in the queue now."""
        for task in self._jobs:
            if task.done():
                task.result()
        return await self._window.rows()

    async def next_rows(self, limit: int) -> Sequence[InputRow | FinishedRow]:
        """Return the next rows that wait for nothing; none if all others wait."""
        ready = self._progress.ready
        numbers = [number for _ in range(min(limit, len(ready))) if (number := ready.popleft()) not in self._given]
        if not numbers or self._window.must_stop():
            return ()
        rows = await self._files.on_thread(self._some_rows, numbers)
        ready.extendleft(reversed(numbers[len(rows) :]))
        for row in rows:
            number = row.row.number if isinstance(row, FinishedRow) else row.number
            self._given.add(number)
            if isinstance(row, FinishedRow) and row.num_made:
                self._making[number] = row.num_made
        return sorted(rows, key=lambda row: b"" if isinstance(row, FinishedRow) else prompt_of(row))

    def _some_rows(self, numbers: Sequence[int]) -> list[InputRow | FinishedRow]:
        rows, num_bytes, num_made = list[InputRow | FinishedRow](), 0, 0
        for number in numbers:
            row = self._row(number, num_made)
            rows.append(row)
            num_bytes += len(row.line) if isinstance(row, FinishedRow) else row.num_bytes
            num_made += row.num_made if isinstance(row, FinishedRow) else 0
            if num_bytes >= MAX_READ_BYTES:
                break
        return rows

    def take(self, number: int) -> bool:
        """Note that a row is in the queue. Return whether it was not before."""
        is_new = number not in self._given
        self._given.add(number)
        return is_new

    async def left_rows(self, with_bodies: Collection[str] = ()) -> list[InputRow]:
        """Return all rows that no part has, without their fields unless they are among these keys."""

        def read() -> list[InputRow]:
            rows = list[InputRow]()
            for number in range(self._progress.num_rows):
                if self._progress.end_of(number) is None:
                    row, _ = self._progress.row_of(number)
                    bare = InputRow(number, self._progress.name_of(number), {}, 0, row.line)
                    whole = self._row(number) if self._form.key_of(bare) in with_bodies else bare
                    rows.append(whole if isinstance(whole, InputRow) else bare)
            return rows

        return await self._files.on_thread(read)

    def note_finished(self, row: FinishedRow) -> bool:
        """Note a row that is in no part yet. Return whether rows wait for nothing else than parts now."""
        return self._progress.finish(row.row.number, row.num_made)

    async def note_stored(self, rows: Sequence[FinishedRow]) -> None:
        """Note that a part has these rows."""
        for number, end, num_made in await self._files.on_thread(lambda: [*map(self._read_end, rows)]):
            self._progress.store(number, end, num_made)
            self._making.pop(number, None)

    def _read_end(self, row: FinishedRow) -> tuple[int, End, int]:
        number = row.row.number
        end: End = "succeeded"
        owner, _ = self._progress.row_of(number)
        if row.kind == ERROR or (not row.num_made and owner.number in self._wanted[0]):
            line = from_json(row.line)
            end = end_of_line(line)
            self._keep_text(number, end, line)
        return number, end, row.num_made

    async def close(self) -> None:
        """Wait for no job any more, and let the spool go."""
        await cancel_until_done(self._jobs)
        self._spool.close()

    # One row, on a thread.

    def _row(self, number: int, num_made: int = 0) -> InputRow | FinishedRow:
        """Return a row whose parents have ended. `num_made`: rows that others make which are given out with it."""
        row, index = self._progress.row_of(number)
        raw = self._spool.read(self._places[row.number])
        fields, name = from_json(without_mark(raw)), self._progress.name_of(number)
        bare = InputRow(number, name, {}, 0, row.line)
        if index is None and (refusal := self._refusal_of(row)) is not None:
            return self._form.failed(bare, refusal)
        try:
            if row.for_each is not None and index is None:
                return self._form.made(bare, self._num_items(row, num_made))
            if row.marks:
                fields["body"] = filled(fields["body"], lambda mark: self._text_of(row, index, mark))
        except RequestError as error:
            return self._form.failed(bare, error)
        line = {name: value for name, value in fields.items() if name not in FLOW_FIELDS}
        num_bytes = len(to_json(fields["body"])) if row.marks else len(raw)
        return InputRow(number, name, line, num_bytes, row.line, row.priority)

    def _refusal_of(self, row: FlowRow) -> JobFailedError | None:
        verdict = self._progress.verdict(row)
        if verdict.end == "succeeded":
            return None
        parent = f"{verdict.parent[:64]!r}, which the row waits for,"
        if verdict.end == "failed":
            return JobFailedError(f"{parent} has failed", code=PARENT_FAILED)
        return JobFailedError(f"{parent} has not succeeded, so the row was skipped", code=ROW_SKIPPED)

    def _num_items(self, row: FlowRow, num_made: int) -> int:
        count = len(self._items(row))
        limit = self._max_rows - self._progress.num_rows - sum(self._making.values()) - num_made
        if count > limit:
            room = f"{max(0, limit)} more of at most {self._max_rows} (PENSTOCK_FILES_MAX_BATCH_ROWS)"
            message = f"for_each: makes {count} rows, and the flow has room for {room}"
            raise RequestError(message, code="too_many_rows", param="for_each")
        return count

    def _items(self, row: FlowRow) -> list[Any]:
        """Return the list of a `for_each`. The same texts give the same list again."""
        if self._list[0] != row.number:
            self._list = row.number, self._read_items(row)
        return self._list[1]

    def _read_items(self, row: FlowRow) -> list[Any]:
        mark = row.for_each
        if mark is None or (text := self._parent_text(row, mark)) is None:
            return []
        items = value_at(mark, text)
        if not isinstance(items, list):
            raise RequestError(f"for_each: {mark} is no list", code="not_a_list", param="for_each")
        if len(items) > MAX_ITEMS:
            message = f"for_each: {mark} has {len(items)} entries; at most {MAX_ITEMS} are allowed"
            raise RequestError(message, code="too_many_items", param="for_each")
        return items

    def _text_of(self, row: FlowRow, index: int | None, mark: Mark) -> str:
        """Return what takes the place of a mark: nothing for a parent that has not succeeded."""
        if mark.name == ITEM and index is not None:
            if index >= len(items := self._items(row)):
                message = f"for_each: the answer that has the list of {row.custom_id[:64]!r} is gone"
                raise RequestError(message, code="job_not_found", param="for_each")
            return shown(part_of(mark, items[index]))
        if mark.name == ALL:
            texts = (self._parent_text(row, Mark(name)) for name in row.parents)
            return _BETWEEN_TEXTS.join(text for text in texts if text is not None)
        text = self._parent_text(row, mark)
        if text is None or mark.path is None:
            return text or ""
        return shown(value_at(mark, text))

    def _parent_text(self, row: FlowRow, mark: Mark) -> str | None:
        """Return the text of a parent, or those of the rows that it has made. None: it has not succeeded."""
        if mark.name in row.jobs:
            if mark.name not in self._job_texts:
                return None
            places = [self._job_texts[mark.name]]
        else:
            places = [self._texts[number] for number in self._progress.rows_with_texts(mark.name)]
        texts = list[str]()
        for place in places:
            if place is None:
                message = f"{{{{{mark}}}}}: the answer of {mark.name} has no text"
                raise RequestError(message, code="no_text", param="body")
            texts.append(self._spool.read(place).decode(errors="surrogatepass"))
        return _BETWEEN_TEXTS.join(texts) if texts else None
