"""Record the progress of sequences when a step completes, or before that to plan the next one."""

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
    """The result of a step: a token or FAILED_TOKEN for each of `seqs`, which may have been removed meanwhile.

    A sequence with an accepted draft is listed once for each token that it got.
    """

    seqs: list[Sequence]
    token_ids: list[int]
    samples: Items[int]
    """The index of each among the step's samples."""
    ended: set[Sequence] = field(default_factory=set)
    """Sequences that the scheduler removed, because their token ends them or is FAILED_TOKEN."""
    faulty: Sequence | None = None
    """A sequence to drop because its steps are too slow."""


class StepProgress:
    """Counts each step when it completes, or one step before that, so that the next one can be planned.

    The samples of a step that still runs are unknown. Until it completes, -1 - i stands for its i-th sample; runners
    know this notation. A sequence that reaches its limit with such a token keeps its row and blocks, and computes no
    more.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self.assumed: Step | None = None
        """The step that is counted but not computed yet."""
        self._batch = batch
        self._table = batch.table

    def assume(self, step: Step) -> None:
        """Count a step that still runs."""
        if self.assumed is not None:
            raise InvariantError("a step is planned two steps ahead of what is computed")
        self._count(step, -1 - np.arange(len(step.sampled), dtype=np.int32))
        self.assumed = step
        for i in self._at_limit(step):
            if step.sampled_seqs[i].row >= 0:
                self._batch.await_last_token(step.sampled_seqs[i])

    def complete(self, step: Step, tokens: Ints) -> list[int]:
        """Count a computed step, or write the tokens of one counted before. Return the samples that end their sequence.

        A sample ends its sequence by FAILED_TOKEN, by an end token or by the length limit.
        """
        if self.assumed is step:
            self.assumed = None
            here = self._present_samples(step)
            self._table.set_tokens(step.sampled_rows[here], step.sampled_ends[here], tokens[here])
        else:
            self._count(step, tokens)
        token_ids = tokens.tolist()
        return [i for i in self._may_end(step, token_ids) if self._ends(step, i, token_ids[i])]

    def revert(self) -> bool:
        """Drop the expected tokens of a failed step that was counted. Return whether there was one."""
        step, self.assumed = self.assumed, None
        if step is not None:
            self._table.num_tokens[step.sampled_rows[self._present_samples(step)]] -= 1
        return step is not None

    def _count(self, step: Step, tokens: Ints) -> None:
        # A removed sequence's row is written as well: no sequence gets that row before the next step is scheduled.
        self._table.append(step.sampled_rows, step.sampled_ends, tokens)
        # At least one token stays uncomputed: its computation yields the next token.
        self._table.num_computed[step.rows] = np.minimum(step.ends, self._table.num_tokens[step.rows] - 1)
        self._batch.start_forks()

    def _present_samples(self, step: Step) -> list[int]:
        """Return the samples of sequences that still have their row; other sequences may have the rows of the rest."""
        return [i for i, seq in enumerate(step.sampled_seqs) if seq.row >= 0]

    def _at_limit(self, step: Step) -> list[int]:
        found: list[int] = (step.sampled_ends + 1 >= self._table.limit[step.sampled_rows]).nonzero()[0].tolist()
        return found

    def _may_end(self, step: Step, token_ids: list[int]) -> list[int]:
        """Return the samples that may end their sequence, by a check of all tokens at once."""
        end_ids = self._batch.end_ids
        if end_ids.isdisjoint(token_ids):
            return self._at_limit(step)
        return sorted({*self._at_limit(step), *(i for i, token_id in enumerate(token_ids) if token_id in end_ids)})

    def _ends(self, step: Step, i: int, token_id: int) -> bool:
        seq = step.sampled_seqs[i]
        if token_id == FAILED_TOKEN:
            return True
        num_output_tokens = int(step.sampled_ends[i]) + 1 - seq.num_prompt_tokens
        return seq.row >= 0 and seq.end_rule.reason(token_id, num_output_tokens) is not None
