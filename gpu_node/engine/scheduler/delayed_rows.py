"""Running sequences that sit out steps until their mask is there, so that no step computes them in vain."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints


class DelayedRows:
    """Sequences whose mask came too late for a step. They keep rows and blocks, and compute nothing meanwhile."""

    def __init__(self) -> None:
        self._seqs: set[Sequence] = set()

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Hold sequences back as long as their mask is under way."""
        self._seqs.update(seqs)

    def cut(self, seqs: Items[Sequence], starts: Ints, ends: Ints) -> Ints:
        """How far sequences get in a step which those that are held back sit out.

        Where nothing else would be computed, they take part: that step waits longer for its masks.
        """
        if not self._seqs:
            return ends
        self._seqs = {seq for seq in self._seqs if seq.row >= 0 and seq.guide is not None and seq.guide.is_waiting}
        held = [i for i in range(len(ends)) if seqs[i] in self._seqs]
        without = ends.copy()
        without[held] = starts[held]
        return without if (without > starts).any() else ends
