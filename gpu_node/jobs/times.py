"""How long jobs take on this node: times and counts of the jobs that it holds, and the pace at which it completes them.

The pace is the cost that the node drains per second, in predicted KV tokens. It is a quotient. Its dividend is the work
that the node computes per second while jobs wait: tokens of prompts and of outputs. An output token counts as many
prompt tokens as take the same time. So jobs count while they run, and not only at their end. Its divisor is the work in
a unit of predicted cost, which is known only once outputs have ended.

Outputs that began together end in order of their length. So the mean of those that have ended is too low at first. The
estimator of Kaplan and Meier (1958) uses the others too: one that still runs counts as the mean of the longer ones.

Foreground and background work have a pace each. That of background work is measured while only background work waits.
So it is what the foreground work that comes meanwhile leaves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from penstock.contract.job import PREDICTED_OUTPUT_TOKENS
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


HALF_LIFE_S = 10.0
"""Seconds with waiting jobs after which what was measured counts half. After 30 s, an eighth is left."""
SLOW_HALF_LIFE_S = 40.0
"""The same for the speed with which the present one is compared: what moved lately is uncertain."""
MIN_REMEMBERED = 256
"""Jobs begun last whose lengths are remembered."""
REMEMBERED_PER_RUNNING = 4
"""The same, as a multiple of the running jobs."""
PRIOR_S = 1.0
"""Seconds of measurement for which the pace that the model of step times predicts counts."""
FOREGROUND_SPREAD, BACKGROUND_SPREAD = 0.07, 0.12
"""Standard errors of the logarithm of a pace that was measured for long. Foreground work comes irregularly, so that of
background work is larger."""
MODEL_SPREAD = 0.6
"""The same of a pace that only the model of step times predicts."""
PRIOR_PROMPT_TOKENS = 128
"""The prompt of the one job that counts before any has begun. Its output has the length that the queue assumes."""
PRIOR_PART = 0.7
"""The part of what is left of its longest output that a choice has, before any has shown more. Short outputs end soon
and correct it, but long ones take long to show, so it is more than half."""
TAIL_SPREAD = 0.8
"""Standard error of the logarithm of that part."""


PHASE_PROMPT_TOKENS = 4
"""In the first round. A decoded token takes longer the longer its context is, so later prompts are longer."""
MAX_PHASE_PROMPT_TOKENS, MAX_PROMPTS_MS = 128, 300.0
"""Of a sequence, and of a phase."""
FEW_OUTPUTS, MANY_OUTPUTS, MANY_SEQUENCES = 5, 9, 16
"""`StepParts.measured` describes the use."""


def phases(max_num_seqs: int) -> tuple[tuple[int, int], ...]:
    """Return what a node computes to learn the costs of its steps: phases of (sequences, output tokens of each).

    First comes hardly more than steps of one sequence, then prompts alone, then prompts and
    steps of many sequences.
    """
    many = min(MANY_SEQUENCES, max_num_seqs)
    return (1, MANY_OUTPUTS), (many, 1), (many, FEW_OUTPUTS)


class StepParts(NamedTuple):
    """What steps of a model take, in milliseconds."""

    fixed_ms: float
    """A step, without its tokens."""
    decoded_ms: float
    """A token of a sequence that decodes."""
    prompt_ms: float
    """A token of a prompt."""

    @classmethod
    def measured(cls, took_ms: Sequence[float], max_num_seqs: int, num_prompt: int = PHASE_PROMPT_TOKENS) -> Self:
        """Return the costs from the times of `phases`, of which those of many sequences had prompts of this length."""
        (one_ms, prompts_ms, both_ms), many = took_ms, min(MANY_SEQUENCES, max_num_seqs)
        step_of_one_ms, step_of_many_ms = one_ms / MANY_OUTPUTS, (both_ms - prompts_ms) / (FEW_OUTPUTS - 1)
        # Where a token takes no measurable time, it counts as 1 % of a step.
        least_ms = max(1e-6, step_of_one_ms / 100)
        decoded_ms = max(least_ms, (step_of_many_ms - step_of_one_ms) / max(1, many - 1))
        fixed_ms = max(0.0, step_of_one_ms - decoded_ms)
        return cls(fixed_ms, decoded_ms, max(least_ms, (prompts_ms - fixed_ms) / (many * num_prompt)))

    def longer_prompt(self, max_num_seqs: int, most: int) -> int:
        """Return the length of the prompts of the next round, at most `most`."""
        by_time = int(MAX_PROMPTS_MS / (self.prompt_ms * min(MANY_SEQUENCES, max_num_seqs)))
        return max(PHASE_PROMPT_TOKENS, min(by_time, MAX_PHASE_PROMPT_TOKENS, most))

    def output_weight(self, num_sequences: int) -> float:
        """Return how many prompt tokens take as long as an output token, in steps that decode `num_sequences`."""
        return (self.fixed_ms / max(1, num_sequences) + self.decoded_ms) / self.prompt_ms


class DrainPace(NamedTuple):
    """The cost that a node drains per second, and its relative standard error, as that of a logarithm."""

    cost_per_s: float
    spread: float


@dataclass(slots=True)
class JobWork:
    """What one job that the node began has computed so far."""

    is_background: bool
    cost: int
    """As the queue counted it."""
    num_prompt: int
    longest_output: int
    """Tokens of all choices together, as far as the queue assumes without knowing outputs."""
    most_output: int
    """Tokens of all choices together that the job's limits allow."""
    num_output: int = 0
    has_prompt: bool = False
    has_ended: bool = False
    """Whether its choices have ended by themselves. A canceled job never does."""

    @property
    def part(self) -> float:
        """Its output so far, as a part of the longest one."""
        return self.num_output / self.longest_output


