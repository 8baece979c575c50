"""A model runner in plain torch: the one that runs everywhere and that the others are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.gpu_node.model.attention import KvCache, PagedAttention
from penstock.gpu_node.model.decoder import Decoder
from penstock.gpu_node.model.protocol import StepPlan
from penstock.gpu_node.model.sampler import sample
from penstock.gpu_node.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Done:
    tokens: NDArray[np.int32]

    def result(self) -> NDArray[np.int32]:
        return self.tokens


class TorchRunner:
    """Runs each step on the calling thread before `submit` returns; torch's operations let go of the GIL."""

    def __init__(
        self, spec: ModelSpec, decoder: Decoder, *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """`num_blocks` includes the null block."""
        self._num_blocks = num_blocks
        self._decoder = decoder
        self._attention = PagedAttention(spec.num_kv_heads, num_blocks, block_size, dtype)
        self._caches = [
            KvCache(spec.num_kv_heads, num_blocks, block_size, spec.head_dim, dtype) for _ in range(spec.num_layers)
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the null block included."""
        return self._num_blocks

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> _Done:
        """Run a step."""
        logits = self._decoder.logits(plan, self._caches, self._attention)
        return _Done(sample(logits, plan.sampling) if len(logits) else np.empty(0, dtype=np.int32))

    @torch.inference_mode()
    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        for cache in self._caches:
            cache.zero(list(block_ids))
