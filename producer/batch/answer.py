"""The answer of one request: its jobs are submitted as background work, and their results become a body."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, Protocol, Unpack

from penstock.contract.durations import seconds_of
from penstock.contract.errors import (
    BusyError,
    InvariantError,
    JobFailedError,
    NotFoundError,
    PenstockError,
    UnavailableError,
    error_of,
)
from penstock.contract.job import SubmitOptions
from penstock.contract.output import Result
from penstock.contract.pool import notice_of
from penstock.contract.problems import rename
from penstock.contract.tasks import GENERATE, Score, TextTask
from penstock.producer.batch.endpoints import ENDPOINTS, AnsweredRow
from penstock.producer.batch.records import RowTerms
from penstock.producer.client import AsyncJob
from penstock.producer.client.pool_choice import choose_pool
from penstock.producer.client.request import Prompt, require_tool_parser
from penstock.producer.client.text_jobs import TextJob, text_jobs
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.text_bodies import naming_prompt, pool_among, task_for, text_jobs_of
from penstock.queue.broker.producer import ServedPool
from penstock.queue.wire import WireError
from penstock.runtime.event_loop import try_all

_LOG = logging.getLogger(__package__)
_LOST_RESULT = ("job_not_found", "result_expired")
"""Codes of a job that has ended and whose result is gone."""
_MAX_LOST = 100
"""Jobs of a row whose results may be gone."""
ANY_TERMS = RowTerms()

OnSubmit = Callable[[AsyncJob], None]
"""Called with each job that the queue accepted."""


class Submitter(Protocol):
    """What submits the jobs of rows: a client, or one that adds to each job whose it is."""

    async def submit(self, prompt: Prompt, /, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Submit a job; see `AsyncClient.submit`."""

    async def ack(self, *job_ids: str) -> int:
        """Free the results of jobs whose rows are stored; see `AsyncClient.ack`."""

    async def pools(self) -> Mapping[str, ServedPool]:
        """Return the served pools; see `AsyncClient.pools`."""


async def answer(
    client: Submitter,
    request: ParsedBody,
    key: str,
    terms: RowTerms = ANY_TERMS,
    *,
    on_submit: OnSubmit = lambda _: None,
) -> tuple[str, dict[str, Any]]:
    """Submit one request, wait for its end, and return the job's id and the response body.

    If the result is gone, the request is submitted once more: Redis lost it, or an earlier run has acknowledged it and
    its output file was removed.
    Raises JobFailedError or RequestError for a permanent failure, and BusyError or UnavailableError if a retry makes
    sense.
    """
    for number in count():
        try:
            # The same key would find the job without its result.
            return await _ask(client, request, f"{key}:again{number}" if number else key, terms, on_submit)
        except PenstockError as error:
            if error.code not in _LOST_RESULT or number == _MAX_LOST:
                rename(error, request.names)
                raise
    raise AssertionError


async def _ask(
    client: Submitter, request: ParsedBody, key: str, terms: RowTerms, on_submit: OnSubmit
) -> tuple[str, dict[str, Any]]:
    model = request.model or terms.model
    options: SubmitOptions = {
        **request.submit_options(),
        "model": model,
        "priority": terms.priority,
        "not_before_s": max(terms.delay_s, seconds_of("not_before_s", request.queueing.get("not_before_s") or 0.0))
        or None,
        "durability": terms.durability,
        "in_feed": terms.in_feed,
        "lower_max_tokens": True,
    }
    if request.tool_use.tools is not None:
        # A model whose calls cannot be recognized must not spend tokens on them.
        with suppress(NotFoundError, UnavailableError):
            require_tool_parser(choose_pool((await client.pools()).values(), model, kind=GENERATE))
    jobs = list[AsyncJob]()
    asked = await _jobs_of(client, request, model)
    for number, one in enumerate(asked):
        options["idempotency_key"] = f"{key}:{one.first}" if number else key
        options["task"] = one.task
        with naming_prompt(request, one.first):
            jobs.append(await client.submit(one.prompt, **options))
        on_submit(jobs[-1])
    results = list[Result]()
    for job, one in zip(jobs, asked, strict=True):
        with naming_prompt(request, one.first):
            results.append(await _result_of(job))
    # The record may be gone by now.
    first, record = jobs[0], (await client.pools()).get(jobs[0].pool)
    name = model or (record.model if record else first.pool)
    with _readable(first.id, InvariantError, LookupError, TypeError, ValueError):
        answered = AnsweredRow(request, name, results, record)
        body = ENDPOINTS[request.options["url"]].answer_of(answered)
    # The caller frees the first job's result, which alone it knows.
    await try_all([job.ack for job in jobs[1:]])
    notice = None if request.task is None else notice_of(record, task_for(request, record))
    # Of a job whose output was refused, the result is that of its last attempt.
    return results[0].job_id, body | {"notice": notice} if notice else body


async def _jobs_of(client: Submitter, request: ParsedBody, model: str | None) -> list[TextJob]:
    """Return the jobs of a row: one for each prompt, but for an encoder one for up to 64 texts."""
    if isinstance(request.task, TextTask) and (len(request.prompts) > 1 or request.other_tasks):
        record = None
        with suppress(NotFoundError, UnavailableError):
            record = pool_among((await client.pools()).values(), request, model, hides_models=False)
        if record is None and isinstance(request.task, Score):
            raise UnavailableError("no model that can compare texts is served now", code="no_node")
        if record is not None:
            return text_jobs_of(request, record)
    return text_jobs(request.prompts, request.task, 1)


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
