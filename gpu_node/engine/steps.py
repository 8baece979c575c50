"""One step: who computes what in it, and behind which tokens it samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.sequence import Sequence

Ints = NDArray[np.int32]
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Step:
    """Who computes what in a step: `seqs[i]` its tokens, and drafted ones, from starts[i] to ends[i]."""

    seqs: list[Sequence]
    rows: Rows
    starts: Ints
    ends: Ints
    sampled: Ints
    """Which of `seqs` sample, ascending; one with drafted tokens behind each of those as well."""
    sampled_seqs: list[Sequence]
    sampled_rows: Rows
    sampled_ends: Ints
    """How many tokens each sample is drawn behind."""
    num_prefill_tokens: int
    """Tokens computed for sequences that lacked more than their newest one."""
    num_drafted: int
    """Tokens computed that may not stand."""
    named_blocks: list[int]
    """Blocks that this step fills and that the prefix cache already knows."""
    copies: Ints
    """[num_copies, 2]: what is copied from block to block before all that."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return int((self.ends - self.starts).sum())

    @property
    def num_tokens_running(self) -> int:
        """Tokens that are computed for those who still run."""
        counts = (self.ends - self.starts).tolist()
        return sum(count for seq, count in zip(self.seqs, counts, strict=True) if seq.row >= 0)


def step_of(
    seqs: list[Sequence],
    rows: Rows,
    starts: Ints,
    ends: Ints,
    num_tokens: Ints,
    *,
    named_blocks: list[int],
    copies: Ints,
) -> Step:
    """The step in which sequences of so many tokens get from starts to ends; those that reach their end sample.

    What lies behind that was drafted, and each token of it is sampled behind as well.
    """
    if not (ends > starts).all():
        at = (ends > starts).nonzero()[0]
        seqs, rows, starts, ends, num_tokens = [seqs[i] for i in at], rows[at], starts[at], ends[at], num_tokens[at]
    num_drafted = np.maximum(ends - num_tokens, 0)
    sampled = (ends >= num_tokens).nonzero()[0]
    sampled_rows, sampled_ends, sampled_seqs = rows, ends, seqs
    if total_drafted := int(num_drafted.sum()):
        sampled = np.repeat(sampled, num_drafted[sampled] + 1)
        firsts = np.searchsorted(sampled, sampled)
        sampled_ends = num_tokens[sampled] + (np.arange(len(sampled)) - firsts).astype(np.int32)
        sampled_rows, sampled_seqs = rows[sampled], [seqs[i] for i in sampled.tolist()]
    elif len(sampled) < len(seqs):
        sampled_rows, sampled_ends, sampled_seqs = rows[sampled], ends[sampled], [seqs[i] for i in sampled]
    return Step(
        seqs=seqs,
        rows=rows,
        starts=starts,
        ends=ends,
        sampled=sampled.astype(np.int32),
        sampled_seqs=sampled_seqs,
        sampled_rows=sampled_rows,
        sampled_ends=sampled_ends,
        num_prefill_tokens=int((ends - starts)[num_tokens - starts > 1].sum()),
        num_drafted=total_drafted,
        named_blocks=named_blocks,
        copies=copies,
    )
