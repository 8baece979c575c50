"""The pace at which a node completes jobs: the cost that it drains per second, in predicted KV tokens.

The pace is a quotient. Its dividend is the work that the node computes per second while jobs wait: tokens of prompts
and of outputs. An output token counts as many prompt tokens as take the same time. So jobs count while they run, and
not only at their end. Its divisor is the work in a unit of predicted cost, which is known only once outputs have ended.

Outputs that began together end in order of their length. So the mean of those that have ended is too low at first. The
estimator of Kaplan and Meier (1958) uses the others too: one that still runs counts as the mean of the longer ones.

Foreground and background work have a pace each. That of background work is measured while only background work waits.
So it is what the foreground work that comes meanwhile leaves.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from penstock.contract.job import PREDICTED_OUTPUT_TOKENS

HALF_LIFE_S, HALF_LIFE_BESIDE_S = 10.0, 20.0
"""Seconds with waiting jobs after which what was measured counts half. The second one is that of background work which
has almost none of the engine's time, because what foreground work leaves to it varies from second to second."""
SLOW_HALF_LIFE_S = 40.0
"""The same for the speed with which the present one is compared: what moved lately is uncertain."""
MIN_REMEMBERED = 256
"""Jobs begun last whose lengths are remembered."""
REMEMBERED_PER_RUNNING = 4
"""The same, as a multiple of the running jobs."""
PRIOR_S = 0.5
"""Seconds of measurement for which the pace that the model of step times predicts counts. It is that of an idle node,
where nothing is published and no client reads. Work of that kind on the same cores may double the time of a token."""
WHOLE_ENGINE_S = 4.0
"""Seconds of the engine's time for which background work counts as if it had all of it. A burst of a few chats would
else seem to last."""
MORE_PRIOR = 8.0
"""How many more such seconds it counts for background work that has almost none of the engine's time."""
FOREGROUND_SPREAD, BACKGROUND_SPREAD = 0.07, 0.12
"""Standard errors of the logarithm of a pace that was measured for long. Foreground work comes irregularly, so that of
background work is larger."""
MODEL_SPREAD = 0.6
"""The same of a pace that only the model of step times predicts."""
PRIOR_PROMPT_TOKENS = 128
"""The prompt of the one job that counts before any has begun. Its output has the length that the queue assumes."""
LONGER = 1.25
"""Once outputs have ended, those that run are the longer ones. They are assumed to go on for this multiple of the
length that the queue assumes of all. Short outputs soon correct what is too high; long ones take long to show."""
DOUBTED_JOBS = 1
"""Running jobs that count as if they reached any length at which an output has ended, at least."""
TAIL_SPREAD = 0.8
"""Standard error of the logarithm of that part."""


PHASE_PROMPT_TOKENS = 64
"""In the first round. A decoded token takes longer the longer its context is, so later prompts are longer."""
SHORT_PROMPT_TOKENS = 4
"""Of the phase with one sequence."""
MAX_PHASE_PROMPT_TOKENS, MAX_PROMPT_MS = 512, 300.0
FEW_OUTPUTS, MANY_OUTPUTS, MANY_SEQUENCES = 5, 9, 16
"""`StepParts.measured` describes the use."""
MAX_FEW_OUTPUTS, MAX_OUTPUTS_MS = 33, 400.0
"""In later rounds: outputs of many sequences are a difference of two phases, so they must take long enough."""


def phases(max_num_seqs: int, num_outputs: int = FEW_OUTPUTS) -> tuple[tuple[int, int], ...]:
    """Return what a node computes to learn the costs of its steps: phases of (sequences, output tokens of each).

    First comes hardly more than steps of one sequence, then a prompt alone, then a prompt and steps of many sequences
    that share it.
    """
    many = min(MANY_SEQUENCES, max_num_seqs)
    return (1, MANY_OUTPUTS), (many, 1), (many, num_outputs)


LEAST_DECODED = 0.5
"""The least time of a decoded token in a large batch, as a part of that of a prompt's token."""
_LEAST_COMPUTED = 0.01
"""The least part of the prompts' tokens that counts as computed."""


