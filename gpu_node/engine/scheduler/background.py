"""Background work in steps: how much of it runs beside foreground work, and its guaranteed share of engine time.

No caller waits for background sequences, so they fill what foreground sequences leave. Beside these they lengthen a
step by a bounded factor. Alone they run in short steps while foreground work may come, because it waits for the running
step. A share of the engine's time is guaranteed to them. While they are below it, the bound of each step is raised by
as much as they lack. Large steps of background work from time to time would have the same effect with longer gaps
between foreground tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES
from penstock.gpu_node.engine.scheduler.budget import StepLimits, StepTime, StepWork, ends_within_budget
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch
from penstock.gpu_node.engine.scheduler.queues import Grants, WaitingQueues
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.scheduler.turns import StepTurns
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Rows, Step

WINDOW_MS = 10_000.0
"""Engine milliseconds for which use above or below the guaranteed share is remembered."""
FOREGROUND_MEMORY_MS = 5_000.0
"""Engine milliseconds after the last foreground work for which steps of background work stay short."""
_KEPT_MS = 2_000.0
"""Engine milliseconds whose share background work must have in advance before its last sequences yield."""
_MIN_MS = 1e-6
"""The least milliseconds that a token counts as, so that classes whose tokens take no time divide it evenly."""
_MIN_TURN = 0.5
"""A prompt that needs more than the rest of a step waits for the next one, unless the rest is this part of the step."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The tokens that a step may compute."""

    tokens: int
    """Tokens of all sequences in order; if `granted` is set, of the foreground sequences only."""
    granted: Ints | None = None
    """[max_rows], the tokens of each background sequence, by its row."""
    newcomers: int | None = None
    """Prompt tokens of background sequences that start. None: they start within `tokens`."""
    max_tokens: int | None = None
    """Tokens of the whole step; None: `tokens`."""

    def ends(self, table: InputBatch, rows: Rows, wanted: Ints) -> Ints:
        """Return the ends of running sequences that want to compute up to `wanted`; an end at its start: no tokens."""
        starts = table.num_computed[rows]
        if self.granted is None:
            return ends_within_budget(self.tokens, starts, wanted)
        ends: Ints = starts + self.granted[rows]
        foreground = (~table.is_background[rows]).nonzero()[0]
        served = ends_within_budget(self.tokens, starts[foreground], wanted[foreground])
        ends[foreground[: len(served)]] = served
        return ends

    def grants(self, table: InputBatch, rows: Rows, ends: Ints, cached: list[int]) -> Grants:
        """Return what running sequences that compute up to `ends` leave for sequences that start."""
        counts = ends - table.num_computed[rows]
        num_left = (self.tokens if self.max_tokens is None else self.max_tokens) - int(counts.sum())
        if self.granted is None:
            return Grants(num_left, cached)
        for_foreground = self.tokens - int(counts[~table.is_background[rows]].sum())
        return Grants(num_left, cached, foreground=for_foreground, background=self.newcomers)


