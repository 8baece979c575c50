"""A file of requests becomes jobs, a bounded number at once, and their results become a file of rows.

Everything about a row follows from the batch and its custom_id, so a run that was killed is simply run again: rows that
are written are skipped, jobs that were submitted are found by their idempotency key.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.contract.errors import BusyError, JobFailedError, RequestError, UnavailableError, error_of
from penstock.contract.job import Priority
from penstock.producer.batch import storage
from penstock.producer.batch.answer import answer_row, body_of, error_row
from penstock.producer.batch.input_lines import InputLine, lines_of, survey_of
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.request import Request, request_of_line
from penstock.producer.batch.results import ResultsFile, open_results, row_id_of
from penstock.producer.client import AsyncClient

_JITTER = 0.2

Row = dict[str, Any]
OnProgress = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch whose input was read through, and whose output is ours alone."""

    batch: Batch
    batch_id: str
    path: Path
    results: ResultsFile


@contextmanager
def opened(batch: Batch) -> Iterator[OpenBatch]:
    """Opens a batch; at the end of the block its rows are published if they are whole.

    Raises RequestError when input or output cannot be used, BusyError while another run writes the same output. It
    waits for files, pipes and stores, so a caller that is to heed Ctrl-C meanwhile calls it outside an event loop.
    """
    with storage.local_copy(batch.input, param="input") as path:
        with storage.readable("input"):
            survey = survey_of(path)
        batch_id = batch.batch_id or _batch_id_of(batch, survey.digest)
        with open_results(batch.output, batch_id, survey.num_lines) as results:
            yield OpenBatch(batch, batch_id, path, results)


async def run_batch(redis_url: str, batch: Batch, on_progress: OnProgress = lambda _: None) -> BatchProgress:
    """Opens and answers a batch; raises what these two raise."""
    with opened(batch) as one:
        return await answer_batch(redis_url, one, on_progress)


async def answer_batch(redis_url: str, one: OpenBatch, on_progress: OnProgress) -> BatchProgress:
    """Runs a batch to its end, however long the queue keeps it waiting; cancelled, it can be run again."""
    results = one.results
    on_progress(results.progress)
    if not results.is_whole:
        async with AsyncClient(redis_url) as client:
            await _Run(client, one.batch, one.batch_id, results, on_progress).answer_all(lines_of(one.path))
        if not results.is_whole:
            raise RequestError("the input was changed meanwhile: its lines are no longer those", param="input")
    return results.progress


async def answer(
    client: AsyncClient, request: Request, model: str | None, key: str, *, delay_s: float | None = None
) -> tuple[str, dict[str, Any]]:
    """Submits one request and waits for its end: the job's id and the response body.

    Raises JobFailedError or RequestError when there will be no answer, BusyError or UnavailableError when to try again.
    """
    wanted = request.model or model
    job = await client.submit(
        request.prompt,
        model=wanted,
        params=request.params,
        priority=Priority.BATCH,
        not_before_s=delay_s,
        idempotency_key=key,
    )
    result = await job.result(check=False)
    if result.outcome.state != "done":
        error = error_of(result.outcome)
        if isinstance(error, BusyError | UnavailableError):
            # The job has ended: asking again would only find it again.
            raise JobFailedError(error.message, code=error.code)
        raise error
    return job.id, body_of(request, wanted or await _model_of(client, job.pool), result)


async def _model_of(client: AsyncClient, pool: str) -> str:
    """The pool's own name where its record has gone meanwhile."""
    record = (await client.pools()).get(pool)
    return record.model if record else pool


def _batch_id_of(batch: Batch, digest: bytes) -> str:
    what = "\0".join((digest.hex(), storage.canonical(batch.output), batch.model or ""))
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


class _Run:
    """Workers that take lines and make rows, and one writer that takes rows."""

    def __init__(
        self, client: AsyncClient, batch: Batch, batch_id: str, results: ResultsFile, on_progress: OnProgress
    ) -> None:
        self._client = client
        self._batch = batch
        self._batch_id = batch_id
        self._results = results
        self._on_progress = on_progress
        self._rows: asyncio.Queue[Row | None] = asyncio.Queue(batch.max_in_flight)

    async def answer_all(self, lines: Iterator[InputLine]) -> None:
        """Returns when every line has its row on disk, of which some may have one already."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_rows())
                workers = [tasks.create_task(self._work(lines)) for _ in range(self._batch.max_in_flight)]
                await asyncio.wait(workers)
                await self._rows.put(None)
        except ExceptionGroup as group:
            # Whatever went wrong first has ended the others.
            raise group.exceptions[0] from None

    async def _work(self, lines: Iterator[InputLine]) -> None:
        for line in lines:
            if line.custom_id in self._results.custom_ids:
                # There may be millions of them.
                await asyncio.sleep(0)
            else:
                await self._rows.put(await self._row_of(line))

    async def _row_of(self, line: InputLine) -> Row:
        row_id = row_id_of(self._batch_id, line.custom_id)
        try:
            request = request_of_line(line.fields)
            job_id, body = await self._answer_patiently(request, row_id)
        except (RequestError, JobFailedError) as error:
            return error_row(row_id, line.custom_id, error)
        return answer_row(row_id, line.custom_id, body, job_id)

    async def _answer_patiently(self, request: Request, key: str) -> tuple[str, dict[str, Any]]:
        while True:
            try:
                return await answer(self._client, request, self._batch.model, key, delay_s=self._batch.delay_s)
            except (BusyError, UnavailableError) as error:
                self._tell(error.message)
                await asyncio.sleep(error.retry_after_ms / 1000 * random.uniform(1, 1 + _JITTER))

    async def _write_rows(self) -> None:
        """As many rows in one write as have come meanwhile."""
        done = False
        while not done:
            rows = [await self._rows.get()]
            while not self._rows.empty():
                rows.append(self._rows.get_nowait())
            done = rows[-1] is None
            await self._results.append(row for row in rows if row is not None)
            self._tell("")

    def _tell(self, waiting: str) -> None:
        self._on_progress(replace(self._results.progress, waiting=waiting))
