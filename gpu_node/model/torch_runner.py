"""A model runner in plain torch: the one that runs everywhere and that the others are measured against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from penstock.gpu_node.model.attention import KvCache, PagedAttention
from penstock.gpu_node.model.decoder import Decoder
from penstock.gpu_node.model.protocol import StepPlan, StepResult
from penstock.gpu_node.model.sampler import sample
from penstock.gpu_node.model.spec import ModelSpec


class TorchRunner:
    """Runs each step on a thread of its own; torch's operations let go of the GIL."""

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
        # The only thread that computes: each that did would keep a team of OpenMP threads as large as this one's.
        self._thread = ThreadPoolExecutor(1, "penstock-torch")

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the null block included."""
        return self._num_blocks

    def bind_thread(self) -> None:
        """Nothing to do: steps run on a thread of their own."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step."""
        return self._thread.submit(self._step, plan)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        self._thread.submit(self._zero, list(block_ids)).result()

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        started_s = time.perf_counter()
        logits = self._decoder.logits(plan, self._caches, self._attention)
        computed_s = time.perf_counter()
        tokens = sample(logits, plan.sampling) if len(logits) else np.empty(0, dtype=np.int32)
        sampled_s = time.perf_counter()
        return StepResult(tokens, (computed_s - started_s) * 1e3, (sampled_s - computed_s) * 1e3)

    @torch.inference_mode()
    def _zero(self, block_ids: list[int]) -> None:
        for cache in self._caches:
            cache.zero(block_ids)
