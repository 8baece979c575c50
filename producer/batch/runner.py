"""The batch runner: submits a file of requests as jobs, a bounded number at once, and writes their results to a file.

A row's identity depends only on the batch and its custom_id. So a killed run can be repeated: it skips written rows
and finds jobs that were already submitted by their idempotency key.

Failed rows can have a second run. It is a batch of its own, with a results file beside that of the first. So an
interrupted one continues where it stopped, and the first results stay whole until all new rows are there. Then the new
rows take the places of the old ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Unpack

from penstock.contract.errors import (
    BusyError,
    InvariantError,
    JobFailedError,
    NotFoundError,
    PenstockError,
    RequestError,
    UnavailableError,
    error_of,
)
from penstock.contract.job import Durability, Priority, SubmitOptions
from penstock.contract.output import Result
from penstock.contract.pool import notice_of
from penstock.contract.problems import rename
from penstock.contract.tasks import Embedding
from penstock.producer.batch import storage
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.request import InputLine, InputSummary, lines_of, request_of_line, survey_of
from penstock.producer.batch.results import (
    ResultsFile,
    answer_row,
    body_of,
    error_row,
    job_ids_of,
    open_results,
    row_id_of,
)
from penstock.producer.batch.rows import embeddings_body
from penstock.producer.batch.storage import OnWait, outlast
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import Prompt, choose_pool, require_tool_parser
from penstock.producer.client.tasks import output_of
from penstock.producer.openai.json_parts import json_line
from penstock.producer.parsed_body import ParsedBody
from penstock.queue.broker.producer import ServedPool
from penstock.queue.wire import WireError
from penstock.runtime.event_loop import try_all

_LOG = logging.getLogger(__package__)
_LOST_RESULT = ("job_not_found", "result_expired")
"""Codes of a job that has ended and whose result is gone."""
_MAX_LOST = 100
"""Jobs of a row whose results may be gone."""
_JITTER = 0.2
"""The share by which a pause between two attempts is randomly lengthened, so that rows do not retry at once."""

Row = dict[str, Any]
OnProgress = Callable[[BatchProgress], None]
OnSubmit = Callable[[], None]
"""Called for each job that the queue accepted."""


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch with a checked input and a locked output."""

    batch: Batch
    batch_id: str
    path: Path
    results: ResultsFile


@contextmanager
def opened(batch: Batch, on_wait: OnWait = lambda _: None) -> Iterator[OpenBatch]:
    """Check a batch's input and lock its output. At the end of the block, publish the output if it is complete.

    If rows failed, a list of them is published too. While the store of an fsspec URL is unreachable, the call waits,
    and reports that to `on_wait`. Raises RequestError if input or output cannot be used, and BusyError while another
    run writes the same output. The call blocks on files, pipes and stores; call it outside an event loop to keep Ctrl-C
    responsive.
    """
    with ExitStack() as stack:
        source = batch.input
        path = outlast(source, lambda: stack.enter_context(storage.local_copy(source, param="input")), on_wait)
        with storage.readable("input"):
            survey = survey_of(path)
        batch_id = id_of(batch, survey)
        results = stack.enter_context(open_results(batch.output, batch_id, survey.num_lines, on_wait))
        yield OpenBatch(batch, batch_id, path, results)
        if results.is_whole and results.failed:
            publish_errors(batch, path, results.failed, on_wait)


def id_of(batch: Batch, survey: InputSummary) -> str:
    """Return the identity of a batch."""
    identity = "\0".join((survey.digest.hex(), storage.canonical(batch.output), batch.model or ""))
    return batch.batch_id or hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def publish_errors(batch: Batch, path: Path, failed: Mapping[str, Row], on_wait: OnWait) -> None:
    """Write the list of failed rows: each row of the output, with the number of its line in the input."""
    # A local list is made in its own folder, so that it can take its place in one step.
    folder_of_list = None if storage.is_remote(batch.errors_name) else Path(batch.errors_name).parent
    with tempfile.TemporaryDirectory(prefix="penstock-batch-", dir=folder_of_list) as folder:
        listed = Path(folder) / "errors"
        with listed.open("wb") as file:
            for line in lines_of(path):
                if line.custom_id in failed:
                    file.write(json_line({"line": line.number, **failed[line.custom_id]}))
        outlast(batch.errors_name, lambda: storage.publish(listed, batch.errors_name), on_wait)


