"""Speculative decoding: tokens that sequences will probably say are computed together with their newest one.

Behind each of them a token is sampled as if they stood there, by the random number of its own place. A draft stands as
far as it is what was sampled, so a sequence says the very tokens that it would have said without. (Leviathan et al.,
arXiv:2211.17192, accept at random; that keeps the distribution, not the tokens.)
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.speculative.budget import DraftBudget
from penstock.gpu_node.engine.speculative.drafter import Drafter
from penstock.gpu_node.engine.steps import Ints, Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN

_SEQS_PER_PAUSE = 4
"""One sequence looks for a draft at every step, so many at every second one, twice as many at every third."""


class AcceptedDrafts(NamedTuple):
    """A step and its tokens without what was sampled behind drafted tokens that do not stand."""

    step: Step
    tokens: Ints
    samples: Items[int]
    """Which samples those are."""
    poisoned: list[Sequence]
    """Those whose draft made values that are not finite, which now lie behind what they have computed."""


class Drafts:
    """Lets running sequences draft before a step, and takes back afterwards what does not stand."""

    def __init__(
        self, residents: RunningBatch, memory: KvCacheManager, speculation: DraftBudget, block_size: int
    ) -> None:
        self.speculation = speculation
        self.num_written = 0
        """Tokens that stand drafted behind those of the running sequences."""
        self._num_writes = 0
        self._has_hopes = False
        """Whether anybody found something at the last look."""
        self._residents = residents
        self._table = residents.table
        self._memory = memory
        self._block_size = block_size

    def write(self, max_step_tokens: int) -> None:
        """Put drafts behind the tokens of those that decode, for a step of so many tokens.

        One whose text keeps to a form drafts nothing: what may come next is only known for its newest token. Nobody
        drafts for blocks that others may need.
        """
        if not self.speculation.max_draft_tokens:
            return
        table, seqs, rows = self._table, self._residents.seqs, self._residents.rows
        if self.num_written:
            table.num_drafted[rows] = self.num_written = 0
        self._num_writes += 1
        all_look = self._num_writes % (1 + len(seqs) // _SEQS_PER_PAUSE) == 0
        if not all_look and not self._has_hopes:
            return
        to_compute = table.num_tokens[rows] - table.num_computed[rows]
        decoding = (to_compute == 1).nonzero()[0].tolist()
        most = (max_step_tokens - int(to_compute.sum())) // 2
        if most <= 0 or not decoding:
            return
        if needs := self.speculation.needs(len(decoding), most):
            self._choose([seqs[i] for i in decoding], needs, all_look=all_look)

    def _choose(self, decoding: list[Sequence], needs: list[float], *, all_look: bool) -> None:
        """Have those draft whose drafts pay; where even the likeliest tokens would not, no more is worked out.

        The more there are, the less a token spares and the longer it takes to look: where not all look, those do that
        found something the last time.
        """
        least = min(need / num for num, need in enumerate(needs, 1))
        found = []
        for seq in decoding:
            if all_look or (seq.drafter is not None and seq.drafter.has_hopes):
                drafter = self._look(seq, least)
                if drafter is not None:
                    found.append((seq, drafter))
        self._has_hopes = bool(found)
        if not found:
            return
        most = self.speculation.max_draft_tokens
        chances = [drafter.chances(min(self._room(seq), most)) for seq, drafter in found]
        for (seq, drafter), count in zip(found, self.speculation.choose(chances, needs), strict=True):
            if count:
                draft = _up_to(seq.end_rule.end_ids, drafter.draft(count))
                self.num_written += self._table.put_draft(seq, draft)

    def _look(self, seq: Sequence, least: float) -> Drafter | None:
        """Have a sequence look for a draft; its drafter if the first token of that stands by at least such odds."""
        if seq.guide is not None:
            return None
        drafter = seq.drafter
        if drafter is None:
            drafter = seq.drafter = self.speculation.drafter(seq.max_num_tokens)
        return drafter if drafter.look(self._table.tokens_of(seq)[len(drafter.lookup) :], least) else None

    def settle(self, step: Step, tokens: Ints, late: Collection[int] = ()) -> AcceptedDrafts:
        """Part what stands of a step's samples from what does not; the `late` ones were not drawn."""
        if not step.num_drafted and not late:
            return AcceptedDrafts(step, tokens, range(len(tokens)), [])
        kept, poisoned = self._stand(step, tokens)
        self.speculation.num_drafted += step.num_drafted
        self.speculation.num_accepted += step.num_drafted - (len(tokens) - len(kept))
        kept = [i for i in kept if i not in late]
        if len(kept) == len(tokens):
            return AcceptedDrafts(step, tokens, range(len(tokens)), [])
        standing = replace(
            step,
            sampled=step.sampled[kept],
            sampled_seqs=[step.sampled_seqs[i] for i in kept],
            sampled_rows=step.sampled_rows[kept],
            sampled_ends=step.sampled_ends[kept],
        )
        return AcceptedDrafts(standing, tokens[kept], kept, [seq for seq in poisoned if seq.row >= 0])

    def _stand(self, step: Step, tokens: Ints) -> tuple[list[int], list[Sequence]]:
        """The samples of a step behind what was sampled itself, and whose others are not finite."""
        kept, poisoned = [], []
        drawn, behind, owners = tokens.tolist(), self._table.last_tokens(step).tolist(), step.sampled.tolist()
        stands, before = True, -1
        for i, owner in enumerate(owners):
            stands = owner != before or (stands and drawn[i - 1] == behind[i])
            before = owner
            if stands:
                kept.append(i)
            elif drawn[i] == FAILED_TOKEN and step.sampled_seqs[i] not in poisoned:
                poisoned.append(step.sampled_seqs[i])
        return kept, poisoned

    def _room(self, seq: Sequence) -> int:
        """How many tokens a sequence may draft."""
        table, num_tokens = self._table, int(self._table.num_tokens[seq.row])
        room = int(table.limit[seq.row]) - num_tokens - 1
        most_blocks = 2 + self.speculation.max_draft_tokens // self._block_size
        if self._memory.device.num_free < len(self._residents.seqs) * most_blocks:
            room = min(room, int(table.capacity[seq.row]) - num_tokens)
        return max(0, room)


def _up_to(end_ids: frozenset[int], draft: list[int]) -> list[int]:
    """A draft up to what would end a choice: nothing is said behind that."""
    at = next((at for at, token_id in enumerate(draft) if token_id in end_ids), len(draft))
    return draft[:at]
