"""Estimates of step times, learned from earlier steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gpu_node.engine.scheduler.budget import StepTime, StepWork
from penstock.gpu_node.engine.scheduler.preemption import SwapCost
from penstock.gpu_node.engine.speculative.cost import StepCost
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import StepResult

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import PreemptionName


class LearnedTimes:
    """The three models of step times: one each for prefill, swapping and drafts. Every computed step teaches them."""

    def __init__(self, preemption: PreemptionName, block_bytes: int, *, with_drafts: bool = False) -> None:
        """`with_drafts` says whether sequences may draft; otherwise the cost of drafts is not learned."""
        self.step_time = StepTime()
        self.swap_cost = SwapCost(preemption, block_bytes)
        self.draft_cost = StepCost()
        self._with_drafts = with_drafts

    def note_step(self, step: Step, result: StepResult, *, num_scored: int, whole_ms: float) -> None:
        """Learn from a step that scored `num_scored` prompt tokens.

        `whole_ms` is the time from the step's planning to its completion.
        """
        runner_ms = result.forward_ms + result.sample_ms
        self.swap_cost.note_copies(len(step.copies), result.copy_ms)
        self.swap_cost.note_forward(step.num_prefill_tokens, result.forward_ms)
        self.step_time.note(StepWork.of(step, num_scored), runner_ms)
        if self._with_drafts and not step.num_prefill_tokens:
            self.draft_cost.note(len(step.seqs), step.num_drafted, runner_ms, whole_ms - runner_ms)
