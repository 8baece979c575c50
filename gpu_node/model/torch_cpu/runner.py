"""The model runner in plain torch. It runs on every CPU, and the other runners are tested against it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.architecture.rank_part import RankAdapter, RankPart
from penstock.gpu_node.model.protocol import (
    Adapter,
    CacheSizes,
    Logprobs,
    Placement,
    SamplingRows,
    StepPlan,
    StepResult,
)
from penstock.gpu_node.model.torch_common.logprobs import logprobs_of, to_numpy
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.profiler import TorchProfiler
from penstock.gpu_node.model.torch_common.ranks import ToGather
from penstock.gpu_node.model.torch_common.sampler import sample
from penstock.gpu_node.model.torch_cpu.attention import KvCache, PagedAttention
from penstock.gpu_node.model.torch_cpu.decoder import Decoder
from penstock.kernels.cpu.probe import usable_cores


class TorchRunner:
    """Runs each step on a single worker thread; torch's operations release the GIL.

    It may be one of several ranks that compute a model together. All of them get the same plans. Only rank 0 samples;
    the others ignore the plan's sampling rows and return no tokens.
    """

    max_in_flight = 1

    def __init__(
        self,
        part: RankPart,
        decoder: Decoder,
        attention: PagedAttention,
        sizes: CacheSizes,
        *,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """part: of the model, as the decoder and the attention have it."""
        spec = part.spec
        self._part = part
        self._sizes = sizes
        self._decoder = decoder
        self._attention = attention
        self._caches = [
            KvCache(spec.num_kv_heads, sizes.num_blocks, block_size, spec.head_dim, dtype)
            for _ in range(spec.num_layers)
        ]
        # Only this thread computes, because every thread that calls torch keeps its own team of OpenMP threads.
        self._thread = ThreadPoolExecutor(1, "penstock-torch")
        self._profiler = TorchProfiler()

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number and size of the KV blocks."""
        return self._sizes

    @property
    def placement(self) -> Placement:
        """On the CPU. Layers are read from the checkpoint at the first step."""
        return Placement(leaves_core_free=torch.get_num_threads() < usable_cores())

    @property
    def verifies_drafts(self) -> bool:
        """True: a step may sample after any of its tokens."""
        return True

    def bind_thread(self) -> None:
        """Do nothing: steps run on a separate thread."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step."""
        return self._thread.submit(self._step, plan)

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        return self.start_logits(plan).result()

    def start_logits(self, plan: StepPlan) -> Future[NDArray[np.float32]]:
        """Start a step as `logits` does."""
        return self._thread.submit(self._logits, plan)

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, after the steps that were already submitted."""
        self.start_adapter(adapter_slot, adapter).result()

    def start_adapter(self, adapter_slot: int, adapter: Adapter) -> Future[None]:
        """Start to load an adapter as `set_adapter` does; all ranks between the same steps."""
        return self._thread.submit(self._set_adapter, adapter_slot, adapter)

    def start_profile(self) -> None:
        """Start recording the operations of steps."""
        self._thread.submit(self._profiler.start).result()

    def stop_profile(self) -> None:
        """Stop recording."""
        self._thread.submit(self._profiler.stop).result()

    def write_profile(self, path: Path) -> None:
        """Write what was recorded as a compressed Chrome trace."""
        self._profiler.write(path)

    def _set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        decoder = self._decoder
        own = adapter if self._part.size == 1 else RankAdapter(adapter, self._part)
        decoder.exchanges.run((), lambda: decoder.adapters.set(adapter_slot, own))

    @torch.inference_mode()
    def _logits(self, plan: StepPlan) -> NDArray[np.float32]:
        return self._computed(plan, torch.arange(len(plan.token_ids)), len(plan.token_ids))[0].numpy()

    def _computed(self, plan: StepPlan, tokens: Tensor, num_logits: int) -> tuple[Tensor, Tensor, float]:
        """Copy blocks and compute a step.

        Return the logits of the first tokens of `tokens`, the hidden states of all of them, and when the copies were
        done. At other ranks than 0, the logits are only those of a part of the vocabulary.
        """
        decoder, exchanges = self._decoder, self._decoder.exchanges

        def compute() -> tuple[ToGather, Tensor, float]:
            if len(plan.copies):
                self._copy(plan.copies)
            copied_s = time.perf_counter()
            hidden = decoder.hidden(plan, self._caches, self._attention, tokens)
            return exchanges.to_gather(decoder.outputs(hidden[:num_logits])), hidden, copied_s

        planned = decoder.planned_exchanges(len(plan.token_ids), len(tokens)) if exchanges.size > 1 else ()
        outputs, hidden, copied_s = exchanges.run(planned, compute)
        return decoder.logits(exchanges.gathered(outputs)), hidden, copied_s

    @translate_out_of_memory()
    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        begun_s = time.perf_counter()
        num_samples, scored, pooled = len(plan.sample_tokens), plan.scored, plan.pooled
        parts = plan.sample_tokens, *(some.tokens for some in (scored, pooled) if some is not None)
        wanted, num_pooled = torch.from_numpy(np.concatenate(parts)), 0 if pooled is None else len(pooled.tokens)
        logits, hidden, copied_s = self._computed(plan, wanted, len(wanted) - num_pooled)
        if self._part.rank:
            return StepResult(np.empty(0, np.int32), 0.0, 0.0)
        computed_s = time.perf_counter()
        tokens, logprobs = _sample(logits[:num_samples], plan.sampling)
        scores = None
        if scored is not None:
            targets = torch.from_numpy(scored.targets)
            scores = to_numpy(*logprobs_of(logits[num_samples:], targets, scored.num_logprobs))
        sampled_s = time.perf_counter()
        spans_s = computed_s - copied_s, sampled_s - computed_s, copied_s - begun_s
        forward_ms, sample_ms, copy_ms = (span_s * 1e3 for span_s in spans_s)
        states = None if pooled is None else hidden[len(hidden) - num_pooled :].float().numpy()
        return StepResult(tokens, forward_ms, sample_ms, copy_ms, logprobs, scores, states)

    def _copy(self, copies: NDArray[np.int32]) -> None:
        """Apply all copies at once.

        Chains are resolved first, so that each target gets the contents that some block had before the first copy.
        """
        origins: dict[int, int] = {}
        for source, target in copies.tolist():
            origins[target] = origins.get(source, source)
        targets, sources = (torch.tensor(list(blocks)) for blocks in (origins.keys(), origins.values()))
        for cache in self._caches:
            cache.copy(sources, targets)


def _sample(logits: Tensor, rows: SamplingRows) -> tuple[NDArray[np.int32], Logprobs | None]:
    """Sample one token per row. Return the tokens and, if any row wants them, logprobs of the unmodified logits."""
    if not len(logits):
        return np.empty(0, dtype=np.int32), None
    if rows.num_logprobs is None:
        return sample(logits, rows), None
    raw = logits.clone()
    tokens = sample(logits, rows)
    return tokens, to_numpy(*logprobs_of(raw, torch.from_numpy(tokens), rows.num_logprobs))