async def run_batch(redis_url: str, batch: Batch, on_progress: OnProgress = lambda _: None) -> BatchProgress:
    """Open and answer a batch, and return its final progress. Raises the errors of `opened` and `answer_batch`."""
    with opened(batch) as one:
        return await answer_batch(redis_url, one, on_progress)


async def answer_batch(redis_url: str, one: OpenBatch, on_progress: OnProgress) -> BatchProgress:
    """Run an open batch to its end with a client of its own. A batch that is complete needs no Redis."""
    if one.results.is_whole:
        on_progress(one.results.progress)
        return one.results.progress
    async with AsyncClient(redis_url) as client:
        return await answer_rows(client, one, on_progress)


async def answer_rows(
    client: AsyncClient, one: OpenBatch, on_progress: OnProgress, *, on_submit: OnSubmit = lambda: None
) -> BatchProgress:
    """Run an open batch to its end and return its final progress.

    It waits without limit while the queue is busy or Redis is unreachable. A canceled batch can be run again. Raises
    RequestError if the input changed during the run.
    """
    results = one.results
    on_progress(results.progress)
    if not results.is_whole:
        await _BatchRun(client, one, on_progress, on_submit).answer_all(lines_of(one.path))
        if not results.is_whole:
            raise RequestError("the input changed during the run: some of its lines are gone", param="input")
    return results.progress