class EngineTime:
    """The engine's milliseconds by kind and class of work, and what background work lacks of its share of them.

    A step's time is divided by the model of step times: background work gets what its sequences add to the step. The
    classes of one kind divide its time by what each token takes, as if no other sequence were in the step.
    """

    def __init__(self, step_time: StepTime, share: float) -> None:
        self._level_ms = np.zeros(NUM_LEVELS)
        self.lacking_ms = 0.0
        """Milliseconds that background work lacks of its share; negative: what it used above it."""
        self.since_foreground_ms = float("inf")
        """Milliseconds of steps since the last one with foreground work."""
        self._time = step_time
        self._share = share

    def note(self, step: Step, took_ms: float, *, is_held_back: bool) -> None:
        """Count a computed step. `is_held_back`: some background work had to wait."""
        levels = [seq.job_level for seq in step.seqs]
        if levels and levels.count(levels[0]) == len(levels):
            self._level_ms[levels[0]] += took_ms
            background_ms = took_ms if levels[0] >= NUM_PRIORITIES else 0.0
        else:
            background_ms = self._divide(step, np.array(levels, dtype=np.intp), took_ms)
        lacking_ms = self.lacking_ms + self._share * took_ms - background_ms
        limit_ms = self._share * WINDOW_MS
        self.lacking_ms = max(-limit_ms, min(limit_ms if is_held_back else 0.0, lacking_ms))
        self.since_foreground_ms = 0.0 if background_ms < took_ms else self.since_foreground_ms + took_ms

    @property
    def foreground_ms(self) -> float:
        """The milliseconds of all steps that foreground work took."""
        return float(self._level_ms[:NUM_PRIORITIES].sum())

    @property
    def background_ms(self) -> float:
        """The milliseconds of all steps that background work added."""
        return float(self._level_ms[NUM_PRIORITIES:].sum())

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of all steps, by kind of work."""
        return {"foreground": self.foreground_ms / 1e3, "background": self.background_ms / 1e3}

    @property
    def step_costs_ms(self) -> tuple[float, float, float] | None:
        """The costs that the model of step times has learned."""
        return self._time.costs_ms

    @property
    def level_seconds(self) -> tuple[float, ...]:
        """The seconds of all steps, by the level of the jobs."""
        return tuple((self._level_ms / 1e3).tolist())

    def _divide(self, step: Step, levels: Rows, took_ms: float) -> float:
        """Add a step's milliseconds to the levels of its sequences. Return those of background work."""
        is_background = levels >= NUM_PRIORITIES
        background_ms = took_ms * self._background_part(step, is_background)
        decoded_ms = max(_MIN_MS, self._time.decode_ms(1) - self._time.decode_ms(0))
        prefilled_ms = max(_MIN_MS, self._time.token_ms(0, is_scored=False))
        counts = step.ends - step.starts
        alone_ms = np.where(counts > 1, counts * prefilled_ms, decoded_ms)
        for is_of_kind, kind_ms in ((~is_background, took_ms - background_ms), (is_background, background_ms)):
            if is_of_kind.any():
                of_kind = alone_ms * is_of_kind
                self._level_ms += np.bincount(levels, of_kind, NUM_LEVELS) * (kind_ms / of_kind.sum())
        return background_ms

    def _background_part(self, step: Step, is_background: NDArray[np.bool_]) -> float:
        if not is_background.any():
            return 0.0
        if is_background.all():
            return 1.0
        counts, foreground = step.ends - step.starts, ~is_background
        return 1 - self._ms(counts[foreground], step.starts[foreground]) / self._ms(counts, step.starts)

    def _ms(self, counts: Ints, starts: Ints) -> float:
        is_chunk = counts > 1
        num_attended = int((counts[is_chunk].astype(np.int64) * starts[is_chunk]).sum())
        return self._time.step_ms(StepWork(int((~is_chunk).sum()), int(counts[is_chunk].sum()), num_attended, 0))


