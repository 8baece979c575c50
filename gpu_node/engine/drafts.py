"""Speculative decoding: tokens that sequences will probably say are computed together with their newest one.

Behind each of them a token is sampled as if they stood there, by the random number of its own place. A draft stands as
far as it is what was sampled, so a sequence says the very tokens that it would have said without. (Leviathan et al.,
arXiv:2211.17192, accept at random; that keeps the distribution, not the tokens.)
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.lookup import PromptLookup
from penstock.gpu_node.engine.memory import KvMemory
from penstock.gpu_node.engine.residents import Residents
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.speculation import Drafter, Speculation
from penstock.gpu_node.engine.steps import Ints, Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN


class Settled(NamedTuple):
    """A step and its tokens without what was sampled behind drafted tokens that do not stand."""

    step: Step
    tokens: Ints
    samples: Items[int]
    """Which samples those are."""
    poisoned: list[Sequence]
    """Those whose draft made values that are not finite, which now lie behind what they have computed."""


class Drafts:
    """Lets running sequences draft before a step, and takes back afterwards what does not stand."""

    def __init__(self, residents: Residents, memory: KvMemory, speculation: Speculation, block_size: int) -> None:
        self.speculation = speculation
        self.num_written = 0
        """Tokens that stand drafted behind those of the running sequences."""
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
        table, rows = self._table, self._residents.rows
        table.num_drafted[rows] = self.num_written = 0
        to_compute = table.num_tokens[rows] - table.num_computed[rows]
        decoding = (to_compute == 1).nonzero()[0]
        most = (max_step_tokens - int(to_compute.sum())) // 2
        if most <= 0 or not len(decoding):
            return
        least_odds = self.speculation.begin(len(decoding))
        on_trial = self.speculation.on_trial(len(decoding))
        for i in range(len(decoding)) if least_odds <= 1 else on_trial:
            seq = self._residents.seqs[decoding[i]]
            if seq.guide is not None:
                continue
            drafter = seq.drafter = seq.drafter or Drafter(PromptLookup(seq.max_num_tokens))
            if i in on_trial or self.speculation.pays(drafter, least_odds):
                self.num_written += self._draft(seq, drafter, most - self.num_written, least_odds)

    def _draft(self, seq: Sequence, drafter: Drafter, most: int, least_odds: float) -> int:
        """Have a sequence draft; how many tokens it did."""
        news = self._table.tokens_of(seq)[len(drafter.lookup) :]
        draft = self.speculation.draft(drafter, news, most, least_odds)
        return self._table.put_draft(seq, _up_to(seq.end_rule.end_ids, draft[: self._room(seq)])) if draft else 0

    def settle(self, step: Step, tokens: Ints) -> Settled:
        """Part what stands of a step's samples from what does not."""
        if not step.num_drafted:
            return Settled(step, tokens, range(len(tokens)), [])
        stands = self._stand(step, tokens)
        num_samples, num_standing = np.bincount(step.sampled), np.bincount(step.sampled[stands])
        for i in (num_samples > 1).nonzero()[0].tolist():
            drafter = step.seqs[i].drafter
            if drafter is not None:
                self.speculation.verified(drafter, int(num_samples[i]) - 1, int(num_standing[i]) - 1)
        poisoned = {step.sampled_seqs[i] for i in (~stands & (tokens == FAILED_TOKEN)).nonzero()[0].tolist()}
        kept = stands.nonzero()[0]
        standing = replace(
            step,
            sampled=step.sampled[kept],
            sampled_seqs=[step.sampled_seqs[i] for i in kept.tolist()],
            sampled_rows=step.sampled_rows[kept],
            sampled_ends=step.sampled_ends[kept],
        )
        return Settled(standing, tokens[kept], kept.tolist(), [seq for seq in poisoned if seq.row >= 0])

    def _stand(self, step: Step, tokens: Ints) -> NDArray[np.bool_]:
        """[num_samples]: whether all that a token was sampled behind is what was sampled itself."""
        firsts = np.searchsorted(step.sampled, step.sampled)
        is_behind_draft = np.arange(len(tokens)) > firsts
        num_wrong = np.cumsum(is_behind_draft & (np.roll(tokens, 1) != self._table.last_tokens(step)))
        stands: NDArray[np.bool_] = num_wrong == num_wrong[firsts]
        return stands

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
