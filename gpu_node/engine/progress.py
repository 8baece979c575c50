"""How far steps get those whom they serve: counted when a step is computed."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from penstock.gpu_node.engine.residents import Residents
from penstock.gpu_node.engine.rows import Ints, Step
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import FAILED_TOKEN


@dataclass(frozen=True, slots=True)
class Landed:
    """What a step gave: a token or FAILED_TOKEN for each of `seqs`, which may have been removed meanwhile.

    One whose draft stands is there as often as it got a token.
    """

    seqs: list[Sequence]
    token_ids: list[int]
    ended: set[Sequence]
    """Those that the scheduler let go, for their token ends them or was FAILED_TOKEN."""
    broken_blocks: list[int]
    """Blocks of failed sequences, held by nobody and known to nobody."""
    samples: Items[int]
    """Which of the step's samples these were."""


class Progress:
    """Counts steps in the rows."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._rows = residents.table

    def land(self, step: Step, tokens: Ints) -> list[int]:
        """Count a step that was computed; which of its samples end theirs.

        A FAILED_TOKEN does, and what its token or its length ends of those that are still here.
        """
        self._count(step, tokens)
        token_ids = tokens.tolist()
        return [i for i in self._may_end(step, token_ids) if self._ends(step, i, token_ids[i])]

    def _count(self, step: Step, tokens: Ints) -> None:
        # A removed sequence's row is written to as well: nobody has it before the next step is scheduled.
        self._rows.append(step.sampled_rows, step.sampled_ends, tokens)
        ends = step.ends
        if step.num_drafted:
            ends = np.minimum(ends, self._rows.num_tokens[step.rows] - 1)
        self._rows.num_computed[step.rows] = ends
        self._residents.start_forks()

    def _at_limit(self, step: Step) -> list[int]:
        found: list[int] = (step.sampled_ends + 1 >= self._rows.limit[step.sampled_rows]).nonzero()[0].tolist()
        return found

    def _may_end(self, step: Step, token_ids: list[int]) -> list[int]:
        """The samples that a look at all of them at once cannot clear."""
        end_ids = self._residents.end_ids
        if end_ids.isdisjoint(token_ids):
            return self._at_limit(step)
        return sorted({*self._at_limit(step), *(i for i, token_id in enumerate(token_ids) if token_id in end_ids)})

    def _ends(self, step: Step, i: int, token_id: int) -> bool:
        seq = step.sampled_seqs[i]
        if token_id == FAILED_TOKEN:
            return True
        num_output_tokens = int(step.sampled_ends[i]) + 1 - seq.num_prompt_tokens
        return seq.row >= 0 and seq.end_rule.reason(token_id, num_output_tokens) is not None
