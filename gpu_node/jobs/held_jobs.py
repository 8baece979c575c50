"""All jobs that a node holds, what it has learned of those that ended, and its reports of each: log lines and spans."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

from penstock.contract.errors import DamagedDataError, UnavailableError
from penstock.contract.job import MAX_TOKENS_LIMIT
from penstock.contract.output import Outcome
from penstock.contract.pool import AWAY
from penstock.contract.priority import NUM_LEVELS, PerLevel, Priority, is_background
from penstock.gpu_node.jobs.drain import DrainEstimator
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.times import EndedJob, NodeCounts
from penstock.queue.broker.node import MAX_PREEMPTIONS
from penstock.queue.job_cost import HOLD_MS, LengthPredictor, learned_hold_ms
from penstock.queue.wire import Request

RESERVED_QUANTILE = 0.9
"""Quantile of output lengths that is reserved for a job. Longer outputs may cause preemptions."""

MAX_REASON_CHARS = 200

MAX_REPORTED_TENANTS = 8
"""Tenants whose jobs a heartbeat counts. The limit bounds the size of pressure records."""


class HeldJobs:
    """All jobs of a node. The engine knows a job by its lease, so tokens computed under an older lease never mix in."""

    def __init__(self, max_model_len: int = MAX_TOKENS_LIMIT) -> None:
        self.max_model_len = max_model_len
        self.counts = NodeCounts()
        # Keyed by id: job id.
        self._jobs: dict[str, HeldJob] = {}
        # Keyed by id: lease.
        self._by_lease: dict[str, HeldJob] = {}
        self._predictor = LengthPredictor(RESERVED_QUANTILE)
        self.drain = DrainEstimator()
        """The pace at which this node completes jobs. `look_at_work` notes what the held ones have computed."""
        self.hold_ms = HOLD_MS
        """How long each KV token of a job's cost was held, in milliseconds; an average over jobs that ended here."""
        # Keyed by id: a part of the node.
        self._failing: dict[str, str] = {}
        self._without_redis = set[str]()
        """The parts of the node that do not reach Redis."""
        self._told_states = dict[str, float]()  # Keyed by id: state of Redis.
        """The states of Redis that were logged since it last served all parts, and when."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[HeldJob]:
        return iter(list(self._jobs.values()))

    @property
    def failing(self) -> str:
        """Why Redis refused the last call of a part of this node; empty while it refuses none."""
        return "; ".join(f"{part}: {reason}" for part, reason in self._failing.items())

    def round_failed(self, part: str, error: DamagedDataError) -> None:
        """Note that Redis refused a call, because of damaged data or a bug. It ends one round of that part."""
        self.counts.failed_rounds += 1
        self._failing[part] = error.reason[:MAX_REASON_CHARS]
        log.error("redis refused a call; the node tries again", extra={"part": part, "reason": error.reason})

    def redis_failed(self, part: str, error: UnavailableError) -> None:
        """Note that a part did not reach Redis. Each state has one line until Redis serves all parts again."""
        state = error.redis_state or AWAY
        self._without_redis.add(part)
        if state not in self._told_states:
            self._told_states[state] = time.monotonic()
            log.warning("redis has a problem", extra={"state": state, "part": part, "reason": error.reason})

    def round_done(self, part: str) -> None:
        """Note that a round of that part succeeded. A line is written once no part is without Redis."""
        self._failing.pop(part, None)
        self._without_redis.discard(part)
        if self._told_states and not self._without_redis:
            seconds = round(time.monotonic() - min(self._told_states.values()), 1)
            log.warning("redis serves again", extra={"before": ", ".join(self._told_states), "seconds": seconds})
            self._told_states.clear()

    @property
    def job_ids(self) -> list[str]:
        """Ids of all held jobs."""
        return list(self._jobs)

    def get(self, job_id: str) -> HeldJob | None:
        """Return the job, or None if the node does not hold it."""
        return self._jobs.get(job_id)

    def of_lease(self, lease: str) -> HeldJob | None:
        """Return the job held under exactly this lease, or None."""
        return self._by_lease.get(lease)

    def expired(self, now_s: float) -> list[str]:
        """Return the ids of running jobs past their deadline, on this process's monotonic clock."""
        return [job.job_id for job in self if job.outcome is None and now_s >= job.expires_s]

    def add(self, job: HeldJob) -> None:
        """Hold a job. It replaces the same job under an older lease."""
        older = self._jobs.get(job.job_id)
        if older is not None:
            self.remove(older)
        self._jobs[job.job_id] = job
        self._by_lease[job.taken.lease] = job

    def remove(self, job: HeldJob) -> None:
        """Remove a job; no effect if it is not held under this lease."""
        if self._by_lease.pop(job.taken.lease, None) is not None:
            del self._jobs[job.job_id]

    def open(self, job: HeldJob, num_prompt_tokens: int) -> None:
        """Set a job's prompt length and predict its output length."""
        job.num_prompt_tokens = num_prompt_tokens
        known = self._predictor.predict(job.taken.tenant, num_prompt_tokens, job.max_tokens)
        if known is not None:
            job.predicted_tokens = known
        job.max_output_tokens = max(1, min(job.max_tokens, self.max_model_len - num_prompt_tokens))
        if job.taken.preemptions >= MAX_PREEMPTIONS:
            # It was moved too often: reserve its longest possible output, so that it can finish here.
            job.predicted_tokens = job.max_output_tokens
        job.work = self.drain.begin(
            is_background=is_background(job.taken.level),
            cost=job.taken.cost,
            num_prompt=num_prompt_tokens,
            max_output=job.max_output_tokens,
            num_choices=job.params.num_sequences,
            num_logged=job.num_output_tokens,
        )

    def look_at_work(self) -> None:
        """Note what the held jobs have computed."""
        for job in self._jobs.values():
            if job.work is not None and job.outcome is None:
                self.drain.note(job.work, job.num_output_tokens)

    def note_queue(self, waits: tuple[bool, bool], now_s: float) -> None:
        """Note which kinds of jobs wait since now: foreground and background ones. The paces are measured from here."""
        self.look_at_work()
        self.drain.note_queue(now_s, foreground_waits=waits[0], background_waits=waits[1])

    @property
    def predicted_outputs(self) -> tuple[tuple[int, int, int], ...]:
        """Predicted output lengths, for the admission of new jobs; see `NodePressure`."""
        return self._predictor.of_all_tenants()

    def tokens_left(self, job: HeldJob) -> int:
        """Predict the tokens that the longest open choice of a job still lacks."""
        limit = min(job.max_tokens, job.max_output_tokens)
        lengths = job.open_lengths or [0]
        return max(self._predictor.remaining(job.taken.tenant, job.num_prompt_tokens, limit, n) for n in lengths)

    def learn(self, job: HeldJob) -> None:
        """Update the length predictor and `hold_ms` with a job that has no open choice left."""
        if job.work is not None:
            self.drain.note(job.work, job.num_output_tokens, has_ended=not job.has_failed_choice)
        for length in job.ended_lengths:
            prompt, predicted = job.num_prompt_tokens, min(job.max_tokens, job.predicted_tokens)
            self._predictor.ended(job.taken.tenant, prompt, job.max_tokens, length, predicted)
        self.hold_ms = learned_hold_ms(self.hold_ms, job.kv_token_ms, job.taken.cost)

    def count_finished(self, job: HeldJob, outcome: Outcome, at_s: float) -> EndedJob:
        """Count a job whose end Redis has stored, and return the facts about it.

        `at_s`: on this process's monotonic clock.
        """
        self.counts.finished += 1
        ended = job.ended(outcome)
        if not job.is_task:
            self.counts.jobs.ended(job.taken.priority, job.times, ended, at_s)
        return ended

    @property
    def jobs_by_level(self) -> tuple[int, ...]:
        """Number of held jobs per level, most urgent first."""
        counts = Counter(job.taken.level for job in self._jobs.values())
        return tuple(counts[level] for level in range(NUM_LEVELS))

    @property
    def jobs_by_tenant(self) -> dict[str, int]:
        """Number of held jobs of the tenants with the most."""
        return dict(Counter(job.taken.tenant for job in self._jobs.values()).most_common(MAX_REPORTED_TENANTS))

    @property
    def num_tasks(self) -> int:
        """Number of held tasks that have not ended."""
        return sum(job.is_task and job.outcome is None for job in self._jobs.values())

    def expected_usage(self) -> tuple[PerLevel, PerLevel]:
        """Return expected KV tokens and sequences, each per level: sums over jobs of that or a more urgent level."""
        tokens, sequences = [0] * NUM_LEVELS, [0] * NUM_LEVELS
        for job in self._jobs.values():
            if job.outcome is None:
                tokens[job.taken.urgency] += job.expected_kv_tokens
                sequences[job.taken.urgency] += job.num_sequences
        return tuple(accumulate(tokens)), tuple(accumulate(sequences))

    def expected_window_tokens(self, window: int) -> PerLevel:
        """Return the tokens that windows of at most `window` tokens hold for each sequence, per level as above."""
        tokens = [0] * NUM_LEVELS
        for job in self._jobs.values():
            if job.outcome is None:
                tokens[job.taken.urgency] += min(job.expected_kv_tokens, job.num_sequences * window)
        return tuple(accumulate(tokens))

    def usage_by_tenant(self) -> dict[str, tuple[int, int, float]]:
        """Return the KV tokens and sequences that each tenant's jobs are expected to use, and its weight."""
        usage: dict[str, tuple[int, int, float]] = {}
        for job in self._jobs.values():
            if job.outcome is None and not job.is_task:
                tokens, sequences, _ = usage.get(job.taken.tenant, (0, 0, 0.0))
                usage[job.taken.tenant] = (
                    tokens + job.expected_kv_tokens,
                    sequences + job.num_sequences,
                    job.taken.weight,
                )
        return usage

    @property
    def unsent_bytes(self) -> int:
        """Bytes of encoded chunks that Redis has not acknowledged, over all jobs. May be called from any thread."""
        return sum(job.unsent_bytes for job in self)


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
