"""The rows of a flow as people see them: the graph, and the state of each row, from its input and its parts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pydantic_core import from_json

from penstock.contract.errors import NotFoundError, PenstockError, RequestError
from penstock.producer.batch.finished import ERROR, row_id_of
from penstock.producer.batch.lines import is_marked, lines_of
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.files.storage import Storage
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.flows.progress import End, FlowProgress
from penstock.producer.stored_batches.flow_rows import end_of_line, progress_of, read_graph
from penstock.queue.files.batch import CANCELLED_ROW, EXPIRED_ROW, BatchRecord
from penstock.queue.files.file_records import object_of

MAX_SHOWN_PARENTS = 100
"""Parents of a row that its object names."""
_STOPPED = {CANCELLED_ROW: "cancelled", EXPIRED_ROW: "expired"}


@dataclass(frozen=True, slots=True)
class FlowView:
    """A look at a flow."""

    batch: BatchRecord
    progress: FlowProgress
    errors: Mapping[int, Mapping[str, Any]]
    """The errors of rows that failed or were skipped, by number."""
    is_stopped: bool
    """Whether rows without an end have none any more."""

    def numbers_after(self, after: str | None) -> Sequence[int]:
        """Return the rows behind the one of this name, rows that others have made included. Raises RequestError."""
        if after is None:
            return range(self.progress.num_rows)
        numbers = range(self.progress.num_rows)
        at = next((number for number in numbers if self.progress.name_of(number) == after), None)
        if at is None:
            raise RequestError(f"after: there is no row {after[:64]!r}", param="after")
        return numbers[at + 1 :]

    def state_of(self, number: int) -> str:
        """Return the state of a row. One that is `ready` waits for no row: it is in the queue, or about to enter it."""
        end = self.progress.end_of(number)
        if end is not None:
            return _STOPPED.get(str(self.errors.get(number, {}).get("code")), end)
        if self.is_stopped:
            return "cancelled"
        return "waiting" if any(True for _ in self.progress.waits_for(number)) else "ready"

    def counts(self) -> dict[str, int]:
        """Return the number of rows in each state."""
        return dict(Counter(self.state_of(number) for number in range(self.progress.num_rows)))

    def row_object(self, number: int) -> dict[str, Any]:
        """Return a row for JSON."""
        row, index = self.progress.row_of(number)
        made, error = self.progress.made_by(number), self.errors.get(number)
        waits_for = list(islice(self.progress.waits_for(number), MAX_SHOWN_PARENTS)) if not self.is_stopped else []
        after = [] if index is not None else [*row.after, *({"job": job_id} for job_id in row.jobs)]
        return {
            "id": row_id_of(self.batch.batch_id, self.progress.name_of(number)),
            "object": "flow.row",
            "custom_id": self.progress.name_of(number),
            "state": self.state_of(number),
            "waits_for": waits_for,
            "after": after[:MAX_SHOWN_PARENTS],
            "num_after": len(after),
            "on_failure": row.on_failure,
            "priority": row.priority.label,
            "for_each": str(row.for_each) if row.for_each is not None and index is None else None,
            "made_by": None if index is None else row.custom_id,
            "num_made": None if made is None else made.num_rows,
            "error": None if error is None else {"code": error["code"], "message": error["message"]},
            "job_id": None,
        }


async def view_of(client: AsyncClient, files: Files, batch: BatchRecord) -> FlowView:
    """Return a look at a flow. Raises NotFoundError if its input is gone."""
    if not batch.is_flow:
        message = f"batch {batch.batch_id} is no flow: its rows wait for nothing"
        raise RequestError(message, code="not_a_flow", param="batch_id")
    if batch.status == "validating":
        return FlowView(batch, FlowProgress(FlowGraph()), {}, is_stopped=False)
    storage = await files.storage()
    committed = await client.batches.committed_rows(batch.batch_id)
    names = [part.name for part in await client.batches.parts(batch.batch_id) if part.kind == ERROR]
    if not batch.is_open:
        names = [object_of(batch.error_file_id)] if batch.error_file_id else []
    # Parts go when the batch ends, and then its record names the file of all errors.
    try:
        view = await files.on_thread(_read, storage, batch, committed, names)
    except NotFoundError:
        message = f"the rows of batch {batch.batch_id} cannot be shown: its input or its parts are gone"
        raise NotFoundError(message, code="rows_gone", param="batch_id") from None
    if batch.is_open:
        jobs = view.progress.open_jobs
        for job_id, end in zip(
            jobs, await asyncio.gather(*(_end_of_job(client, batch, one) for one in jobs)), strict=True
        ):
            if end is not None:
                view.progress.end_job(job_id, end)
    return view


async def _end_of_job(client: AsyncClient, batch: BatchRecord, job_id: str) -> End | None:
    try:
        state = (await client.status(job_id, tenant=batch.tenant)).state
    except NotFoundError:
        return "failed"
    return None if state in ("queued", "running") else "succeeded" if state == "succeeded" else "failed"


def _read(storage: Storage, batch: BatchRecord, committed: bytes, names: Sequence[str]) -> FlowView:
    graph = read_graph(storage, batch)
    bare = progress_of(graph, batch)
    numbers = {bare.name_of(number): number for number in range(bare.num_rows)}
    errors, ends = dict[int, Mapping[str, Any]](), dict[int, End]()
    for number in range(bare.num_rows):
        if (not batch.is_open and batch.status != "failed") or is_marked(committed, number):
            ends[number] = "succeeded"
    for line in _lines(storage, names):
        number = numbers.get(line["custom_id"], -1)
        if number in ends:
            errors[number], ends[number] = line["error"], end_of_line(line)
    return FlowView(batch, progress_of(graph, batch, ends), errors, is_stopped=not batch.is_open)


def _lines(storage: Storage, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        with closing(storage.lines(name)) as source:
            for _, raw in lines_of(source):
                yield from_json(raw)


async def with_jobs(client: AsyncClient, batch: BatchRecord, rows: Sequence[dict[str, Any]]) -> None:
    """Note in rows that are ready which job each is, and whether it is queued or runs."""
    ready = {row["id"]: row for row in rows if row["state"] == "ready"}
    pools = [*await client.pools()]
    found = await client.batches.job_ids(pools, batch.tenant, [*ready])

    async def note(row: dict[str, Any], job_id: str) -> None:
        row["job_id"] = job_id
        with suppress(PenstockError):
            state = (await client.status(job_id, tenant=batch.tenant)).state
            row["state"] = state if state in ("queued", "running") else row["state"]

    await asyncio.gather(*(note(ready[key], job_id) for key, job_id in found.items()))