class Submitter(Protocol):
    """What submits the jobs of rows: a client, or one that adds to each job whose it is."""

    async def submit(self, prompt: Prompt, /, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Submit a job; see `AsyncClient.submit`."""

    async def pools(self) -> Mapping[str, ServedPool]:
        """Return the served pools; see `AsyncClient.pools`."""


async def answer(
    client: Submitter,
    request: ParsedBody,
    model: str | None,
    key: str,
    *,
    delay_s: float | None = None,
    durability: Durability | None = None,
    in_feed: bool = True,
    on_submit: OnSubmit = lambda: None,
) -> tuple[str, dict[str, Any]]:
    """Submit one request, wait for its end, and return the job's id and the response body.

    If the result is gone, the request is submitted once more: Redis lost it, or an earlier run has acknowledged it and
    its output file was removed. `delay_s`: seconds before which no node takes the job. `durability`: what its
    submission waits for. `in_feed`: whether the job's end is among the tenant's completions.
    Raises JobFailedError or RequestError for a permanent failure, and BusyError or UnavailableError if a retry makes
    sense.
    """
    ask = partial(
        _ask,
        client,
        request,
        request.model or model,
        delay_s=delay_s,
        durability=durability,
        in_feed=in_feed,
        on_submit=on_submit,
    )
    for number in count():
        try:
            # The same key would find the job without its result.
            return await ask(f"{key}:again{number}" if number else key)
        except PenstockError as error:
            if error.code not in _LOST_RESULT or number == _MAX_LOST:
                rename(error, request.names)
                raise
    raise AssertionError


async def _ask(
    client: Submitter,
    request: ParsedBody,
    model: str | None,
    key: str,
    *,
    delay_s: float | None,
    durability: Durability | None,
    in_feed: bool,
    on_submit: OnSubmit,
) -> tuple[str, dict[str, Any]]:
    options: SubmitOptions = {
        **request.submit_options(),
        "model": model,
        "priority": Priority.BATCH,
        "not_before_s": max(delay_s or 0.0, request.queueing.get("not_before_s") or 0.0) or None,
        "durability": durability,
        "in_feed": in_feed,
        "lower_max_tokens": True,
        "idempotency_key": key,
    }
    if request.task is not None:
        return await _embed(client, request, options, on_submit)
    if request.tool_use.tools is not None:
        # A model whose calls cannot be recognized must not spend tokens on them.
        with suppress(NotFoundError, UnavailableError):
            require_tool_parser(choose_pool((await client.pools()).values(), model))
    job = await client.submit(request.prompts[0], **options)
    on_submit()
    result = await _result_of(job)
    # The record may be gone by now.
    record = (await client.pools()).get(job.pool)
    name = model or (record.model if record else job.pool)
    with _readable(job.id, InvariantError, LookupError, TypeError, ValueError):
        return job.id, body_of(request, name, result, record)


async def _embed(
    client: Submitter, request: ParsedBody, options: SubmitOptions, on_submit: OnSubmit
) -> tuple[str, dict[str, Any]]:
    """Return the id of the first text's job, and the answer for all texts."""
    jobs, key = list[AsyncJob](), options["idempotency_key"]
    for number, text in enumerate(request.prompts):
        options["idempotency_key"] = f"{key}:{number}" if number else key
        jobs.append(await client.submit(text, **options))
        on_submit()
    results = [await _result_of(job) for job in jobs]
    with _readable(jobs[0].id, InvariantError):
        vectors = [output_of(result, Embedding) for result in results]
    # The caller frees the first job's result, which alone it knows.
    await try_all([job.ack for job in jobs[1:]])
    record = (await client.pools()).get(jobs[0].pool)
    name = options["model"] or (record.model if record else jobs[0].pool)
    usages = [result.usage for result in results]
    body = embeddings_body(name, vectors, usages, as_base64=request.options["base64"])
    notice = notice_of(record, request.task)
    return jobs[0].id, body | {"notice": notice} if notice else body


async def _result_of(job: AsyncJob) -> Result:
    """Return the result of a job that succeeds. Raises the error of another one."""
    with _readable(job.id, WireError):
        result = await job.result(check=False)
    if result.outcome.state != "succeeded":
        error = error_of(result.outcome)
        if isinstance(error, BusyError | UnavailableError):
            # The job has ended, so a retry with the same idempotency key would only find the same failure.
            raise JobFailedError(error.message, code=error.code)
        raise error
    return result


@contextmanager
def _readable(job_id: str, *kinds: type[Exception]) -> Iterator[None]:
    """Let errors of these kinds fail the row, because another attempt would read the same result."""
    try:
        yield
    except kinds as error:
        # The error's text may contain what the model wrote, except if it is about the bytes.
        reason = error.message if isinstance(error, WireError) else type(error).__name__
        _LOG.warning("a stored result cannot be read; its row fails", extra={"job_id": job_id, "reason": reason})
        raise JobFailedError(
            f"the result of job {job_id} cannot be read: {reason}", code="unreadable_result"
        ) from error


class _BatchRun:
    """One run of a batch: worker tasks turn lines into rows, and one writer task appends the rows to the file."""

    def __init__(self, client: AsyncClient, one: OpenBatch, on_progress: OnProgress, on_submit: OnSubmit) -> None:
        self._client = client
        self._batch = one.batch
        self._batch_id = one.batch_id
        self._results = one.results
        self._on_progress = on_progress
        self._on_submit = on_submit
        self._rows: asyncio.Queue[Row | None] = asyncio.Queue(one.batch.max_in_flight)

    async def answer_all(self, lines: Iterator[InputLine]) -> None:
        """Answer all lines that have no row yet, and return when every line has its row on disk."""
        # An earlier run may have ended between the writing of a row and its acknowledgment.
        await self._ack(self._results.recent_job_ids)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_rows())
                workers = [tasks.create_task(self._work(lines)) for _ in range(self._batch.max_in_flight)]
                await asyncio.wait(workers)
                await self._rows.put(None)
        except ExceptionGroup as group:
            # The first error canceled the other tasks.
            raise group.exceptions[0] from None

    async def _work(self, lines: Iterator[InputLine]) -> None:
        for line in lines:
            if line.custom_id in self._results.custom_ids:
                # Yield to other tasks: millions of consecutive rows may be skipped.
                await asyncio.sleep(0)
            else:
                await self._rows.put(await self._row_of(line))

    async def _row_of(self, line: InputLine) -> Row:
        row_id = row_id_of(self._batch_id, line.custom_id)
        try:
            request = request_of_line(line.fields)
            job_id, body = await self._answer_with_retries(request, row_id)
        except (RequestError, JobFailedError) as error:
            return error_row(row_id, line.custom_id, error)
        return answer_row(row_id, line.custom_id, body, job_id)

    async def _answer_with_retries(self, request: ParsedBody, key: str) -> tuple[str, dict[str, Any]]:
        while True:
            try:
                return await answer(
                    self._client,
                    request,
                    self._batch.model,
                    key,
                    delay_s=self._batch.delay_s,
                    durability=self._batch.durability,
                    in_feed=self._batch.in_feed,
                    on_submit=self._on_submit,
                )
            except (BusyError, UnavailableError) as error:
                self._report(error.message)
                await asyncio.sleep(error.retry_after_ms / 1000 * random.uniform(1, 1 + _JITTER))

    async def _write_rows(self) -> None:
        """Append rows until None arrives, with all available rows in one write."""
        done = False
        while not done:
            rows = [await self._rows.get()]
            while not self._rows.empty():
                rows.append(self._rows.get_nowait())
            done = rows[-1] is None
            fresh = [row for row in rows if row is not None]
            await self._results.append(fresh)
            await self._ack(job_ids_of(fresh))
            self._report("")

    async def _ack(self, job_ids: list[str]) -> None:
        """Free results that are on disk. If Redis is away, they expire by themselves."""
        with suppress(UnavailableError):
            await self._client.ack(*job_ids)

    def _report(self, waiting: str) -> None:
        self._on_progress(replace(self._results.progress, waiting=waiting))


