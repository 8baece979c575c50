"""Speculative decoding: compute probable next tokens together with the newest token of a sequence.

After each drafted token a token is sampled with the random number of its position, as without drafts. A draft is
accepted as far as it equals the sampled tokens, so the output is exactly the same as without drafts. (Leviathan et al.,
arXiv:2211.17192, accept at random; that keeps the distribution, not the tokens.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.drafts import AcceptedDrafts, Drafts
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.speculative.draft_cost import StepCost
from penstock.gpu_node.engine.speculative.drafter import Drafter, common_odds
from penstock.gpu_node.engine.steps import Ints, Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN, ModelRunner

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig

log = logging.getLogger(__package__)

_SEQS_PER_PAUSE = 4
"""Fewer sequences than this look for drafts at every step. This many look at every second step, twice as many at every
third.
"""


def speculation_of(config: EngineConfig, runner: ModelRunner) -> DraftBudget:
    """Create the draft budget for an engine's settings and runner."""
    if config.speculative == "off":
        return DraftBudget(0, StepCost())
    if not runner.verifies_drafts or runner.state_sizes.num_slots:
        reason = "this runner cannot verify drafts"
        if runner.state_sizes.num_slots:
            reason = "states of recurrent layers cannot forget a rejected draft"
        log.warning(f"speculative decoding is off: {reason}", extra={"speculative": config.speculative})
        return DraftBudget(0, StepCost())
    return DraftBudget(config.max_draft_tokens, StepCost())


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

    @property
    def note_decoding(self) -> Callable[[int, int, float, float], None] | None:
        """What learns the cost of drafts from each step that only decodes; None if no sequence drafts."""
        return self._cost.note if self.max_draft_tokens else None

    def drafts(self, batch: RunningBatch, memory: KvCacheManager, block_size: int) -> SpeculativeDrafts:
        """Return the drafts of the running sequences."""
        return SpeculativeDrafts(batch, memory, self, block_size)

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


class SpeculativeDrafts(Drafts):
    """Drafts tokens for running sequences before a step, and drops rejected ones after it."""

    def __init__(self, batch: RunningBatch, memory: KvCacheManager, speculation: DraftBudget, block_size: int) -> None:
        self._speculation = speculation
        self._num_writes = 0
        self._has_matches = False
        """Whether any sequence found a draft at the last look."""
        self._drafters: dict[Sequence, Drafter] = {}
        self._batch = batch
        self._table = batch.table
        self._memory = memory
        self._block_size = block_size

    def write(self, max_step_tokens: int, *, only_foreground: bool = False) -> None:
        """Draft tokens for the sequences that decode, for a step of at most `max_step_tokens` tokens.

        A sequence with a grammar drafts nothing, because its token mask is known for the newest token only. Drafts
        never take blocks that other sequences may need.
        """
        if not self._speculation.max_draft_tokens:
            return
        table, seqs, rows = self._table, self._batch.seqs, self._batch.rows
        if self.num_written:
            table.num_drafted[rows] = self.num_written = 0
        self._num_writes += 1
        all_look = self._num_writes % (1 + len(seqs) // _SEQS_PER_PAUSE) == 0
        if not all_look and not self._has_matches:
            return
        to_compute = table.num_tokens[rows] - table.num_computed[rows]
        drafting = to_compute == 1
        if only_foreground:
            drafting &= ~table.is_background[rows]
        decoding = drafting.nonzero()[0].tolist()
        max_drafted = (max_step_tokens - int(to_compute.sum())) // 2
        if max_drafted <= 0 or not decoding:
            return
        if needs := self._speculation.needs(len(decoding), max_drafted):
            self._choose([seqs[i] for i in decoding], needs, all_look=all_look)

    def _choose(self, decoding: list[Sequence], needs: list[float], *, all_look: bool) -> None:
        """Draft for the sequences where a draft saves time. Drafts that are too unlikely to do so are not computed.

        With more sequences a draft saves less and looking for drafts takes longer. So in most steps only sequences that
        found a draft last time look again.
        """
        min_odds = min(need / num for num, need in enumerate(needs, 1))
        found = []
        for seq in decoding:
            known = self._drafters.get(seq)
            if all_look or (known is not None and known.has_match):
                drafter = self._look(seq, known, min_odds)
                if drafter is not None:
                    found.append((seq, drafter))
        self._has_matches = bool(found)
        if not found:
            return
        limit = self._speculation.max_draft_tokens
        chances = [drafter.chances(min(self._max_draft(seq), limit)) for seq, drafter in found]
        for (seq, drafter), count in zip(found, self._speculation.choose(chances, needs), strict=True):
            if count:
                draft, end_ids = drafter.draft(count), seq.end_rule.end_ids
                # Nothing follows a token that would end the choice.
                end = next((at for at, token_id in enumerate(draft) if token_id in end_ids), len(draft))
                self.num_written += self._table.put_draft(seq, draft[:end])

    def _look(self, seq: Sequence, drafter: Drafter | None, min_odds: float) -> Drafter | None:
        """Look for a draft. Return the drafter if the first token is right with odds above `min_odds`."""
        if seq in self._table.guides or seq.beams is not None:
            return None
        if drafter is None:
            drafter = self._drafters[seq] = self._speculation.drafter(seq.max_num_tokens)
        return drafter if drafter.look(self._table.tokens_of(seq)[len(drafter.lookup) :], min_odds) else None

    def forget(self, seq: Sequence) -> None:
        """Drop the drafter of a sequence that ends."""
        self._drafters.pop(seq, None)

    def accept_drafts(self, step: Step, tokens: Ints, late: Collection[int] = ()) -> AcceptedDrafts:
        """Separate the accepted samples of a step from the rejected ones. Samples in `late` were not drawn."""
        if not step.num_drafted:
            return super().accept_drafts(step, tokens, late)
        kept, poisoned = self._check(step, tokens)
        self.num_drafted += step.num_drafted
        self.num_accepted += step.num_drafted - (len(tokens) - len(kept))
        return AcceptedDrafts.of(step, tokens, [i for i in kept if i not in late], poisoned)

    def _check(self, step: Step, tokens: Ints) -> tuple[list[int], list[Sequence]]:
        """Return the samples drawn after accepted tokens, and the sequences with other samples that are not finite."""
        kept, poisoned = [], []
        drawn, drafted, owners = tokens.tolist(), self._table.last_tokens(step).tolist(), step.sampled.tolist()
        is_accepted, previous = True, -1
        for i, owner in enumerate(owners):
            is_accepted = owner != previous or (is_accepted and drawn[i - 1] == drafted[i])
            previous = owner
            if is_accepted:
                kept.append(i)
            elif drawn[i] == FAILED_TOKEN and step.sampled_seqs[i] not in poisoned:
                poisoned.append(step.sampled_seqs[i])
        return kept, poisoned

    def _max_draft(self, seq: Sequence) -> int:
        """Return how many tokens a sequence may draft."""
        table, num_tokens = self._table, int(self._table.num_tokens[seq.row])
        limit = int(table.limit[seq.row]) - num_tokens - 1
        max_blocks = 2 + self._speculation.max_draft_tokens // self._block_size
        if self._memory.device.num_free < len(self._batch.seqs) * max_blocks:
            limit = min(limit, int(table.capacity[seq.row]) - num_tokens)
        return max(0, limit)
