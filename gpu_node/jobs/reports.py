"""Reports of a node about each of its jobs: a line in its log, and the spans of the job's trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock.contract.priority import Priority
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.times import EndedJob
from penstock.queue.wire import Request

log = logging.getLogger(__package__)


class SpanRecorder(Protocol):
    """A recorder of spans, for jobs whose trace is recorded."""

    async def taken(self, job: HeldJob, request: Request) -> None:
        """Set the job's trace if its request carries the context of a recorded one."""

    def began(self, job: HeldJob) -> None:
        """Record the spans up to the first output, unless that was done. Called once Redis has stored output."""

    def lost(self, job: HeldJob) -> None:
        """Record the spans of a job that now belongs to another node. That node records the span of the lost lease."""

    def gave_back(self, job: HeldJob, why: str) -> None:
        """Record the spans of a job that this node has given back."""

    def ended(self, job: HeldJob, ended: EndedJob, at_s: float) -> None:
        """Record the spans of a job whose end Redis has stored."""


class JobReports:
    """The reports of a node's jobs. Without logs and spans, each report costs a comparison.

    No error of a span recorder reaches a job.
    """

    def __init__(self, model: str = "", *, logs_jobs: bool = False, spans: SpanRecorder | None = None) -> None:
        self._model = model
        self._logs_jobs = logs_jobs
        self._spans = spans

    async def taken(self, job: HeldJob, request: Request) -> None:
        """Set the job's trace if its request carries the context of a recorded one."""
        if request.trace and self._spans is not None:
            with _harmless():
                await self._spans.taken(job, request)

    def began(self, job: HeldJob) -> None:
        """Report that Redis has stored output of a job. Called after each emission."""
        if self._spans is not None and job.trace is not None:
            with _harmless():
                self._spans.began(job)

    def lost(self, job: HeldJob) -> None:
        """Report a job that belongs to another node now."""
        if self._spans is not None and job.trace is not None:
            with _harmless():
                self._spans.lost(job)

    def gave_back(self, job: HeldJob, why: str) -> None:
        """Report a job that this node has given back. `why`: drain, pressure or lacking."""
        if self._spans is not None and job.trace is not None:
            with _harmless():
                self._spans.gave_back(job, why)

    def ended(self, job: HeldJob, ended: EndedJob, at_s: float) -> None:
        """Report a job whose end Redis has stored. `at_s`: on this process's monotonic clock."""
        if self._spans is not None and job.trace is not None:
            with _harmless():
                self._spans.ended(job, ended, at_s)
        if self._logs_jobs and log.isEnabledFor(logging.INFO):
            log.info("job.ended", extra=self._line(job, ended, at_s))

    def _line(self, job: HeldJob, ended: EndedJob, at_s: float) -> dict[str, object]:
        """Return the fields of a job's line. Waiting times are None where another node had the job before."""
        times, usage, first_s = job.times, ended.usage, job.times.first_token_s
        line: dict[str, object] = {
            "job_id": job.job_id,
            "model": job.adapter or self._model,
            "tenant": job.taken.tenant,
            "class": Priority(job.taken.priority).name.lower(),
            "finish_reason": ended.reason,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "queue_s": round(times.taken_s - times.submitted_s, 4) if times.is_new else None,
            "ttft_s": None if first_s is None else round(first_s - times.submitted_s, 4),
            "total_s": round(at_s - times.submitted_s, 4),
            "preemptions": job.num_preemptions,
        }
        if ended.outcome.code:
            line["code"] = ended.outcome.code
        if job.trace is not None:
            line["trace_id"] = job.trace.trace_id
        return line


@contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("tracing.failed")