class DrainEstimator:
    """Measures both paces of a node. It forgets in about 30 s of work."""

    def __init__(self) -> None:
        self._updated_s: float | None = None
        self._kinds = (_KindOfWork(), _KindOfWork())

    def begin(
        self, *, is_background: bool, cost: int, num_prompt: int, max_output: int, num_choices: int, num_logged: int = 0
    ) -> JobWork:
        """Note a job that begins. `max_output`: of a choice; `num_logged`: what earlier nodes have generated of all."""
        longest = num_choices * max(1, min(max_output, PREDICTED_OUTPUT_TOKENS))
        most = num_choices * max(1, max_output)
        work = JobWork(is_background, max(1, cost), num_prompt, longest, most, num_logged)
        self._kinds[is_background].begun.append(work)
        return work

    def note(self, work: JobWork, num_output: int, *, has_ended: bool = False) -> None:
        """Note how many tokens a job has generated by now."""
        kind = self._kinds[work.is_background]
        if not work.has_prompt and (num_output > work.num_output or has_ended):
            work.has_prompt = True
            kind.fresh_prompt += work.num_prompt
        kind.fresh_output += max(0, num_output - work.num_output)
        work.num_output, work.has_ended = max(work.num_output, num_output), has_ended

    def update(
        self, now_s: float, *, num_running: int, foreground_waits: bool, background_waits: bool, since_s: float = 0.0
    ) -> None:
        """Count what was noted since the last update for the kind that waited all the time; since when, if known."""
        foreground, background = self._kinds
        elapsed_s = 0.0 if self._updated_s is None else now_s - self._updated_s
        broke = since_s > (now_s if self._updated_s is None else self._updated_s)
        self._updated_s = now_s
        foreground.count(elapsed_s, waits=foreground_waits, broke=broke)
        background.count(elapsed_s, waits=background_waits and not foreground_waits, broke=broke)
        num_remembered = max(MIN_REMEMBERED, REMEMBERED_PER_RUNNING * num_running)
        for kind in self._kinds:
            while len(kind.begun) > num_remembered:
                kind.begun.popleft()

    def paces(self, steps: StepParts | None, num_sequences: int) -> tuple[DrainPace, DrainPace]:
        """Return the paces of foreground and of background work; 0 if there is neither a measurement nor a model.

        `num_sequences`: how many decode at once while jobs wait.
        """
        weight = 1.0 if steps is None else steps.output_weight(num_sequences)
        prior_per_s = 0.0 if steps is None else 1000 / steps.prompt_ms
        foreground, background = self._kinds
        if not foreground.seconds and background.seconds:
            prior_per_s = background.work(weight) / background.seconds
        lengths = (foreground if foreground.begun else background).lengths(weight)
        first = _pace(foreground, lengths, weight, prior_per_s, least_spread=FOREGROUND_SPREAD)
        if foreground.seconds:
            prior_per_s = foreground.work(weight) / foreground.seconds
        if foreground.begun and background.begun:
            lengths = background.lengths(weight)
        return first, _pace(background, lengths, weight, prior_per_s, least_spread=BACKGROUND_SPREAD)


