"""One choice of one request as the scheduler sees it: its tokens, its blocks, how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.blocks import ROOT_HASH, block_hash

NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """A choice in the making. 0 <= num_computed < num_tokens <= len(token_ids) while it is scheduled."""

    request_id: str
    choice: int
    params: SamplingParams
    seed: int
    token_ids: NDArray[np.int32]
    """Prompt and output, with room to grow; num_tokens of it are valid."""
    num_prompt_tokens: int
    num_tokens: int
    max_num_tokens: int
    """Length at which it ends, prompt included."""
    end_ids: NDArray[np.int32]
    """Ids that end it and are banned below `min_tokens`."""
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    """Leading blocks offered to the prefix cache; <= len(block_hashes)."""
    row: int = -1
    """Row of the batch while running, else -1."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return self.num_tokens - self.num_computed

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        if self.num_tokens == len(self.token_ids):
            self.token_ids = np.concatenate((self.token_ids, np.zeros_like(self.token_ids)))
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def hash_full_blocks(self, block_size: int) -> None:
        """Bring `block_hashes` up to the number of full blocks of tokens."""
        for i in range(len(self.block_hashes), self.num_tokens // block_size):
            parent = self.block_hashes[-1] if i else ROOT_HASH
            self.block_hashes.append(block_hash(parent, self.token_ids[i * block_size : (i + 1) * block_size]))

    @property
    def banned_ids(self) -> NDArray[np.int32]:
        """Ids that the next token must not be."""
        return self.end_ids if self.num_output_tokens < self.params.min_tokens else NO_TOKENS

    @property
    def penalised_ids(self) -> NDArray[np.int32]:
        """Tokens that the repetition penalty counts: prompt and output."""
        return NO_TOKENS if self.params.repetition_penalty == 1.0 else self.token_ids[: self.num_tokens]
