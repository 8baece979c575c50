"""Which sequence makes whole steps fail: found by halves, while all of them go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step

_MAX_STRIKES = 3
_MAX_SLOW_STRIKES = 2


class _Strikes(NamedTuple):
    """How often a sequence failed alone, and the tokens that it was to compute each of these times."""

    times: int
    start: int
    end: int


class FaultIsolator:
    """Sequences of a failed step, until each has come past where it was then.

    Half as many of them run at once as failed together last time; whoever fails alone again and again, while the runner
    does compute other steps, is to blame. Where it computes none, nobody is: then it is the runner that is broken.

    A step that found no memory may have been too large only. Then the last suspect is tried by itself, in steps that
    shrink to a single token: only who fails in such a one counts as failing alone.
    """

    def __init__(self) -> None:
        self._failed_at: dict[Sequence, int] = {}
        self._strikes: dict[Sequence, _Strikes] = {}
        self._max_at_once = 1
        self._has_landed = False
        self._on_trial: Sequence | None = None
        self.to_stop: list[Sequence] = []
        """Sequences of the last slow step that stop running: admission lets them come back a few at a time."""

    @property
    def has_any(self) -> bool:
        """Whether somebody is not cleared yet."""
        return bool(self._failed_at)

    @property
    def is_trying(self) -> bool:
        """Whether somebody has to run by itself, so that nobody may press."""
        return self._on_trial is not None

    def bars(self, seq: Sequence) -> bool:
        """Whether a sequence may not go on running after a step that found no memory."""
        if self._on_trial is not None:
            return seq is not self._on_trial
        return seq in self._strikes and not self._has_landed

    def eligible(self, waiting: Iterable[Sequence], running: Collection[Sequence]) -> Iterable[Sequence]:
        """Who of those that wait may be offered room, in their order."""
        if self._on_trial is not None:
            return [] if running else [self._on_trial]
        if not self._strikes or self._has_landed:
            return waiting
        # Without the others' steps nobody could tell whether it is one of these or the runner.
        others = [seq for seq in waiting if seq not in self._strikes]
        return others if others or running else waiting

    def may_join(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether one that is eligible may run beside others."""
        if seq in self._strikes and not self._has_landed:
            return not running
        return seq not in self._failed_at or sum(one in self._failed_at for one in running) < self._max_at_once

    def landed(self, step: Step, *, is_slow: bool = False) -> Sequence | None:
        """Note a step that was computed. Return the sequence that makes steps slow, once that is sure."""
        if is_slow:
            return self._slow(step)
        self._has_landed = True
        if self._failed_at:
            for seq, end in zip(step.seqs, step.ends.tolist(), strict=True):
                if end >= self._failed_at.get(seq, end + 1):
                    self.forget(seq)
                elif seq in self._strikes and end >= self._strikes[seq].end:
                    del self._strikes[seq]
        return None

    def failed(self, step: Step, *, for_memory: bool = False) -> Sequence | None:
        """A step of running sequences failed: the one that is to blame, once that is sure."""
        steps = zip(step.seqs, step.starts.tolist(), step.ends.tolist(), strict=True)
        spans = {seq: (start, end) for seq, start, end in steps if seq.row >= 0}
        suspected = [seq for seq in spans if seq in self._failed_at] or list(spans)
        for seq in suspected:
            self._failed_at[seq] = max(spans[seq][1], self._failed_at.get(seq, 0))
        self._max_at_once = max(1, len(suspected) // 2)
        self._on_trial = None
        if len(suspected) != 1:
            return None
        alone = suspected[0]
        if for_memory and step.num_tokens > 1:
            self._on_trial = alone
            return None
        self._strikes[alone] = strikes = self._struck(alone, *spans[alone])
        is_to_blame = self._has_landed and strikes.times >= _MAX_STRIKES
        self._has_landed = False
        return alone if is_to_blame else None

    def forget(self, seq: Sequence) -> None:
        """A sequence is cleared, or gone."""
        self._failed_at.pop(seq, None)
        self._strikes.pop(seq, None)
        if seq is self._on_trial:
            self._on_trial = None

    def _struck(self, seq: Sequence, start: int, end: int) -> _Strikes:
        """With one strike more; only those at one and the same place count."""
        if (before := self._strikes.get(seq)) is not None:
            start_of_all, end_of_all = max(start, before.start), min(end, before.end)
            if start_of_all < end_of_all:
                return _Strikes(before.times + 1, start_of_all, end_of_all)
        return _Strikes(1, start, end)

    def _slow(self, step: Step) -> Sequence | None:
        """Tell the sequences of a slow step apart.

        Suspects are told apart by halves, as after a failed step. A sequence is at fault when several of its decode
        steps were slow with it as the only suspect, and a step without it was not in between.
        """
        present = [i for i, seq in enumerate(step.seqs) if seq.row >= 0]
        indices = [i for i in present if step.seqs[i] in self._failed_at] or present
        for i in indices:
            self._failed_at[step.seqs[i]] = int(step.ends[i]) + 1
        self._max_at_once = max(1, len(indices) // 2)
        self.to_stop = [step.seqs[i] for i in indices]
        if len(indices) != 1:
            return None
        alone, start, end = step.seqs[indices[0]], int(step.starts[indices[0]]), int(step.ends[indices[0]])
        if end - start > 1:
            self.to_stop = []  # a prompt may take long: its next step tells
            return None
        times = self._strikes[alone].times + 1 if alone in self._strikes else 1
        # Each slow step got it further: the place of the strikes moves along.
        self._strikes[alone] = _Strikes(times, start, end + 1)
        is_to_blame = self._has_landed and times >= _MAX_SLOW_STRIKES
        self._has_landed = False
        return alone if is_to_blame else None
