"""One choice of a request as the scheduler sees it: tokens, blocks with hashes, end rule, and results of its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.contract.priority import Priority, level_of
from penstock.gpu_node.engine.text.output import NO_BAD_WORDS, BadWords, EndRule
from penstock.gpu_node.engine.text.reasoning import NEVER, ReasoningState
from penstock.gpu_node.model.protocol import NO_ADAPTER, NO_LOGPROBS, Adapter, Logprobs

if TYPE_CHECKING:
    from penstock.contract.job import SamplingParams
    from penstock.contract.output import TokenLogprobs
    from penstock.contract.tasks import Pooling


class PromptResults:
    """What a request wants of its prompt's tokens, besides their keys and values: scores or an embedding.

    A token whose result is known stays known. 0 <= next_token <= end: the next token whose result is wanted, and the
    end of these tokens.
    """

    def __init__(self, next_token: int, end: int) -> None:
        self.next_token = next_token
        self.end = end

    @property
    def is_complete(self) -> bool:
        """Whether the results of all wanted tokens are known."""
        return self.next_token == self.end

    def take(self, first: int, num_rows: int) -> int:
        """Count the results of tokens from `first` on. Return how many of them were known already."""
        num_known = self.next_token - first
        if num_known < 0:
            raise InvariantError(f"results start at prompt token {first}, but token {self.next_token} is next")
        self.next_token = max(self.next_token, first + num_rows)
        return num_known


class PromptScores(PromptResults):
    """Scores of one request's prompt, shared by its choices: the log-probability of each token's next one."""

    def __init__(self, prompt: Items[int], num_logprobs: int) -> None:
        super().__init__(0, len(prompt) - 1)
        self.prompt = np.array(prompt, dtype=np.int32)
        self.num_logprobs = num_logprobs
        self.parts: list[Logprobs] = []
        """Rows of the newest step, not yet converted to `records`."""
        self.records: list[TokenLogprobs] = []

    def add(self, first: int, rows: Logprobs) -> None:
        """Add the rows for tokens from `first` on; rows that are known already are skipped."""
        num_known = self.take(first, len(rows.values))
        self.parts.append(Logprobs(rows.token_ids[num_known:], rows.values[num_known:]))


_ROWS_AT_ONCE = 256
"""Hidden states that are converted to float64 at once."""


class PooledPrompt(PromptResults):
    """Pools the hidden states of one request's prompt to one vector."""

    def __init__(self, num_tokens: int, pooling: Pooling, dimensions: int | None = None) -> None:
        """`dimensions`: those of the vector that are kept; None: all."""
        super().__init__(num_tokens - 1 if pooling == "last" else 0, 1 if pooling == "cls" else num_tokens)
        self._dimensions = dimensions
        self._sum: NDArray[np.float64] | None = None

    def add(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add the hidden states of tokens from `first` on; those that are pooled already are skipped.

        rows: [num_tokens, hidden_size]
        """
        for start in range(self.take(first, len(rows)), len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE].astype(np.float64)
            # numpy adds rows one by one, so the sum does not depend on how steps and parts cut the prompt.
            self._sum = (part if self._sum is None else np.vstack((self._sum, part))).sum(axis=0)

    def sums(self) -> NDArray[np.float64]:
        """Return the sum of the pooled hidden states, [hidden_size]."""
        if self._sum is None or not self.is_complete:
            raise InvariantError(f"token {self.next_token} of a prompt is not pooled yet")
        return self._sum

    def vector(self) -> NDArray[np.float32] | None:
        """Return the vector of length 1; None if the model computed NaN, infinity or only zeros.

        The mean and the sum have the same direction, so the sum is not divided.
        """
        kept = self.sums()[: self._dimensions]
        length = float(np.sqrt(np.sum(kept * kept)))
        return (kept / length).astype("<f4") if 0 < length < np.inf else None


NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


ROOT_HASH = b""


def block_hash(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """Return the hash of a full block and, through `parent`, of all tokens before it. Equal in all processes."""
    return hashlib.blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


def salted_root(*salts: str | None) -> bytes:
    """Return the parent hash of first blocks; prompts with different lists of salts never share one."""
    if not any(salt is not None for salt in salts):
        return ROOT_HASH
    # repr quotes and separates: ("a", "bc") and ("ab", "c") differ, and so do None and "None".
    return hashlib.blake2b(repr(salts).encode(), digest_size=16, person=b"salt").digest()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice while it is generated. While it runs, its row of the InputBatch holds its tokens and its progress."""

    request_id: str
    choice: int
    params: SamplingParams
    seed: int
    token_ids: NDArray[np.int32]
    """Prompt and output while it does not run. While it runs, they are in its row."""
    num_prompt_tokens: int
    end_rule: EndRule
    bad_words: BadWords = NO_BAD_WORDS
    reasoning: ReasoningState | None = None
    """The state of its reasoning if a budget limits it. It knows the tokens up to the last step that asked for it."""
    adapter: Adapter | None = None
    adapter_slot: int = NO_ADAPTER
    """The runner's slot that holds its adapter while it runs."""
    prompt_results: PromptResults | None = None
    """The prompt's log-probabilities or its embedding, if its request asks for them."""
    root_hash: bytes = ROOT_HASH
    """Parent of its first block's hash."""
    blocks: list[int] = field(default_factory=list)
    """Blocks held while it runs or is swapped. After it is removed, the list is stale."""
    spare: int | None = None
    """A block held for its copy of the last shared block, or for the tokens after that block."""
    num_stored: int = 0
    """Tokens with keys and values in its blocks while it is swapped. While it runs, its row counts them."""
    forks: list[Sequence] = field(default_factory=list)
    """Choices of the same request that start once this one has computed their prompt."""
    forks_from: Sequence | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    row: int = -1
    """The sequence's row in the InputBatch while it runs, else -1."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""
    tenant: str = "default"
    weight: float = 1.0
    """The tenant's weight under the policy `fair`."""
    level: int = int(Priority.STANDARD)
    """The level that its job counts as; 0 is the most urgent."""
    urgency: int = int(Priority.STANDARD)
    """The level that it was started as: its own, or a more urgent one after a long wait."""
    background: bool = False
    """Whether no caller waits for it."""
    priority: int = int(Priority.STANDARD)
    """The class of its job, however long that waited."""
    is_protected: bool = False
    """Whether it is background work that foreground sequences may not displace now."""
    submitted_ms: float = 0.0
    predicted_tokens: int = 0
    """Predicted number of output tokens."""
    remaining_tokens: int = 0
    """Predicted number of output tokens that it still lacked when it was last queued."""
    charge: float = 0.0
    """KV-token-milliseconds ÷ weight that its tenant would be charged if it started now."""
    kv_token_ms: float = 0.0
    """KV-token-milliseconds so far: the capacity of its blocks in tokens × the milliseconds that it held them."""
    num_preemptions: int = 0
    """How often its blocks were taken while it ran."""
    num_resumed: int = 0
    """Output tokens that earlier nodes generated."""

    beams: list[Sequence] | None = None
    """All sequences of its beam search, itself included. They start, branch and yield together."""
    is_parked: bool = False
    """Whether it is a beam that has computed its newest token, and waits for the other beams of its search."""
    ranking_logprobs: int = NO_LOGPROBS
    """How many of the likeliest tokens its request needs beside each of its own, to rank choices; or NO_LOGPROBS."""

    num_common: int = field(init=False)
    """Leading tokens that all sequences of its request have: the prompt, or more in a beam search that starts again."""
    job_level: int = field(init=False)
    """The level of its job, by `priority` and `background`. The time of its steps counts there."""
    biased: NDArray[np.int32] = field(init=False)
    """Tokens with a logit bias."""
    biases: NDArray[np.float32] = field(init=False)
    """The bias of each of them."""

    end_ids: NDArray[np.int32] = field(init=False)
    """Tokens that end it."""

    def __post_init__(self) -> None:
        self.num_common = self.num_prompt_tokens
        self.job_level = level_of(Priority(self.priority), self.background)
        self.end_ids = np.array(sorted(self.end_rule.end_ids), dtype=np.int32)
        bias = self.params.logit_bias
        self.biased = np.array([*bias], dtype=np.int32)
        self.biases = np.array([*bias.values()], dtype=np.float32)

    @property
    def job_id(self) -> str:
        """The key by which policies order sequences that are otherwise equal."""
        return self.request_id

    @property
    def cost(self) -> int:
        """KV tokens that it is expected to hold at its end."""
        return self.num_prompt_tokens + max(1, self.predicted_tokens)

    @property
    def remaining_cost(self) -> int:
        """KV tokens that it is expected to hold at its end, without the output tokens that it had when it was queued.

        Preempted sequences compute these again, but as part of a prompt, which takes a fraction of the time.
        """
        return self.num_prompt_tokens + max(1, self.remaining_tokens)

    @property
    def max_num_tokens(self) -> int:
        """Length at which it ends, prompt included."""
        return self.num_prompt_tokens + self.end_rule.max_tokens

    @property
    def num_to_share(self) -> int:
        """Tokens that it can share with the sequence that computed its prompt. It computes its last token itself."""
        return min(self.num_common, len(self.token_ids) - 1)

    @property
    def num_reusable(self) -> int:
        """Leading tokens that need not be computed where the prefix cache has them.

        The last token is always computed, because the next one is sampled from its logits. Prompt tokens are computed
        too while their log-probabilities, or their part of an embedding, are still missing.
        """
        results, num_reusable = self.prompt_results, len(self.token_ids) - 1
        return num_reusable if results is None or results.is_complete else min(num_reusable, results.next_token)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens are wanted and still missing."""
        return isinstance(self.prompt_results, PromptScores) and not self.prompt_results.is_complete

    @property
    def num_logprobs(self) -> int:
        """How many of the likeliest tokens to compute beside each of its own, or NO_LOGPROBS."""
        wanted = NO_LOGPROBS if self.params.logprobs is None else self.params.logprobs
        return max(wanted, self.ranking_logprobs)

    @property
    def is_penalized(self) -> bool:
        """Whether a repetition, presence or frequency penalty applies."""
        params = self.params
        return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def has_bans(self) -> bool:
        """Whether `min_tokens` or `bad_words` may forbid tokens."""
        return self.end_rule.min_tokens > 0 or bool(self.bad_words)

    @property
    def limited_from(self) -> int:
        """The length from which on a budget may force its next token, prompt included."""
        state = self.reasoning
        return NEVER if state is None or state.is_over else self.num_prompt_tokens + state.first_limited

    @property
    def looks_back(self) -> bool:
        """Whether penalties, bad words or other beams make its next token depend on its newest one."""
        return self.is_penalized or bool(self.bad_words) or self.beams is not None

    def banned_ids(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids that must not follow these tokens."""
        num_output_tokens = len(token_ids) - self.num_prompt_tokens
        banned = self.end_ids if num_output_tokens < self.end_rule.min_tokens else NO_TOKENS
        ends = self.bad_words.banned_after(token_ids) if self.bad_words else ()
        return np.concatenate((banned, np.array(ends, dtype=np.int32))) if ends else banned

    def hash_full_blocks(self, token_ids: NDArray[np.int32], block_size: int) -> None:
        """Extend `block_hashes` to all full blocks of `token_ids`."""
        for i in range(len(self.block_hashes), len(token_ids) // block_size):
            parent = self.block_hashes[-1] if i else self.root_hash
            self.block_hashes.append(block_hash(parent, token_ids[i * block_size : (i + 1) * block_size]))
