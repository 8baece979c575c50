"""How long jobs take on this node: times and counts of the jobs that it holds."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.contract.output import FinishReason, Outcome, Usage
from penstock.contract.pool import JOB_TIMES, SECONDS, TOKEN_SECONDS
from penstock.contract.priority import NUM_PRIORITIES
from penstock.runtime.histogram import Histogram, sum_of

EMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the histogram of emit calls."""


@dataclass(slots=True)
class SendCounts:
    """How often a node sent tokens, and the CPU time that this took on its event loop."""

    sends: int = 0
    """Times that tokens were sent, those of all streams together."""
    chunks: int = 0
    """Chunks sent."""
    cpu_s: float = 0.0
    """CPU seconds from packing the chunks until the answers were handled."""

    def note(self, num_chunks: int, cpu_s: float) -> None:
        """Count a send."""
        self.sends += 1
        self.chunks += num_chunks
        self.cpu_s += cpu_s


TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20, 50, 100)


@dataclass(slots=True)
class JobTimes:
    """The times of one job on this node. `submitted_s` is that of Redis's clock, as far as this clock can tell."""

    submitted_s: float
    taken_s: float
    is_new: bool
    """Whether no other node has had the job."""
    first_token_s: float | None = None
    """When it got its first token, where no other node has had the job."""
    first_output_s: float | None = None
    """When this node generated its first output of it."""
    last_token_s: dict[int, float] = field(default_factory=dict)
    """When each choice generated its last token."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """The facts about a job that ended on this node, for the metrics."""

    outcome: Outcome
    finish_reason: FinishReason | None
    """The finish reason of its first choice."""
    usage: Usage
    max_tokens: int
    num_choices: int
    longest_output: int
    """Output tokens of its longest choice."""

    @property
    def reason(self) -> str:
        """The finish reason of its first choice, or the state of a job that is not done."""
        return self.finish_reason or "stop" if self.outcome.state == "succeeded" else self.outcome.state


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _token_seconds() -> Histogram:
    return Histogram(TOKEN_SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class ClassMetrics:
    """The histograms and counters of the jobs of one class."""

    queue_s: Histogram = field(default_factory=_seconds)
    """From submission until the first node took the job."""
    prefill_s: Histogram = field(default_factory=_seconds)
    """From then until the first token."""
    first_token_s: Histogram = field(default_factory=_seconds)
    """From submission until the first token."""
    decode_s: Histogram = field(default_factory=_seconds)
    """From the first token until the end."""
    total_s: Histogram = field(default_factory=_seconds)
    """From submission until the end."""
    inter_token_s: Histogram = field(default_factory=_token_seconds)
    """Between two outputs of a choice."""
    output_token_s: Histogram = field(default_factory=_token_seconds)
    """Mean time of a job's output tokens after the first."""
    prompt_tokens: Histogram = field(default_factory=_tokens)
    output_tokens: Histogram = field(default_factory=_tokens)
    longest_outputs: Histogram = field(default_factory=_tokens)
    """Output tokens of each job's longest choice."""
    max_tokens: Histogram = field(default_factory=_tokens)
    num_choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))
    waits_beyond_limit: int = 0
    """Foreground jobs that waited for over 1.5 times the limit of admission: waits scatter around it."""
    ends: Counter[str] = field(default_factory=Counter)
    """Ended jobs by the reason: a finish reason, or the state of a job that is not done."""


HOUR_S = 3600.0
SAMPLE_S = 60.0
"""Seconds between two samples of the histograms whose gain in an hour is reported. That hour may be a minute longer."""


