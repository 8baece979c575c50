"""Who drafts how many tokens: as many as will probably stand often enough for what they cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from penstock.gpu_node.engine.speculative.drafter import Drafter, common_odds
from penstock.gpu_node.engine.speculative.step_cost import StepCost
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import ModelRunner, StepResult

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig

_log = logging.getLogger(__name__)


def speculation_of(config: EngineConfig, runner: ModelRunner) -> DraftBudget:
    """As an engine's settings and its runner have it."""
    if config.speculative == "off":
        return DraftBudget(0)
    if not runner.verifies_drafts:
        _log.warning("this runner verifies no drafts, so nobody drafts", extra={"speculative": config.speculative})
        return DraftBudget(0)
    return DraftBudget(config.max_draft_tokens)


class DraftBudget:
    """Weighs drafts, all of a step together.

    With R sequences that decode, a token that stands spares an R-th of a step. How many must stand is therefore known
    from what the rows cost; how many probably will, from how often such drafts were right.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        """0: nobody drafts."""
        self.max_draft_tokens = max_draft_tokens
        self.num_drafted = self.num_accepted = 0
        self._cost = StepCost()
        self._common = common_odds()

    def note_step(self, step: Step, result: StepResult, whole_ms: float) -> None:
        """A step was computed; planning, running and ending it took so long."""
        if self.max_draft_tokens and not step.num_prefill_tokens:
            step_ms = result.forward_ms + result.sample_ms
            self._cost.note(len(step.seqs), step.num_drafted, step_ms, whole_ms - step_ms)

    def drafter(self, max_num_tokens: int) -> Drafter:
        """For a sequence that gets so long at most."""
        return Drafter(max_num_tokens, self._common)

    def needs(self, num_decoding: int, most: int) -> list[float]:
        """How many of 1, 2, ... up to `most` drafted tokens must stand to pay; ends where none can."""
        return self._cost.needs(num_decoding, min(most, num_decoding * self.max_draft_tokens))

    def choose(self, chances: Items[Items[float]], needs: Items[float]) -> list[int]:
        """How many tokens each draft should have, given the chances that they stand: the likeliest of all drafts.

        As many together as gain most beyond what they need.
        """
        offers = sorted(((chance, i) for i, own in enumerate(chances) for chance in own), reverse=True)
        gain = best = 0.0
        num_chosen = 0
        for num, ((chance, _), need) in enumerate(zip(offers, needs, strict=False), 1):
            gain += chance
            if gain - need > best:
                best, num_chosen = gain - need, num
        counts = [0] * len(chances)
        for _, i in offers[:num_chosen]:
            counts[i] += 1
        return counts
