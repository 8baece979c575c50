"""Running sequences that skip steps until their token mask is ready, because a step without it samples nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints
from penstock.gpu_node.engine.structured.guide import Guide


class DelayedRows:
    """Sequences with a late mask. They keep rows and blocks, and compute nothing meanwhile."""

    def __init__(self, guides: Mapping[Sequence, Guide]) -> None:
        self._guides = guides
        self._seqs: set[Sequence] = set()

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Delay sequences until their mask is ready."""
        self._seqs.update(seqs)

    def cut(self, seqs: Items[Sequence], starts: Ints, ends: Ints) -> Ints:
        """Return the end positions of sequences in a step that skips the delayed ones.

        If no other sequence would compute anything, they take part, and the step waits for their masks.
        """
        if not self._seqs:
            return ends
        self._seqs &= {seq for seq, guide in self._guides.items() if seq.row >= 0 and guide.is_waiting}
        held = [i for i in range(len(ends)) if seqs[i] in self._seqs]
        without = ends.copy()
        without[held] = starts[held]
        return without if (without > starts).any() else ends