class BackgroundBudget:
    """Divides each step between foreground and background sequences.

    The background sequence that has waited the longest for a step goes first.
    """

    def __init__(self, limits: StepLimits, batch: RunningBatch, queues: WaitingQueues, step_time: StepTime) -> None:
        self.engine_time = EngineTime(step_time, limits.background_share)
        self.num_held_back = 0
        """Times that a running background sequence had to skip a step."""
        self.num_left_out = 0
        """Running background sequences that the last step left out."""
        self.is_queued = False
        """Whether background work waits outside the engine."""
        self._limits = limits
        self._batch = batch
        self._queues = queues
        self._time = step_time
        self._present: set[Sequence] = set()
        self._turns = StepTurns()
        self._is_held_back = self._has_protected = False

    @property
    def is_due(self) -> bool:
        """Whether background work is below its share. Any thread may read it."""
        return self.engine_time.lacking_ms > 0

    @property
    def is_present(self) -> bool:
        """Whether any background sequence runs or waits."""
        return bool(self._present)

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Note sequences that are being queued."""
        self._present.update(seq for seq in seqs if seq.background)

    def forget(self, seq: Sequence) -> None:
        """Drop a sequence that ends."""
        self._present.discard(seq)

    def note_step(self, step: Step, took_ms: float) -> None:
        """Count a computed step."""
        is_held_back = self.is_queued or (self._is_held_back and self.is_present)
        self.engine_time.note(step, took_ms, is_held_back=is_held_back)

    def has_foreground(self) -> bool:
        """Return whether a foreground sequence runs or waits."""
        return not all(seq.background for seq in chain(self._batch.seqs, self._queues))

    def note_foreground(self) -> None:
        """Note that foreground work of another node on these cores may have to wait for a step."""
        self.engine_time.since_foreground_ms = 0.0

    def bounds(self) -> bool:
        """Return whether the next step is bounded because of background work in it."""
        is_recent = self.engine_time.since_foreground_ms < FOREGROUND_MEMORY_MS
        if self._present and (is_recent or self.has_foreground()):
            return True
        self.num_left_out = 0
        return False

    def protect(self, num_blocks: int) -> None:
        """Mark the background sequences that foreground ones may not displace: while it is due, its share of a device.

        The share is of the rows and of `num_blocks`; the first sequence may hold more.
        """
        if self._has_protected:
            for seq in self._present:
                seq.is_protected = False
        # Sequences that started for the share must not yield as soon as it is reached, or they would start in vain.
        enough_ms = -_KEPT_MS * self._limits.background_share if self._has_protected else 0.0
        self._has_protected = self.engine_time.lacking_ms > enough_ms and bool(self._present)
        if not self._has_protected:
            return
        share = self._limits.background_share
        rows_left, blocks_left = share * self._limits.max_num_seqs - 1, share * num_blocks
        for seq in (seq for seq in chain(self._batch.seqs, self._queues) if seq.background):
            seq.is_protected = True
            rows_left -= 1 + len(seq.forks)
            blocks_left -= max(len(seq.blocks), self._batch.num_blocks(len(seq.token_ids)))
            if rows_left < 0 or blocks_left < 0:
                break

    def divide(self, foreground_tokens: int, num_drafted: int, max_tokens: int, running: Step | None) -> StepBudget:
        """Return the budget of a step of at most `max_tokens` tokens.

        foreground_tokens: what foreground sequences may compute, `num_drafted` drafted tokens included.

        running: the step after which this one is planned ahead.
        """
        table, rows = self._batch.table, self._batch.rows
        to_compute = (table.num_tokens[rows] - table.num_computed[rows])[~table.is_background[rows]]
        num_decoded = int((to_compute == 1).sum()) + num_drafted
        waiting = [len(seq.token_ids) for seq in self._queues if not seq.background]
        num_prompt_tokens = int(to_compute[to_compute > 1].sum()) + sum(waiting)
        must_run = running is None and not len(to_compute)
        reserved = max(int(must_run), math.ceil(2 * self._limits.background_share * max_tokens) if self.is_due else 0)
        foreground_tokens = min(foreground_tokens, max(num_decoded, max_tokens - reserved, min(1, num_prompt_tokens)))
        num_foreground = min(foreground_tokens, num_decoded + num_prompt_tokens)
        running_ms = 0.0 if running is None else self._time.step_ms(StepWork.of(running, 0))
        left_ms = self._left_ms(num_decoded, max(0, num_foreground - num_decoded), running_ms)
        granted, newcomers = self._grant(left_ms, max_tokens - num_foreground, must_run=must_run)
        return StepBudget(foreground_tokens, granted, newcomers, max_tokens)

    def _left_ms(self, num_decoded: int, num_prefilled: int, running_ms: float) -> float:
        """Return the milliseconds that background sequences may add to a step."""
        limits, lacking_ms = self._limits, self.engine_time.lacking_ms
        if not num_decoded and not num_prefilled:
            if 2 * running_ms > limits.background_step_ms:
                return 0.0
            return limits.background_step_ms - running_ms - self._time.decode_ms(0)
        foreground_ms = self._time.step_ms(StepWork(num_decoded, num_prefilled, 0, 0))
        # A step that also computes a prompt is long already: only decoding may be slowed down.
        decode_ms = self._time.decode_ms(num_decoded) if num_decoded else 0.0
        left_ms = max(0.0, limits.background_slowdown * decode_ms - foreground_ms)
        if lacking_ms <= 0:
            return left_ms
        share = limits.background_share
        catches_up = max(limits.background_slowdown - 1, 2 * share / (1 - share))
        return max(left_ms, min(lacking_ms, catches_up * foreground_ms))

    def _grant(self, left_ms: float, max_tokens: int, *, must_run: bool) -> tuple[Ints, int]:
        """Return the tokens of each background row, and those of background sequences that start.

        must_run: no other sequence computes anything, so one token is granted at least.
        """
        table, rows, seqs = self._batch.table, self._batch.rows, self._batch.seqs
        whole_ms, decoded_ms = left_ms, self._time.decode_ms(1) - self._time.decode_ms(0)
        granted = np.zeros_like(table.num_computed)
        indices = table.is_background[rows].nonzero()[0].tolist()
        num_running = 0
        for seq in self._turns.begin_step(seqs[i] for i in indices):
            row = seq.row
            lacking = int(table.num_tokens[row] - table.num_computed[row])
            scored = seq.is_scoring
            token_ms = decoded_ms
            if lacking > 1:
                token_ms = self._time.token_ms(int(table.num_computed[row]), is_scored=scored)
            num_fitting = min(max_tokens, int(max(0.0, left_ms) / token_ms))
            if must_run and not granted.any():
                num_fitting = max(1, num_fitting)
            elif num_fitting < lacking and left_ms < _MIN_TURN * whole_ms:
                continue
            num_tokens = min(lacking, num_fitting, self._limits.max_prefill_beside_decode)
            if num_tokens:
                granted[row] = num_tokens
                self._turns.note(seq)
                num_running += num_tokens == lacking
                left_ms -= num_tokens * token_ms
                max_tokens -= num_tokens
        self.num_left_out = len(indices) - int((granted > 0).sum())
        self.num_held_back += self.num_left_out
        self._is_held_back = num_running < len(indices) or any(seq.background for seq in self._queues)
        newcomers = min(max_tokens, int(max(0.0, left_ms) / self._time.token_ms(0, is_scored=False)))
        return granted, max(0, newcomers, int(must_run and not len(indices)))