class JobMetrics:
    """Histograms of a node's jobs. Tasks, which need no engine, are left out."""

    def __init__(self) -> None:
        self.classes = [ClassMetrics() for _ in range(NUM_PRIORITIES)]
        self.max_waits_s: Sequence[float] = (math.inf,) * NUM_PRIORITIES
        """The longest expected wait with which the queue admits a foreground job, by class."""
        self._samples = deque[tuple[float, dict[str, list[int]]]]()

    def times_of_hour(self, now_s: float) -> dict[str, tuple[int, ...]]:
        """Return the counts of `JOB_TIMES` for the last hour, over all classes. Call it more often than `SAMPLE_S`."""
        counts = {name: sum_of(getattr(one, name) for one in self.classes).counts for name in JOB_TIMES}
        samples = self._samples
        if not samples or now_s - samples[-1][0] >= SAMPLE_S:
            samples.append((now_s, counts))
        while len(samples) > 1 and now_s - samples[1][0] >= HOUR_S:
            samples.popleft()
        # Within its first hour, a node reports all.
        before = samples[0][1] if now_s - samples[0][0] >= HOUR_S else {}
        return {
            name: tuple(new - old for new, old in zip(values, before.get(name, [0] * len(values)), strict=True))
            for name, values in counts.items()
        }

    def taken(self, priority: int, times: JobTimes, *, is_background: bool = False) -> None:
        """Count a job that this node has just taken."""
        if times.is_new:
            wait_s, metrics = max(0.0, times.taken_s - times.submitted_s), self.classes[priority]
            metrics.queue_s.note(wait_s)
            metrics.waits_beyond_limit += not is_background and wait_s > 1.5 * self.max_waits_s[priority]

    def generated(self, priority: int, times: JobTimes, choice: int, at_s: float) -> None:
        """Count an output of a choice. On a job that another node began, the first one only starts the clock."""
        metrics, last_s = self.classes[priority], times.last_token_s.get(choice)
        if last_s is not None:
            metrics.inter_token_s.note(at_s - last_s)
        elif times.first_output_s is None:
            times.first_output_s = at_s
            if times.is_new:
                times.first_token_s = at_s
                metrics.first_token_s.note(at_s - times.submitted_s)
                metrics.prefill_s.note(at_s - times.taken_s)
        times.last_token_s[choice] = at_s

    def ended(self, priority: int, times: JobTimes, job: EndedJob, at_s: float) -> None:
        """Count a job that ended. `at_s`: when Redis had stored its end."""
        metrics, usage = self.classes[priority], job.usage
        metrics.ends[job.reason] += 1
        if job.outcome.state != "succeeded":
            return
        metrics.total_s.note(at_s - times.submitted_s)
        metrics.prompt_tokens.note(usage.prompt_tokens)
        metrics.output_tokens.note(usage.completion_tokens)
        metrics.longest_outputs.note(job.longest_output)
        metrics.max_tokens.note(job.max_tokens)
        metrics.num_choices.note(job.num_choices)
        if times.first_token_s is None:
            return
        metrics.decode_s.note(at_s - times.first_token_s)
        num_later = usage.completion_tokens / job.num_choices - 1
        if num_later > 0:
            last_s = max(times.last_token_s.values())
            metrics.output_token_s.note((last_s - times.first_token_s) / num_later)


@dataclass(slots=True)
class NodeCounts:
    """A node's counters since its process started: plain numbers, since an increment then costs next to nothing."""

    taken: int = 0
    """Jobs taken."""
    taken_over: int = 0
    """Jobs taken that had run on another node, or were lost with it."""
    finished: int = 0
    """Jobs ended, as acknowledged by Redis."""
    dropped: int = 0
    """Jobs dropped because they belonged to another node by then."""
    given_back_drain: int = 0
    given_back_pressure: int = 0
    given_back_lacking: int = 0
    given_back_lost: int = 0
    given_back_failed: int = 0
    rewinds: int = 0
    """Times that Redis had lost chunks and asked for them again."""
    repeated_ends: int = 0
    """Ends of jobs that Redis had lost and got again."""
    outages: int = 0
    """Times that publishing failed because Redis was unavailable."""
    failed_rounds: int = 0
    """Rounds of this node that ended because Redis refused a call: damaged data, or a bug."""
    emits: Histogram = field(default_factory=lambda: Histogram(EMIT_SECONDS))
    """Seconds that emit calls took."""
    sending: SendCounts = field(default_factory=SendCounts)
    jobs: JobMetrics = field(default_factory=JobMetrics)
    queue_share: float = 0.0
    """The jobs that waited in the queue at the last take, divided by the number of live nodes."""

    def gave_back(self, why: str, num_jobs: int) -> None:
        """Count jobs that were given back. `why`: drain, pressure, lacking, lost or failed."""
        name = f"given_back_{why}"
        setattr(self, name, getattr(self, name) + num_jobs)
