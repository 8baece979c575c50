"""Steps: which tokens each sequence computes, after which tokens it samples, and the steps that the runner has.

Arrays have one number for each sequence. For short ones, `sum(x.tolist())` takes an eighth of the time of `x.sum()`,
and `np.count_nonzero(x)` a quarter of that of `x.any()`. On a CPU no kernel runs while the next step is made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import ModelRunner, StepHandle, StepPlan, StepResult, StepStates, StepWindows

Ints = NDArray[np.int32]
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: `seqs[i]` computes its tokens, drafted ones included, from starts[i] to ends[i]."""

    seqs: list[Sequence]
    rows: Rows
    starts: Ints
    ends: Ints
    sampled: Ints
    """The indices in `seqs` of the samples, ascending. A sequence with drafted tokens has one more for each of them."""
    sampled_seqs: list[Sequence]
    sampled_rows: Rows
    sampled_ends: Ints
    """The number of tokens before each sample."""
    num_prefill_tokens: int
    """Tokens of sequences that lacked more than one token."""
    num_drafted: int
    """Drafted tokens that are computed and may be rejected."""
    cached_blocks: list[int]
    """Blocks that this step fills and that the prefix cache already lists."""
    copies: Ints
    """[num_copies, 2]: source and target of the block copies that come first."""
    states: StepStates | None = None
    """The slots of its sequences' states; None for a model without states."""
    windows: StepWindows | None = None
    """The blocks of its sequences' windows; None where all layers have the same blocks."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum((self.ends - self.starts).tolist())

    @property
    def num_tokens_running(self) -> int:
        """Tokens that the step computes for sequences that still run."""
        counts = (self.ends - self.starts).tolist()
        return sum(count for seq, count in zip(self.seqs, counts, strict=True) if seq.row >= 0)


def step_of(
    seqs: list[Sequence],
    rows: Rows,
    starts: Ints,
    ends: Ints,
    num_tokens: Ints,
    *,
    cached_blocks: list[int],
    copies: Ints,
) -> Step:
    """Build a step in which sequences compute from `starts` to `ends`; a sequence samples if it reaches `num_tokens`.

    Tokens beyond `num_tokens` are drafted, and a token is sampled after each of them too.
    """
    computes = ends > starts
    if np.count_nonzero(computes) < len(computes):
        at = computes.nonzero()[0]
        seqs, rows, starts, ends, num_tokens = [seqs[i] for i in at], rows[at], starts[at], ends[at], num_tokens[at]
    sampled, sampled_ends, num_drafted = _samples_of(ends, num_tokens)
    sampled_rows, sampled_seqs = rows, seqs
    if num_drafted or len(sampled) < len(seqs):
        sampled_rows, sampled_seqs = rows[sampled], [seqs[i] for i in sampled.tolist()]
    return Step(
        seqs=seqs,
        rows=rows,
        starts=starts,
        ends=ends,
        sampled=sampled.astype(np.int32),
        sampled_seqs=sampled_seqs,
        sampled_rows=sampled_rows,
        sampled_ends=sampled_ends,
        num_prefill_tokens=sum((ends - starts)[num_tokens - starts > 1].tolist()),
        num_drafted=num_drafted,
        cached_blocks=cached_blocks,
        copies=copies,
    )


def _samples_of(ends: Ints, num_tokens: Ints) -> tuple[Rows, Ints, int]:
    """Return, for each sample, the index of its sequence and the tokens before it; and the number of drafted tokens."""
    sampled = (ends >= num_tokens).nonzero()[0]
    if not np.count_nonzero(ends > num_tokens):
        return sampled, ends if len(sampled) == len(ends) else ends[sampled], 0
    num_drafted = np.maximum(ends - num_tokens, 0)
    sampled = np.repeat(sampled, num_drafted[sampled] + 1)
    firsts = np.searchsorted(sampled, sampled)
    return sampled, num_tokens[sampled] + (np.arange(len(sampled)) - firsts).astype(np.int32), int(num_drafted.sum())


class InFlightStep:
    """A submitted step. It holds the plan, because the runner reads its arrays until the step is done."""

    def __init__(self, runner: ModelRunner, step: Step, plan: Callable[[Step], StepPlan]) -> None:
        """Plan and submit the step."""
        self.step = step
        self.started_s = time.perf_counter()
        """When it was submitted, or when the previous step completed if that was later."""
        self._result: StepResult | None = None
        self._error: Exception | None = None
        self._handle: StepHandle | None = None
        try:
            self.plan = plan(step)
            self._handle = runner.submit(self.plan)
        except Exception as error:
            # `result` raises it later, so that the outputs of the previous step are returned first.
            self._error = error

    def wait(self) -> None:
        """Block until the step is done or has failed."""
        if self._result is not None or self._error is not None:
            return
        try:
            self._result = cast("StepHandle", self._handle).result()
        except Exception as error:
            self._error = error

    def result(self) -> StepResult:
        """Wait for the result. Raises the error that made the whole step fail."""
        self.wait()
        if self._error is not None:
            raise self._error
        return cast(StepResult, self._result)

    @property
    def has_begun(self) -> bool:
        """Whether the runner took it, so that it may have written to blocks and slots before it failed."""
        return self._handle is not None

    @property
    def has_failed(self) -> bool:
        """Whether the step is known to have failed."""
        return self._error is not None

    @property
    def age_ms(self) -> float:
        """Milliseconds since it was submitted, or since the previous step completed if that was later."""
        return (time.perf_counter() - self.started_s) * 1e3


class InFlightSteps:
    """The steps that the runner has, the oldest first."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> list[Step]:
        """The steps, without their handles."""
        return [one.step for one in tuple(self._steps)]

    def can_launch(self, runner: ModelRunner) -> bool:
        """Return whether one more step may be submitted now. No step follows a failed one."""
        steps = self._steps
        return not steps or (len(steps) < runner.max_in_flight and not steps[-1].has_failed)

    def launch(self, runner: ModelRunner, step: Step, plan: Callable[[Step], StepPlan]) -> None:
        """Submit a step."""
        self._steps.append(InFlightStep(runner, step, plan))

    def wait(self) -> None:
        """Block until the oldest step is done. If it failed, wait for the later ones too: they are dropped with it."""
        for one in self._steps:
            one.wait()
            if not one.has_failed:
                return

    def complete(self) -> InFlightStep:
        """Wait for the oldest step, remove and return it. If it failed, remove the later ones as well."""
        # The step is removed only after the wait: an interrupt while waiting loses no step.
        self.wait()
        oldest = self._steps.popleft()
        if oldest.has_failed:
            self._steps.clear()
        for one in self._steps:
            one.started_s = time.perf_counter()
        return oldest
