"""What the scheduler asks of drafts: tokens that a step computes behind the newest token of a sequence."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Step


class AcceptedDrafts(NamedTuple):
    """A step and its tokens, without the samples drawn after rejected drafted tokens."""

    step: Step
    tokens: Ints
    samples: Items[int]
    """The indices of the samples that are kept."""
    poisoned: list[Sequence]
    """Sequences with a rejected draft that wrote non-finite values to their blocks."""

    @classmethod
    def of(cls, step: Step, tokens: Ints, kept: list[int], poisoned: Items[Sequence] = ()) -> AcceptedDrafts:
        """Return what is left with the samples `kept`."""
        if len(kept) == len(tokens):
            return cls(step, tokens, range(len(tokens)), [])
        accepted = replace(
            step,
            sampled=step.sampled[kept],
            sampled_seqs=[step.sampled_seqs[i] for i in kept],
            sampled_rows=step.sampled_rows[kept],
            sampled_ends=step.sampled_ends[kept],
        )
        return cls(accepted, tokens[kept], kept, [seq for seq in poisoned if seq.row >= 0])


class Drafts:
    """Drafts no tokens. Those of an engine are in `speculative/drafts.py`."""

    num_drafted = num_accepted = 0
    num_written = 0
    """Drafted tokens that the next step may compute."""

    def write(self, max_step_tokens: int, *, only_foreground: bool = False) -> None:
        """Draft tokens for the sequences that decode, for a step of at most `max_step_tokens` tokens."""

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a sequence that ends."""

    def accept_drafts(self, step: Step, tokens: Ints, late: Collection[int] = ()) -> AcceptedDrafts:
        """Separate the accepted samples of a step from the rejected ones. Samples in `late` were not drawn."""
        if not late:
            return AcceptedDrafts(step, tokens, range(len(tokens)), [])
        return AcceptedDrafts.of(step, tokens, [i for i in range(len(tokens)) if i not in late])
