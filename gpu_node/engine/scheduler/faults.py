"""Find the sequence that makes whole steps fail, by bisection, while all sequences continue."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step

MAX_SHARE_OF_STALL = 0.1
"""A decode step that takes longer than this share of `stall_after_s` makes its requests suspects."""
MAX_SHARE_OF_STALL_WITH_PREFILL = 0.5
"""The same for a step with prompt tokens, which may take long on a slow machine."""
_MAX_STRIKES = 3
_MAX_SLOW_STRIKES = 2


class _Strikes(NamedTuple):
    """How often a sequence failed alone, and the tokens that it was to compute in all of these steps."""

    times: int
    start: int
    end: int


def is_slow(took_s: float, stall_after_s: float, *, is_strict: bool) -> bool:
    """Return whether a step was so slow that a step a few times slower would make the node exit.

    `is_strict`: whether the limit of decode steps applies.
    """
    return took_s > stall_after_s * (MAX_SHARE_OF_STALL if is_strict else MAX_SHARE_OF_STALL_WITH_PREFILL)


def _unit_of(seq: Sequence) -> Sequence:
    """Return the sequence that is suspected for another one: the first beam for all beams of a search."""
    return seq if seq.beams is None else seq.beams[0]


class FaultIsolator:
    """Tracks the sequences of failed steps as suspects, until each has computed more than in the step that failed.

    At most half as many suspects run at once as failed together last time. A sequence that fails alone several times,
    while other steps succeed, is faulty. If no step succeeds, the runner is broken and no sequence is blamed.

    A step that ran out of memory may just have been too large. So the last suspect runs by itself, in steps that shrink
    to one token. A strike counts only if a one-token step still runs out of memory.
    """

    def __init__(self) -> None:
        self._failed_at: dict[Sequence, int] = {}
        self._strikes: dict[Sequence, _Strikes] = {}
        self._max_at_once = 1
        self._has_completed = False
        self._isolated: Sequence | None = None
        self.to_stop: list[Sequence] = []
        """Sequences of the last slow step that stop running; admission restarts them a few at a time."""

    @property
    def has_any(self) -> bool:
        """Whether any sequence is still suspected."""
        return bool(self._failed_at)

    @property
    def is_isolating(self) -> bool:
        """Whether one sequence must run by itself, so that no other may preempt for its start."""
        return self._isolated is not None

    def must_stop(self, seq: Sequence) -> bool:
        """Return whether a sequence must stop running after a step ran out of memory."""
        if self._isolated is not None:
            return seq is not self._isolated
        return seq in self._strikes and not self._has_completed

    def eligible(self, waiting: Iterable[Sequence], running: Collection[Sequence]) -> Iterable[Sequence]:
        """Return the waiting sequences that may start, in their order."""
        if self._isolated is not None:
            return [] if running else [self._isolated]
        if not self._strikes or self._has_completed:
            return waiting
        # Only steps without these sequences can show whether the fault is theirs or the runner's.
        others = [seq for seq in waiting if seq not in self._strikes]
        return others if others or running else waiting

    def may_join(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Return whether an eligible sequence may run beside the running ones."""
        if seq in self._strikes and not self._has_completed:
            return not running
        return seq not in self._failed_at or sum(one in self._failed_at for one in running) < self._max_at_once

    def note_completed(self, step: Step, *, is_slow: bool = False) -> Sequence | None:
        """Record a computed step. Return the sequence that makes steps slow, once that is certain."""
        if is_slow:
            return self._slow(step)
        self._has_completed = True
        if self._failed_at:
            for seq, end in zip(step.seqs, step.ends.tolist(), strict=True):
                if end >= self._failed_at.get(seq, end + 1):
                    self.forget(seq)
                elif seq in self._strikes and end >= self._strikes[seq].end:
                    del self._strikes[seq]
        return None

    def note_failed(self, step: Step, *, for_memory: bool = False) -> Sequence | None:
        """Record a failed step of running sequences. Return the faulty sequence, once that is certain."""
        spans: dict[Sequence, tuple[int, int]] = {}
        for seq, start, end in zip(step.seqs, step.starts.tolist(), step.ends.tolist(), strict=True):
            if seq.row >= 0:
                before = spans.get(one := _unit_of(seq), (start, end))
                spans[one] = min(start, before[0]), max(end, before[1])
        suspected = [seq for seq in spans if seq in self._failed_at] or list(spans)
        for seq in suspected:
            self._failed_at[seq] = max(spans[seq][1], self._failed_at.get(seq, 0))
        self._max_at_once = max(1, len(suspected) // 2)
        self._isolated = None
        if len(suspected) != 1:
            return None
        alone = suspected[0]
        if for_memory and step.num_tokens > 1:
            self._isolated = alone
            return None
        self._strikes[alone] = strikes = self._add_strike(alone, *spans[alone])
        is_faulty = self._has_completed and strikes.times >= _MAX_STRIKES
        self._has_completed = False
        return alone if is_faulty else None

    def forget(self, seq: Sequence) -> None:
        """Clear a sequence of suspicion, or drop one that is gone."""
        self._failed_at.pop(seq, None)
        self._strikes.pop(seq, None)
        if seq is self._isolated:
            self._isolated = None

    def _add_strike(self, seq: Sequence, start: int, end: int) -> _Strikes:
        """Return a sequence's strikes plus this one; only strikes at overlapping tokens add up."""
        if (before := self._strikes.get(seq)) is not None:
            start_of_all, end_of_all = max(start, before.start), min(end, before.end)
            if start_of_all < end_of_all:
                return _Strikes(before.times + 1, start_of_all, end_of_all)
        return _Strikes(1, start, end)

    def _slow(self, step: Step) -> Sequence | None:
        """Record a slow step. Return the faulty sequence, once that is certain.

        Suspects are bisected as after a failed step. A sequence is faulty when several of its decode steps were slow
        with it as the only suspect, while steps without it were not.
        """
        present = [i for i, seq in enumerate(step.seqs) if seq.row >= 0 and seq is _unit_of(seq)]
        indices = [i for i in present if step.seqs[i] in self._failed_at] or present
        for i in indices:
            self._failed_at[step.seqs[i]] = int(step.ends[i]) + 1
        self._max_at_once = max(1, len(indices) // 2)
        self.to_stop = [step.seqs[i] for i in indices]
        if len(indices) != 1:
            return None
        alone, start, end = step.seqs[indices[0]], int(step.starts[indices[0]]), int(step.ends[indices[0]])
        if end - start > 1:
            self.to_stop = []  # a prompt may take long: its next step decides
            return None
        times = self._strikes[alone].times + 1 if alone in self._strikes else 1
        # Each slow step made progress, so the tokens of the strikes move on with it.
        self._strikes[alone] = _Strikes(times, start, end + 1)
        is_faulty = self._has_completed and times >= _MAX_SLOW_STRIKES
        self._has_completed = False
        return alone if is_faulty else None
