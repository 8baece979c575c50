"""Steps of a plan on a card."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.gpu_node.model.gpu.graphs import DecodeGraphs
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, pack_step, size_of, to_device
from penstock.gpu_node.model.gpu.kv_pool import KvPool
from penstock.gpu_node.model.gpu.row_marks import RowMarks, places_of
from penstock.gpu_node.model.protocol import Adapter, CacheSizes, StepPlan, StepResult
from penstock.gpu_node.model.torch_common.logprobs import logprobs_of, to_numpy
from penstock.gpu_node.model.torch_common.memory_errors import naming_lack_of_memory
from penstock.kernels.triton.decode_attention import num_splits
from penstock.kernels.triton.sampler import Marks, sample
from penstock.kernels.triton.sending import sent

_OnHost = tuple[Tensor, Tensor] | None
"""The arrays of `Logprobs`."""
FIXED_SPLITS = 8
"""Of contexts, where a row's sums must not depend on how many others there are."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runner is made for."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    deterministic: bool = False


class GpuRunner:
    """Runs each step on the device's own time: `submit` only gives it the work.

    A plan made before the tokens of the step ahead of it are known has -1 - i in the place of what that step's row i
    samples; rows with penalties need known tokens.
    """

    max_in_flight = 2

    def __init__(
        self,
        decoder: GpuDecoder,
        adapters: GpuAdapters,
        pool: KvPool,
        sizes: CacheSizes,
        limits: Limits,
        device: Device,
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._pool = pool
        self._sizes = sizes
        self._limits = limits
        self._device = device
        rows, vocab = limits.max_num_seqs, decoder.spec.vocab_size
        self._row_marks = RowMarks(vocab, device.torch)
        self._no_marks = Marks.empty(0, vocab, device.torch)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        with torch.inference_mode():
            # One more row than sequences: padding of a graph's batch may sample too.
            self._tokens = torch.zeros(2 * rows + 32, dtype=torch.int32, device=device.torch)
            self._graphs = DecodeGraphs(device, self._compute, rows, max_blocks, (vocab, decoder.dtype))
        self._open = _Flight(device.mark(), device.mark())
        self._trays = deque(_StagingBuffer(device) for _ in range(self.max_in_flight))

    @property
    def cache_sizes(self) -> CacheSizes:
        """What the KV cache holds."""
        return self._sizes

    @property
    def verifies_drafts(self) -> bool:
        """Its graphs and marks are for one sample of each sequence."""
        return False

    def bind_thread(self) -> None:
        """Nothing to do: the card computes."""

    @naming_lack_of_memory()
    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> _Flight:
        """Start a step."""
        self._open.close()
        tray = self._trays[0]
        self._trays.rotate(-1)
        tray.wait()
        started = self._device.mark()
        self._pool.copy(plan.copies)
        copied = self._device.mark()
        if self._pool.has_host_block(plan.block_tables):
            self._pool.settle()
        places, flight = places_of(plan.sampling), _Flight(started, copied)
        logits = self._run(tray, pack_step(plan, self._limits.block_size))

        @torch.inference_mode()
        def choose() -> None:
            if (places >= 0).any():
                rules = self._row_marks.write(plan.sampling, places)
                self._tokens[: len(rules)] = sample(logits[: len(rules)], rules, self._row_marks.marks)
            flight.note_logprobs(*self._logprobs(plan, logits))
            flight.land(tray.take(self._tokens[: len(plan.sample_tokens)]), tray.left)

        if plan.sampling.masks is not None:
            # Masks are written while the step runs: what looks at them is left to who waits for it.
            flight.rest, self._open = choose, flight
        else:
            choose()
        return flight

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing; the logits after each of its tokens, [num_tokens, vocab]."""
        self._open.close()
        tray = self._trays[0]
        tray.wait()
        step = pack_step(plan, self._limits.block_size)
        everywhere = np.arange(len(plan.token_ids), dtype=np.int32)
        step = replace(step, sampling=everywhere, sampled_adapter_tiles=step.adapter_tiles)
        logits: NDArray[np.float32] = self._logits(self._arrived(tray, step)).float().cpu().numpy()
        return logits

    @torch.inference_mode()
    def compile_rest(self) -> None:
        """Compile what no forward pass needs but some steps do; leaves nothing behind."""
        self._pool.copy(np.zeros((1, 2), np.int32))
        self._row_marks.compile()
        self._adapters.compile()

    @torch.inference_mode()
    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        self._pool.zero(block_ids)

    @torch.inference_mode()
    def set_adapter(self, place: int, adapter: Adapter) -> None:
        """Put an adapter in a place, behind the steps that were submitted."""
        self._adapters.set(place, adapter)

    def _run(self, tray: _StagingBuffer, step: StepInputs[Ints]) -> Tensor:
        if not self._graphs.can_run(step):
            return self._compute(self._arrived(tray, step))
        step = self._graphs.padded(step)
        return self._graphs.run(tray.packed(step), step)

    def _compute(self, step: StepInputs[Tensor]) -> Tensor:
        """The logits; rows that look at nothing else have chosen their tokens."""
        logits = self._logits(step)
        if len(step.rules):
            rows = len(step.rules)
            self._tokens[:rows] = sample(logits[:rows], step.rules, self._no_marks)
        return logits

    def _logprobs(self, plan: StepPlan, logits: Tensor) -> tuple[_OnHost, _OnHost]:
        """Those of the sampling rows and of the scored tokens, where anybody wants them."""
        rows, wanted, scored = len(plan.sample_tokens), plan.sampling.num_logprobs, plan.scored
        logprobs = scores = None
        if wanted is not None:
            logprobs = self._sent(*logprobs_of(logits[:rows], self._tokens[:rows], wanted))
        if scored is not None:
            targets = sent(scored.targets, self._device.torch)
            scores = self._sent(*logprobs_of(logits[rows:], targets, scored.num_logprobs))
        return logprobs, scores

    def _sent(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Where they are on the host once the step is done: who fetched them then would wait for the next one."""
        there = ids.to(torch.int32), values
        first, second = (self._device.pinned(*x.shape, dtype=x.dtype).copy_(x, non_blocking=True) for x in there)
        return first, second

    def _logits(self, step: StepInputs[Tensor]) -> Tensor:
        given = step.token_ids
        earlier = self._tokens[(-1 - given).clamp(min=0)]
        # A row that failed has -1 for a token; nobody wants what it would say next.
        ids = torch.where(given < 0, earlier, given).clamp(min=0)
        splits = FIXED_SPLITS
        if not self._limits.deterministic and len(step.decoding):
            splits = num_splits(len(step.decoding), self._decoder.spec.num_kv_heads, self._device.torch)
        return self._decoder.logits(step, ids, self._pool.layers, splits, self._adapters.rows_of(step))

    def _arrived(self, tray: _StagingBuffer, step: StepInputs[Ints]) -> StepInputs[Tensor]:
        arrival = torch.empty(size_of(step), dtype=torch.int32, device=self._device.torch)
        return to_device(tray.packed(step), arrival, step)


class _StagingBuffer:
    """Pinned memory that one step goes to the device through, and its tokens come back through."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._packed = device.pinned(1 << 12, dtype=torch.int32)
        self._tokens = device.pinned(0, dtype=torch.int32)
        self.left: DeviceEvent = device.mark()

    def wait(self) -> None:
        """Until what went through it last has gone."""
        self.left.wait()

    def packed(self, step: StepInputs[Ints]) -> Tensor:
        """Room for a packed step."""
        needed = size_of(step)
        if len(self._packed) < needed:
            self._packed = self._device.pinned(2 * needed, dtype=torch.int32)
        return self._packed

    def take(self, tokens: Tensor) -> Tensor:
        """Where tokens are, once `left` is reached."""
        if len(self._tokens) < len(tokens):
            self._tokens = self._device.pinned(2 * len(tokens), dtype=torch.int32)
        here = self._tokens[: len(tokens)]
        here.copy_(tokens, non_blocking=True)
        self.left = self._device.mark()
        return here


class _Flight:
    """A step on its way. Its tokens lie in a tray that the step after the next uses again."""

    def __init__(self, started: DeviceEvent, copied: DeviceEvent) -> None:
        self._started = started
        self._copied = copied
        self._done = copied
        self._tokens = torch.empty(0, dtype=torch.int32)
        self.rest: Callable[[], None] | None = None
        """What is still to be given to the device."""
        self._logprobs: tuple[_OnHost, _OnHost] = None, None

    def land(self, tokens: Tensor, done: DeviceEvent) -> None:
        """Say where its tokens are, once `done` is reached."""
        self._tokens, self._done = tokens, done

    def note_logprobs(self, logprobs: _OnHost, scores: _OnHost) -> None:
        """Keep those of its sampling rows and of its scored tokens."""
        self._logprobs = logprobs, scores

    @naming_lack_of_memory()
    def close(self) -> None:
        """Give the device what is left of it."""
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()

    def result(self) -> StepResult:
        self.close()
        self._done.wait()
        # Sampling is part of the same graph as the forward pass.
        forward_ms, copy_ms = self._done.ms_since(self._copied), self._copied.ms_since(self._started)
        logprobs, scores = (None if tensors is None else to_numpy(*tensors) for tensors in self._logprobs)
        tokens = self._tokens.numpy().copy()
        return StepResult(tokens, forward_ms, sample_ms=0.0, copy_ms=copy_ms, logprobs=logprobs, scores=scores)
