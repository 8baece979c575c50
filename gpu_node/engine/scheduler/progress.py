"""How far steps get those whom they serve: counted when a step is computed, or ahead of that, its tokens to come."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN


@dataclass(slots=True)
class StepOutcome:
    """What a step gave: a token or FAILED_TOKEN for each of `seqs`, which may have been removed meanwhile.

    One whose draft stands is there as often as it got a token.
    """

    seqs: list[Sequence]
    token_ids: list[int]
    samples: Items[int]
    """Which of the step's samples they are."""
    ended: set[Sequence] = field(default_factory=set)
    """Those that the scheduler let go, for their token ends them or was FAILED_TOKEN."""
    broken_blocks: list[int] = field(default_factory=list)
    """Blocks of failed sequences, held by nobody and known to nobody."""
    faulty: Sequence | None = None
    """A sequence to drop because the steps with it are too slow."""


class StepProgress:
    """Counts steps in the rows: each as it lands, or one before that, so that the step behind it can be planned.

    What such a step samples is unknown: for its i-th token stands -1 - i, as runners know it, until it lands. Whoever
    that token brings to its limit retires: it keeps row and blocks, and computes no more.
    """

    def __init__(self, residents: RunningBatch) -> None:
        self.assumed: Step | None = None
        """The step that was counted and is not computed yet."""
        self._residents = residents
        self._rows = residents.table

    def assume(self, step: Step) -> None:
        """Count a step that still runs."""
        if self.assumed is not None:
            raise InvariantError("a step is planned two steps ahead of what is computed")
        self._count(step, -1 - np.arange(len(step.sampled), dtype=np.int32))
        self.assumed = step
        for i in self._at_limit(step):
            if step.sampled_seqs[i].row >= 0:
                self._residents.retire(step.sampled_seqs[i])

    def land(self, step: Step, tokens: Ints) -> list[int]:
        """Count a step that was computed, or enter the tokens of one that was assumed to be; which samples end theirs.

        A FAILED_TOKEN does, and what its token or its length ends of those that are still here.
        """
        if self.assumed is step:
            self.assumed = None
            here = self._here(step)
            self._rows.set_tokens(step.sampled_rows[here], step.sampled_ends[here], tokens[here])
        else:
            self._count(step, tokens)
        token_ids = tokens.tolist()
        return [i for i in self._may_end(step, token_ids) if self._ends(step, i, token_ids[i])]

    def take_back(self) -> bool:
        """Forget the tokens that were to come of a step that failed; whether there were any to be."""
        step, self.assumed = self.assumed, None
        if step is not None:
            self._rows.num_tokens[step.sampled_rows[self._here(step)]] -= 1
        return step is not None

    def _count(self, step: Step, tokens: Ints) -> None:
        # A removed sequence's row is written to as well: nobody has it before the next step is scheduled.
        self._rows.append(step.sampled_rows, step.sampled_ends, tokens)
        # Behind what is computed stands at least one token, whose computation says what comes next.
        self._rows.num_computed[step.rows] = np.minimum(step.ends, self._rows.num_tokens[step.rows] - 1)
        self._residents.start_forks()

    def _here(self, step: Step) -> list[int]:
        """The samples whose sequences are not gone; others may have the rows of those that are."""
        return [i for i, seq in enumerate(step.sampled_seqs) if seq.row >= 0]

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