@contextmanager
def opened_retry(batch: Batch, on_wait: OnWait = lambda _: None) -> Iterator[OpenBatch | None]:
    """Open the failed rows of a batch as a batch, or yield None if no row failed. At the end, merge the new rows.

    Raises RequestError if the batch has no complete output.
    """
    with ExitStack() as stack:

        def copy_of(name: str, param: str) -> Path:
            return outlast(name, lambda: stack.enter_context(storage.local_copy(name, param=param)), on_wait)

        source = copy_of(batch.input, "input")
        with storage.readable("input"):
            survey = survey_of(source)
        batch_id = id_of(batch, survey)
        rows = _rows_in(copy_of(batch.output, "output"), batch, batch_id, survey.num_lines)
        failed = {row["custom_id"] for row in rows if row["error"] is not None}
        if not failed:
            yield None
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-batch-")))
        again = folder / "failed.jsonl"
        _write(again, [line.fields for line in lines_of(source) if line.custom_id in failed])
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()
        fresh = Path(f"{storage.partial_path(batch.output).with_suffix('')}.retry-{digest}")
        second = replace(batch, input=str(again), output=str(fresh), batch_id=f"{batch_id}:{digest}")
        with opened(replace(second, errors=str(folder / "errors")), on_wait) as one:
            yield one
        new_rows = map(json.loads, fresh.read_bytes().splitlines())
        merged = [row for row in rows if row["error"] is None]
        merged += [{**row, "id": row_id_of(batch_id, row["custom_id"])} for row in new_rows]
        _publish(batch, source, merged, on_wait)
        fresh.unlink()


def _rows_in(path: Path, batch: Batch, batch_id: str, num_lines: int) -> list[Row]:
    rows: list[Row] = [json.loads(line) for line in path.read_bytes().splitlines()]
    if len(rows) != num_lines or any(row["id"] != row_id_of(batch_id, row["custom_id"]) for row in rows):
        message = f"{batch.output} is not the whole output of this batch: first run it to its end with the same options"
        raise RequestError(message, param="output")
    return rows


def _publish(batch: Batch, source: Path, rows: list[Row], on_wait: OnWait) -> None:
    """Replace the output, and then the list of failed rows. Without failed rows, a local list is removed."""
    whole = storage.partial_path(batch.output)
    _write(whole, rows)
    outlast(batch.output, lambda: storage.publish(whole, batch.output), on_wait)
    still_failed = {row["custom_id"]: row for row in rows if row["error"] is not None}
    if still_failed:
        publish_errors(batch, source, still_failed, on_wait)
    elif not storage.is_remote(batch.errors_name):
        Path(batch.errors_name).unlink(missing_ok=True)


def _write(path: Path, rows: list[Row]) -> None:
    path.write_bytes(b"".join(map(json_line, rows)))
