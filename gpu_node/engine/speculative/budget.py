"""Decide how many tokens each sequence drafts: as many as will probably be accepted often enough for their cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from penstock.gpu_node.engine.speculative.drafter import Drafter, common_odds
from penstock.gpu_node.engine.speculative.step_cost import StepCost
from penstock.gpu_node.model.protocol import ModelRunner

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig

_log = logging.getLogger(__name__)


def speculation_of(config: EngineConfig, runner: ModelRunner, cost: StepCost) -> DraftBudget:
    """Create the draft budget for an engine's settings and runner; `cost` is what drafts are known to cost."""
    if config.speculative == "off":
        return DraftBudget(0, cost)
    if not runner.verifies_drafts:
        _log.warning(
            "speculative decoding is off: this runner cannot verify drafts", extra={"speculative": config.speculative}
        )
        return DraftBudget(0, cost)
    return DraftBudget(config.max_draft_tokens, cost)


class DraftBudget:
    """Weighs the drafts of all sequences in a step together.

    With R decoding sequences, an accepted token saves an R-th of a step. The cost of rows therefore gives the number of
    tokens that must be accepted. The success of earlier drafts predicts how many will be.
    """

    def __init__(self, max_draft_tokens: int, cost: StepCost) -> None:
        """With 0 tokens, no sequence drafts."""
        self.max_draft_tokens = max_draft_tokens
        self._cost = cost
        self._common = common_odds()

    def drafter(self, max_num_tokens: int) -> Drafter:
        """Create a drafter for a sequence of at most `max_num_tokens` tokens."""
        return Drafter(max_num_tokens, self._common)

    def needs(self, num_decoding: int, max_drafted: int) -> list[float]:
        """Return how many of 1, 2, …, `max_drafted` drafted tokens must be accepted to pay; ends where none can."""
        return self._cost.needs(num_decoding, min(max_drafted, num_decoding * self.max_draft_tokens))

    def choose(self, chances: Items[Items[float]], needs: Items[float]) -> list[int]:
        """Return how many tokens each sequence should draft, given the chance of each token to be accepted.

        It takes the likeliest tokens of all drafts, in the number with the largest expected gain over `needs`.
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