class _KindOfWork:
    """Measurements of one kind of work. Sums over time fade."""

    def __init__(self) -> None:
        self.begun: deque[JobWork] = deque()
        self.fresh_prompt = self.fresh_output = 0
        self.prompt = self.output = self.seconds = 0.0
        self.prior_s = PRIOR_S
        self._slow_tokens = self._slow_seconds = 0.0
        self._has_waited = False

    def count(self, elapsed_s: float, *, waits: bool, broke: bool = False) -> None:
        """Count the fresh work, if jobs have waited for the whole time: an idle node does not show its speed."""
        if waits and self._has_waited and not broke:
            fade = 0.5 ** (elapsed_s / HALF_LIFE_S)
            self.prompt = fade * self.prompt + self.fresh_prompt
            self.output = fade * self.output + self.fresh_output
            self.seconds = fade * self.seconds + elapsed_s
            self.prior_s *= fade
            fade = 0.5 ** (elapsed_s / SLOW_HALF_LIFE_S)
            self._slow_tokens = fade * self._slow_tokens + self.fresh_prompt + self.fresh_output
            self._slow_seconds = fade * self._slow_seconds + elapsed_s
        self.fresh_prompt = self.fresh_output = 0
        self._has_waited = waits

    def work(self, output_weight: float) -> float:
        """Return the counted work, in prompt tokens."""
        return self.prompt + output_weight * self.output

    @property
    def drift(self) -> float:
        """How far the speed has moved lately: the logarithm of its quotient to the mean of a longer time."""
        tokens = self.prompt + self.output
        if not tokens or not self._slow_tokens:
            return 0.0
        return math.log(tokens / self.seconds * self._slow_seconds / self._slow_tokens)

    def lengths(self, output_weight: float) -> _Lengths:
        """Return what the remembered jobs say about the lengths of outputs."""
        part, assumed_part = mean_part(self.begun)
        prompt = PRIOR_PROMPT_TOKENS + sum(work.num_prompt for work in self.begun)
        longest = PREDICTED_OUTPUT_TOKENS + sum(work.longest_output for work in self.begun)
        cost = PRIOR_PROMPT_TOKENS + PREDICTED_OUTPUT_TOKENS + sum(work.cost for work in self.begun)
        work = prompt + output_weight * part * longest
        num_ended = sum(work.has_ended for work in self.begun)
        return _Lengths(work / cost, output_weight * assumed_part * longest / work, num_ended)


class _Lengths(NamedTuple):
    """The work, in prompt tokens, of a unit of predicted cost."""

    work_per_cost: float
    assumed: float
    """The part of it that is assumed."""
    num_ended: int
    """Jobs that it was measured of."""


def _pace(
    measured: _KindOfWork, lengths: _Lengths, output_weight: float, prior_per_s: float, *, least_spread: float
) -> DrainPace:
    prior_s = measured.prior_s if prior_per_s else 0.0
    seconds = measured.seconds + prior_s
    if not seconds:
        return DrainPace(0.0, 1.0)
    work_per_s = (measured.work(output_weight) + prior_per_s * prior_s) / seconds
    unknown = prior_s / seconds
    of_lengths = 0.5 / (1 + lengths.num_ended), (TAIL_SPREAD * lengths.assumed) ** 2
    variances = least_spread**2, measured.drift**2, (MODEL_SPREAD * unknown) ** 2, max(of_lengths)
    return DrainPace(work_per_s / lengths.work_per_cost, math.sqrt(sum(variances)))


def mean_part(jobs: Collection[JobWork]) -> tuple[float, float]:
    """Return the mean of the jobs' final `part`, weighted by their longest outputs, and how much of it is assumed.

    It is the area below the Kaplan-Meier estimate of how many outputs reach a part. What is left of those that reach
    the last known part is assumed, within their limits. It is PRIOR_PART of the larger one of two: the rest to the
    longest output, and what they have so far.
    """
    longest, ended = defaultdict[float, int](int), defaultdict[float, int](int)
    for work in jobs:
        part = work.part
        longest[part] += work.longest_output
        if work.has_ended:
            ended[part] += work.longest_output
    at_risk = float(sum(longest.values()))
    reach, mean, before = 1.0, 0.0, 0.0
    for part in sorted(longest):
        mean += reach * (part - before)
        before = part
        reach *= 1 - ended.get(part, 0) / at_risk
        at_risk -= longest[part]
    most = max((work.most_output / work.longest_output for work in jobs if work.part == before), default=1.0)
    assumed = PRIOR_PART * reach * max(0.0, min(most - before, max(1 - before, before)))
    return mean + assumed, assumed
