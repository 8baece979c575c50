"""The model runner over a module of transformers, on the CPU."""

from __future__ import annotations

import time
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import Adapter, CacheSizes, Placement, StateSizes, StepPlan, StepResult
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.one_thread import OneThreadRunner
from penstock.gpu_node.model.torch_common.sampler import logprobs_of, sample_rows, to_numpy
from penstock.gpu_node.model.torch_cpu.attention import copy_blocks
from penstock.gpu_node.model.transformers_runner.packed import PackedModule


class TransformersRunner(OneThreadRunner):
    """Computes each step in one pass of the module for all sequences."""

    def __init__(self, module: nn.Module, packed: PackedModule, sizes: CacheSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self._weight_bytes = sum(one.nbytes for one in module.parameters())
        self._packed = packed

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number and size of the KV blocks."""
        return self._sizes

    @property
    def state_sizes(self) -> StateSizes:
        """The slots of the states of recurrent layers."""
        return StateSizes(self._packed.slots.num_slots, self._packed.slots.slot_bytes)

    @property
    def placement(self) -> Placement:
        """On the CPU."""
        return Placement(self._weight_bytes, leaves_core_free=self.leaves_core_free)

    @property
    def verifies_drafts(self) -> bool:
        """False: speculative decoding is left to the runners of families."""
        return False

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step."""
        return self.thread.submit(self._step, plan)

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        return self.thread.submit(self._logits, plan).result()

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Refuse: loading refuses settings with adapters."""
        raise InvariantError("runner transformers has no adapter slots")

    @torch.inference_mode()
    def _logits(self, plan: StepPlan) -> NDArray[np.float32]:
        self._copy(plan)
        num_tokens = len(plan.token_ids)
        return self._packed.compute(plan, np.arange(num_tokens), num_tokens)[0].numpy()

    @translate_out_of_memory()
    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        begun_s = time.perf_counter()
        self._copy(plan)
        copied_s = time.perf_counter()
        num_samples, scored, pooled = len(plan.sample_tokens), plan.scored, plan.pooled
        parts = plan.sample_tokens, *(some.tokens for some in (scored, pooled) if some is not None)
        wanted, num_pooled = np.concatenate(parts).astype(np.int64), 0 if pooled is None else len(pooled.tokens)
        logits, hidden = self._packed.compute(plan, wanted, len(wanted) - num_pooled)
        computed_s = time.perf_counter()
        tokens, logprobs = sample_rows(logits[:num_samples], plan.sampling)
        scores = None
        if scored is not None:
            targets = torch.from_numpy(scored.targets)
            scores = to_numpy(*logprobs_of(logits[num_samples:], targets, scored.num_logprobs))
        sampled_s = time.perf_counter()
        spans_s = computed_s - copied_s, sampled_s - computed_s, copied_s - begun_s
        forward_ms, sample_ms, copy_ms = (span_s * 1e3 for span_s in spans_s)
        states = None if pooled is None else hidden.numpy()
        return StepResult(tokens, forward_ms, sample_ms, copy_ms, logprobs, scores, states)

    def _copy(self, plan: StepPlan) -> None:
        if len(plan.copies):
            copy_blocks(plan.copies, self._packed.caches.values())