class StepParts(NamedTuple):
    """What steps of a model take, in milliseconds."""

    fixed_ms: float
    """A step, without its tokens."""
    decoded_ms: float
    """A token of a sequence that decodes."""
    prompt_ms: float
    """A token of a prompt."""

    @classmethod
    def measured(
        cls,
        took_ms: Sequence[float],
        max_num_seqs: int,
        num_prompt: int = PHASE_PROMPT_TOKENS,
        num_outputs: int = FEW_OUTPUTS,
    ) -> Self:
        """Return the costs from the times of `phases`, of which those of many sequences had this prompt."""
        (one_ms, prompt_ms, both_ms), many = took_ms, min(MANY_SEQUENCES, max_num_seqs)
        step_of_one_ms, step_of_many_ms = one_ms / MANY_OUTPUTS, (both_ms - prompt_ms) / (num_outputs - 1)
        # Where a token takes no measurable time, it counts as 1 % of a step.
        token_ms = max(1e-6, step_of_one_ms / 100, (prompt_ms - step_of_one_ms) / num_prompt)
        # It does at least the matrix products of a prompt's token, if less well. Other work of the machine in one of
        # the two phases would show any other number.
        decoded_ms = max(LEAST_DECODED * token_ms, (step_of_many_ms - step_of_one_ms) / max(1, many - 1))
        return cls(max(0.0, step_of_one_ms - decoded_ms), decoded_ms, token_ms)

    def longer_prompt(self, most: int) -> int:
        """Return the length of the prompt of the next rounds, at most `most`."""
        by_time = int(MAX_PROMPT_MS / self.prompt_ms)
        return max(PHASE_PROMPT_TOKENS, min(by_time, MAX_PHASE_PROMPT_TOKENS, most))

    def more_outputs(self, max_num_seqs: int) -> int:
        """Return the outputs of many sequences in the next rounds."""
        step_ms = self.fixed_ms + min(MANY_SEQUENCES, max_num_seqs) * self.decoded_ms
        return max(FEW_OUTPUTS, min(1 + int(MAX_OUTPUTS_MS / step_ms), MAX_FEW_OUTPUTS))

    def with_cache(self, hit_rate: float) -> Self:
        """Return the costs where the prefix cache has this part of the prompts' tokens, which take no time then."""
        return self._replace(prompt_ms=self.prompt_ms * max(_LEAST_COMPUTED, 1 - hit_rate))

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
        self._kind_seconds = (0.0, 0.0)
        self._engine_s = (0.0, 0.0)
        """The engine's time for both kinds while background jobs waited. It fades."""

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

    def note_queue(self, now_s: float, *, foreground_waits: bool, background_waits: bool) -> None:
        """Note which kinds wait since this moment, once `note` was told what the held jobs have computed before it.

        Else the first measurement would begin at the next update and end at the one after it.
        """
        for kind, waits in zip(self._kinds, (foreground_waits, background_waits and not foreground_waits), strict=True):
            if waits:
                kind.begin_wait(now_s)

    def update(
        self,
        now_s: float,
        *,
        num_running: int,
        foreground_waits: bool,
        background_waits: bool,
        since_s: float = 0.0,
        kind_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Count what was noted since the last update for the kind that waited all the time; since when, if known.

        `kind_seconds`: the engine's time for foreground and background work since its start.
        """
        foreground, background = self._kinds
        elapsed_s = 0.0 if self._updated_s is None else now_s - self._updated_s
        before_s, self._updated_s = now_s if self._updated_s is None else self._updated_s, now_s
        self._count_engine(elapsed_s, kind_seconds, background_waits=background_waits)
        foreground.count(before_s, now_s, since_s, waits=foreground_waits)
        waits = background_waits and not foreground_waits
        half_life_s = HALF_LIFE_S + (HALF_LIFE_BESIDE_S - HALF_LIFE_S) * (1 - self._background_part)
        background.count(before_s, now_s, since_s, waits=waits, half_life_s=half_life_s)
        num_remembered = max(MIN_REMEMBERED, REMEMBERED_PER_RUNNING * num_running)
        for kind in self._kinds:
            while len(kind.begun) > num_remembered:
                kind.begun.popleft()

    def _count_engine(self, elapsed_s: float, kind_seconds: tuple[float, float], *, background_waits: bool) -> None:
        before, self._kind_seconds = self._kind_seconds, kind_seconds
        if background_waits:
            fade = 0.5 ** (elapsed_s / HALF_LIFE_BESIDE_S)
            gained = (max(0.0, new - old) for new, old in zip(kind_seconds, before, strict=True))
            foreground_s, background_s = (fade * one + more for one, more in zip(self._engine_s, gained, strict=True))
            self._engine_s = foreground_s, background_s

    def paces(self, steps: StepParts | None, num_sequences: int) -> tuple[DrainPace, DrainPace]:
        """Return the paces of foreground and of background work; 0 if there is neither a measurement nor a model.

        `num_sequences`: how many decode at once while jobs wait.
        """
        weight = 1.0 if steps is None else steps.output_weight(num_sequences)
        modelled_per_s = 0.0 if steps is None else 1000 / steps.prompt_ms
        foreground, background = self._kinds
        measured = [kind.work(weight) / kind.seconds if kind.seconds else None for kind in self._kinds]
        lengths = (foreground if foreground.begun else background).lengths(weight)
        # What is measured of one kind is the prior of the other one, never its own: too little of it would count alone.
        prior_per_s = modelled_per_s if measured[1] is None or measured[0] is not None else measured[1]
        first = _pace(foreground, lengths, weight, prior_per_s, least_spread=FOREGROUND_SPREAD)
        part = self._background_part
        prior_per_s = part * (modelled_per_s if measured[0] is None else measured[0])
        if foreground.begun and background.begun:
            lengths = background.lengths(weight)
        counts = 1 + MORE_PRIOR * (1 - part)
        return first, _pace(background, lengths, weight, prior_per_s, counts, least_spread=BACKGROUND_SPREAD)

    @property
    def _background_part(self) -> float:
        """The part of the engine's time that background work had lately, while such jobs waited; 1 if none is known."""
        foreground_s, background_s = self._engine_s
        return (background_s + WHOLE_ENGINE_S) / (foreground_s + background_s + WHOLE_ENGINE_S)


class _KindOfWork:
    """Measurements of one kind of work. Sums over time fade."""

    def __init__(self) -> None:
        self.begun: deque[JobWork] = deque()
        self.fresh_prompt = self.fresh_output = 0
        self.prompt = self.output = self.seconds = 0.0
        self.prior_s = PRIOR_S
        self._slow_tokens = self._slow_seconds = 0.0
        self._has_waited = False
        self._began_s = 0.0

    def begin_wait(self, now_s: float) -> None:
        """Count from now on, unless jobs have waited since the last update."""
        if not self._has_waited:
            self.fresh_prompt = self.fresh_output = 0
            self._has_waited, self._began_s = True, now_s

    def count(
        self, before_s: float, now_s: float, since_s: float, *, waits: bool, half_life_s: float = HALF_LIFE_S
    ) -> None:
        """Count the fresh work, if jobs have waited for the whole time: an idle node does not show its speed.

        `before_s`: the last update; `since_s`: since when the queue has had the present kinds, if known.
        """
        from_s = max(before_s, self._began_s)
        elapsed_s = now_s - from_s
        if waits and self._has_waited and since_s <= from_s:
            fade = 0.5 ** (elapsed_s / half_life_s)
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
    measured: _KindOfWork,
    lengths: _Lengths,
    output_weight: float,
    prior_per_s: float,
    prior_counts: float = 1.0,
    *,
    least_spread: float,
) -> DrainPace:
    prior_s = prior_counts * measured.prior_s if prior_per_s else 0.0
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
    the last known part is assumed, within their limits. It is as much again as what they have so far. At least it is
    the longest output, and once outputs have ended LONGER × that.
    """
    longest, ended = defaultdict[float, int](int), defaultdict[float, int](int)
    for work in jobs:
        part = work.part
        longest[part] += work.longest_output
        if work.has_ended:
            ended[part] += work.longest_output
    total = at_risk = float(sum(longest.values()))
    # Where the furthest outputs have ended, the others that run might still reach more. Some of them count as if they
    # did: the more of them are behind and the fewer are left to judge by. Else the first short answers of a node would
    # be the longest ones of all.
    running, one_job = at_risk - sum(ended.values()), at_risk / max(1, len(jobs))
    reach, mean, before, behind = 1.0, 0.0, 0.0, 0.0
    for part in sorted(longest):
        mean += reach * (part - before)
        before = part
        doubted = min(running, one_job * max(DOUBTED_JOBS, behind / total * math.sqrt(behind / at_risk)))
        reach *= 1 - ended.get(part, 0) / (at_risk + doubted)
        at_risk -= longest[part]
        behind += longest[part] - ended.get(part, 0)
    most = max((work.most_output / work.longest_output for work in jobs if work.part == before), default=1.0)
    assumed = reach * max(0.0, min(most - before, max(LONGER if ended else 1.0, before)))
    return mean + assumed, assumed
