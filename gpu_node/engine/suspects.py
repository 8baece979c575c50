"""Which sequence makes whole steps fail: found by halves, while all of them go on."""

from __future__ import annotations

from collections.abc import Collection

from penstock.gpu_node.engine.rows import Step
from penstock.gpu_node.engine.sequence import Sequence

_MAX_STRIKES = 3


class Suspects:
    """Sequences of a failed step, until each has come past where it was then.

    Half as many of them run at once as failed together last time; whoever fails alone again and again, while the runner
    does compute other steps, is to blame. Where it computes none, nobody is: then it is the runner that is broken.
    """

    def __init__(self) -> None:
        self._failed_at: dict[Sequence, int] = {}
        self._strikes: dict[Sequence, int] = {}
        self._max_at_once = 1
        self._has_landed = False

    def may_join(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether a sequence may run beside others."""
        if seq in self._strikes and not self._has_landed:
            # Without the others' steps nobody could tell whether it is this sequence or the runner.
            return not running
        return seq not in self._failed_at or sum(one in self._failed_at for one in running) < self._max_at_once

    def landed(self, step: Step) -> None:
        """A step was computed."""
        self._has_landed = True
        if self._failed_at:
            for seq, end in zip(step.seqs, step.ends.tolist(), strict=True):
                if end >= self._failed_at.get(seq, end + 1):
                    self.forget(seq)

    def failed(self, step: Step) -> tuple[Sequence | None, bool]:
        """A step of running sequences failed: the one that did so alone, and whether it is to blame."""
        ends = {seq: end for seq, end in zip(step.seqs, step.ends.tolist(), strict=True) if seq.row >= 0}
        suspected = [seq for seq in ends if seq in self._failed_at] or list(ends)
        for seq in suspected:
            self._failed_at[seq] = max(ends[seq], self._failed_at.get(seq, 0))
        self._max_at_once = max(1, len(suspected) // 2)
        if len(suspected) != 1:
            return None, False
        alone = suspected[0]
        self._strikes[alone] = self._strikes.get(alone, 0) + 1
        is_to_blame = self._has_landed and self._strikes[alone] >= _MAX_STRIKES
        self._has_landed = False
        return alone, is_to_blame

    def forget(self, seq: Sequence) -> None:
        """A sequence is cleared, or gone."""
        self._failed_at.pop(seq, None)
        self._strikes.pop(seq, None)
