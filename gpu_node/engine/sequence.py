"""One choice of one request as the scheduler sees it: its tokens, its blocks, when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.priority import Priority
from penstock.gpu_node.engine.kv_cache.block_pool import ROOT_HASH, block_hash
from penstock.gpu_node.engine.prompt_scores import PromptScores
from penstock.gpu_node.engine.speculative.drafter import Drafter
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.text.end_rule import EndRule
from penstock.gpu_node.model.protocol import NO_ADAPTER, NO_LOGPROBS, Adapter

if TYPE_CHECKING:
    from penstock.contract.job import SamplingParams

NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice in the making. How far it is while it runs, its row of the RowTable says."""

    request_id: str
    choice: int
    params: SamplingParams
    seed: int
    token_ids: NDArray[np.int32]
    """Prompt and output while it does not run; a running one's are in its row."""
    num_prompt_tokens: int
    end_rule: EndRule
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens that must not follow each other."""
    guide: Guide | None = None
    """Keeps its text to a form."""
    adapter: Adapter | None = None
    place: int = NO_ADAPTER
    """Where the runner has its adapter while it runs."""
    drafter: Drafter | None = None
    """Guesses what it says next, once that may pay."""
    prompt_scores: PromptScores | None = None
    """What its request wants to know of the prompt."""
    root_hash: bytes = ROOT_HASH
    """Parent of its first block's hash."""
    blocks: list[int] = field(default_factory=list)
    """Held while it runs or is swapped; those of a removed one are nobody's or others'."""
    spare: int | None = None
    """Block held for its own copy of the last one it shares, or for what follows that."""
    num_stored: int = 0
    """Tokens whose keys and values its blocks hold while it is swapped; its row says so of a running one."""
    forks: list[Sequence] = field(default_factory=list)
    """Choices of the same request that start when this one has computed their prompt."""
    forks_from: Sequence | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    row: int = -1
    """Row of the batch while running, else -1."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    tenant: str = "default"
    weight: float = 1.0
    """Its tenant's share of the cache beside other tenants'."""
    priority: int = int(Priority.STANDARD)
    """Its class; 0 is the most urgent one."""
    urgency: int = int(Priority.STANDARD)
    """The class that it was started as: its own, or a more urgent one when it had waited long."""
    submitted_ms: float = 0.0
    predicted_tokens: int = 0
    """Output that it will probably have."""
    charge: float = 0.0
    """KV-token-milliseconds ÷ weight that its tenant would be charged if it were started now."""
    kv_ms: float = 0.0
    """KV tokens that its blocks have room for × the milliseconds that it held them."""

    biased: NDArray[np.int32] = field(init=False)
    """Tokens whose logits are moved,"""
    biases: NDArray[np.float32] = field(init=False)
    """and by how much."""

    _end_ids: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self._end_ids = np.array(sorted(self.end_rule.end_ids), dtype=np.int32)
        bias = self.params.logit_bias
        self.biased = np.array([*bias], dtype=np.int32)
        self.biases = np.array([*bias.values()], dtype=np.float32)

    @property
    def job_id(self) -> str:
        """What policies order by where all else is equal."""
        return self.request_id

    @property
    def cost(self) -> int:
        """KV tokens that it will probably hold at its end."""
        return self.num_prompt_tokens + max(1, self.predicted_tokens)

    @property
    def max_num_tokens(self) -> int:
        """Length at which it ends, prompt included."""
        return self.num_prompt_tokens + self.end_rule.max_tokens

    @property
    def num_to_share(self) -> int:
        """Tokens that it can take over from whoever computed its prompt; its last token it computes itself."""
        return min(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def num_reusable(self) -> int:
        """Leading tokens that it need not compute where a cache has them.

        Behind the last token the next one is sampled, and behind those of a prompt it may have to be known how likely
        the next one was.
        """
        num_reusable = len(self.token_ids) - 1
        if self.prompt_scores is not None and not self.prompt_scores.is_complete:
            return min(num_reusable, self.prompt_scores.num_scored)
        return num_reusable

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens are wanted beside each of its own, or NO_LOGPROBS."""
        return NO_LOGPROBS if self.params.logprobs is None else self.params.logprobs

    @property
    def is_penalised(self) -> bool:
        """Whether what it said so far changes the odds of its next token."""
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_bans(self) -> bool:
        """Whether some tokens must not be chosen at times."""
        return self.end_rule.min_tokens > 0 or bool(self.bad_words)

    @property
    def looks_back(self) -> bool:
        """Whether the rules for its next token look at what it said last."""
        return self.is_penalised or bool(self.bad_words) or self.guide is not None

    def banned_ids(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids that the token behind all these must not be."""
        num_output_tokens = len(token_ids) - self.num_prompt_tokens
        banned = self._end_ids if num_output_tokens < self.end_rule.min_tokens else NO_TOKENS
        ends = [word[-1] for word in self.bad_words if _ends_with(token_ids, word[:-1])]
        return np.concatenate((banned, np.array(ends, dtype=np.int32))) if ends else banned

    def hash_full_blocks(self, token_ids: NDArray[np.int32], block_size: int) -> None:
        """Bring `block_hashes` up to the number of full blocks of its tokens."""
        for i in range(len(self.block_hashes), len(token_ids) // block_size):
            parent = self.block_hashes[-1] if i else self.root_hash
            self.block_hashes.append(block_hash(parent, token_ids[i * block_size : (i + 1) * block_size]))


def _ends_with(token_ids: NDArray[np.int32], tail: tuple[int, ...]) -> bool:
    return not tail or tuple(token_ids[-len(tail) :].tolist()) == tail
