"""The runner that executes step plans on a GPU, and its steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.rank_part import RankAdapter
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.gpu_node.model.gpu.graphs import GraphShapes, StepGraphs, pad_step
from penstock.gpu_node.model.gpu.inputs import Ints, RowMarks, StepInputs, mark_rows_of, pack_step, size_of, to_device
from penstock.gpu_node.model.gpu.kv_pool import KvPool
from penstock.gpu_node.model.gpu.profile import run_largest_step
from penstock.gpu_node.model.gpu.recurrent import StatePool
from penstock.gpu_node.model.protocol import (
    Adapter,
    CacheSizes,
    Placement,
    PooledTokens,
    RankBytes,
    StateSizes,
    StepPlan,
    StepResult,
)
from penstock.gpu_node.model.torch_common.exchanges import Agreement, done_together
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.profiler import TorchProfiler
from penstock.gpu_node.model.torch_common.ranks import ONE_RANK, BrokenExchangeError, Communicator
from penstock.gpu_node.model.torch_common.sampler import logprobs_of, to_numpy
from penstock.kernels.cpu.probe import usable_cores
from penstock.kernels.triton.copies import to_device_async
from penstock.kernels.triton.decode_attention import num_splits
from penstock.kernels.triton.launches import dependent_launches
from penstock.kernels.triton.products import MEDIUM_ROWS
from penstock.kernels.triton.sampler import Marks, sample

Result = TypeVar("Result")

FIXED_SPLITS = 8
"""Parts of a context in mixed steps, and in all steps of deterministic mode: there a row's result must not depend on
the batch size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a runner's buffers and graphs are sized for."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    deterministic: bool = False
    max_num_batched_tokens: int = 8192
    enforce_eager: bool = False
    """Whether no step runs as a graph."""
    dependent_launches: bool = True
    """Whether the kernels of decode graphs may start while the kernel ahead of them runs, on GPUs that support it. An
    H100 decodes few sequences 5 to 15 % faster so; from 32 sequences on, it makes 1 % more or less."""


OnHost = tuple[Tensor, Tensor] | None
"""The two arrays of `Logprobs` in pinned memory; None where no row wants logprobs."""


class StagingBuffer:
    """Pinned memory that transfers one step's inputs to the device and its tokens back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._packed = device.pinned(1 << 12, dtype=torch.int32)
        self._tokens = device.pinned(0, dtype=torch.int32)
        self.returned = self._tokens
        """The tokens of the last step that used the buffer, once `wait` has returned."""
        self.copied: DeviceEvent = device.record_event()

    def wait(self) -> None:
        """Wait until the last step has finished with the buffer."""
        self.copied.wait()

    def packed(self, step: StepInputs[Ints]) -> Tensor:
        """Return pinned memory that is large enough for a packed step."""
        needed = size_of(step)
        if len(self._packed) < needed:
            self._packed = self._device.pinned(2 * needed, dtype=torch.int32)
        return self._packed

    def copy_back(self, tokens: Tensor) -> Tensor:
        """Start copying tokens to the host; the result is valid once the event `copied` is reached."""
        if len(self._tokens) < len(tokens):
            self._tokens = self._device.pinned(2 * len(tokens), dtype=torch.int32)
        here = self._tokens[: len(tokens)]
        here.copy_(tokens, non_blocking=True)
        self.copied, self.returned = self._device.record_event(), here
        return here


class GpuStep:
    """A step that may still be running. Its tokens are in a staging buffer that the step after the next reuses."""

    def __init__(self, started: DeviceEvent, copied: DeviceEvent) -> None:
        self._started = started
        self._copied = copied
        self._done = copied
        self._tokens = torch.empty(0, dtype=torch.int32)
        self.deferred: Callable[[], None] | None = None
        """Work that is still to be submitted to the device."""
        self._logprobs: tuple[OnHost, OnHost] = None, None
        self.hidden: Tensor | None = None
        """The hidden states of the pooled tokens in pinned memory."""
        self.eager: str | None = None
        """Why the step did not run as a graph; None if it did."""

    def set_tokens(self, tokens: Tensor, done: DeviceEvent) -> None:
        """Set the pinned tensor that holds the tokens once the event `done` is reached."""
        self._tokens, self._done = tokens, done

    def note_logprobs(self, logprobs: OnHost, scores: OnHost) -> None:
        """Keep the logprobs of the sampling rows and of the scored tokens."""
        self._logprobs = logprobs, scores

    @translate_out_of_memory()
    def run_deferred(self) -> None:
        """Submit the deferred work, if any, to the device."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            deferred()

    def ms_since(self, earlier: GpuStep) -> float:
        """Return the milliseconds of device time between the ends of two steps whose results were waited for."""
        return self._done.ms_since(earlier._done)

    def result(self) -> StepResult:
        """Wait for the step and return its tokens."""
        self.run_deferred()
        self._done.wait()
        # Sampling is part of the same graph as the forward pass.
        forward_ms, copy_ms = self._done.ms_since(self._copied), self._copied.ms_since(self._started)
        logprobs, scores = (None if tensors is None else to_numpy(*tensors) for tensors in self._logprobs)
        tokens = self._tokens.numpy().copy()
        hidden = None if self.hidden is None else self.hidden.numpy()
        return StepResult(tokens, forward_ms, 0.0, copy_ms, logprobs, scores, hidden, self.eager)


class FailedStep:
    """A step that ran out of memory when some of its work was submitted already."""

    def __init__(self, error: MemoryError) -> None:
        self._error = error

    def result(self) -> StepResult:
        """Raise the error."""
        raise self._error


class GpuRunner:
    """Runs steps asynchronously: `submit` enqueues the work on the GPU and returns.

    A plan that is made before the previous step's tokens are known refers to the token of row i as -1 - i. Rows with
    penalties need known tokens.
    """

    max_in_flight = 2
    all_sample = True
    """Whether ranks other than rank 0 sample too."""

    def __init__(
        self,
        decoder: GpuDecoder,
        adapters: GpuAdapters,
        pool: KvPool,
        sizes: CacheSizes,
        limits: Limits,
        device: Device,
        weight_bytes: int = 0,
        report: Callable[[float], None] = lambda captured: None,
        host_ranks: Communicator = ONE_RANK,
        states: StatePool | None = None,
    ) -> None:
        """states: the slots of a model with recurrent layers.

        report: takes the fraction of graphs that are captured.

        host_ranks: the ranks that compute the model together, connected for tensors in host memory.
        """
        self._decoder = decoder
        self._agreement = Agreement(host_ranks)
        self._host_ranks = host_ranks
        self._adapters = adapters
        self._pool = pool
        self._states = states
        self._sizes = sizes
        self._profiler = TorchProfiler()
        self._limits = limits
        self._device = device
        self._placement = Placement(weight_bytes, device.uuid, leaves_core_free=usable_cores() > 1)
        rows, vocab = limits.max_num_seqs, decoder.spec.vocab_size
        self._row_marks = RowMarks(vocab, device.torch)
        self._no_marks = Marks.empty(0, vocab, device.torch)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        with torch.inference_mode():
            kinds = {"has_adapters": adapters.num_slots > 0, "has_states": states is not None}
            shapes = GraphShapes(rows, limits.max_num_batched_tokens, **kinds)
            # Padding rows of a graph's batch sample too.
            self._tokens = torch.zeros(shapes.max_rows, dtype=torch.int32, device=device.torch)
            self._graphs: StepGraphs | None = None
            if not limits.enforce_eager:
                logits = vocab, decoder.dtype
                self._graphs = StepGraphs(device, self._compute_for_graph, shapes, max_blocks, logits, report)
        self.replays = True
        """Whether graphs are replayed. If not, their steps are computed with the same padding, for comparisons."""
        self._unfinished = GpuStep(device.record_event(), device.record_event())
        self._staging_buffers = deque(StagingBuffer(device) for _ in range(self.max_in_flight))

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number and size of the KV blocks."""
        return self._sizes

    @property
    def state_sizes(self) -> StateSizes:
        """The slots of recurrent states."""
        return StateSizes() if self._states is None else StateSizes(self._states.num_slots, self._states.slot_bytes)

    @property
    def placement(self) -> Placement:
        """On the GPU, without offloaded layers."""
        return self._placement

    @property
    def held(self) -> RankBytes:
        """The weights on the GPU, and the KV blocks there and on the host."""
        return RankBytes(self._placement.weight_bytes, self._sizes.num_blocks * self._sizes.block_bytes)

    @property
    def verifies_drafts(self) -> bool:
        """False: graphs and marks support one sample per sequence."""
        return False

    def bind_thread(self) -> None:
        """Let the calling thread's work go to this runner's GPU."""
        self._device.make_current()

    def start_profile(self) -> None:
        """Start recording the operations of the calling thread and of the GPU."""
        self._profiler.start()

    def stop_profile(self) -> None:
        """Stop recording, on the same thread."""
        self._profiler.stop()

    def write_profile(self, path: Path) -> None:
        """Write what was recorded as a compressed Chrome trace."""
        self._profiler.write(path)

    def submit(self, plan: StepPlan) -> GpuStep | FailedStep:
        """Start a step. With states, a lack of memory shows in the result, because some layers may have written theirs.

        With several ranks, an error ends them all: the GPUs of the others wait for an exchange that never comes. So it
        is raised as BrokenExchangeError.
        """
        if self._states is not None:  # Models with states have one rank.
            try:
                return self._submit(plan)
            except MemoryError as error:
                return FailedStep(error)
        if self._decoder.part.size == 1:
            return self._submit(plan)
        try:
            return self._submit(plan)
        except Exception as error:
            raise BrokenExchangeError(f"a step failed at rank {self._decoder.part.rank}: {error}") from error

    @translate_out_of_memory()
    @torch.inference_mode()
    def _submit(self, plan: StepPlan) -> GpuStep:
        self._device.make_current()
        self._unfinished.run_deferred()
        staging = self._staging_buffers[0]
        self._staging_buffers.rotate(-1)
        staging.wait()
        self._agreement.note(staging.returned)
        started = self._device.record_event()
        self._pool.copy(plan.copies)
        copied = self._device.record_event()
        if self._pool.has_host_block(plan.block_tables):
            self._pool.wait_for_swap_out()
        mark_rows, in_flight = mark_rows_of(plan.sampling), GpuStep(started, copied)
        step = self._packed(plan)
        graphs = self._graphs
        shape = "enforce_eager" if graphs is None else graphs.find(step)
        if graphs is None or isinstance(shape, str):
            in_flight.eager = str(shape)
            logits, hidden = self._run_eagerly(staging, step, plan.pooled)
        else:
            padded, hidden = pad_step(step, shape), None
            if self.replays:
                logits = graphs.run(staging.packed(padded), padded, shape)
            else:
                logits = self._compute(self._on_device(staging, padded))

        @torch.inference_mode()
        def choose() -> None:
            # Another runner's step may have come between.
            self._device.make_current()
            if (mark_rows >= 0).any():
                rules = self._row_marks.write(plan.sampling, mark_rows)
                self._tokens[: len(rules)] = sample(logits[: len(rules)], rules, self._row_marks.marks)
            if self._decoder.part.rank == 0:
                in_flight.note_logprobs(*self._logprobs(plan, logits))
            in_flight.hidden = None if hidden is None else self._to_host_async(hidden.float())
            in_flight.set_tokens(staging.copy_back(self._tokens[: len(plan.sample_tokens)]), staging.copied)

        if plan.sampling.masks is not None:
            # The engine writes the masks while the step runs, so sampling is deferred until the result is wanted.
            in_flight.deferred, self._unfinished = choose, in_flight
        else:
            choose()
        return in_flight

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        self._device.make_current()
        self._unfinished.run_deferred()
        staging = self._staging_buffers[0]
        staging.wait()
        step = self._packed(plan)
        everywhere = np.arange(len(plan.token_ids), dtype=np.int32)
        step = replace(step, sampling=everywhere, sampled_adapter_tiles=step.adapter_tiles)
        hidden = self._hidden(self._on_device(staging, step))
        logits: NDArray[np.float32] = self._decoder.logits(hidden).float().cpu().numpy()
        return logits

    def start_logits(self, plan: StepPlan) -> Future[NDArray[np.float32]]:
        """Run a step as `logits` does."""
        return _done(lambda: self.logits(plan))

    def compile_eager_steps(self) -> None:
        """Compile the kernels of steps without a graph."""
        limit = self._limits.max_num_batched_tokens
        # Tile sizes of matrix products depend on the number of rows, which may exceed that of every graph.
        for num_tokens in sorted({min(MEDIUM_ROWS, limit), limit}):
            run_largest_step(self._decoder, self._pool, num_tokens, self._limits.max_num_seqs, self._states)

    @torch.inference_mode()
    def compile_rest(self) -> None:
        """Compile the kernels for block copies, marks and adapters; leaves no state behind."""
        self._pool.copy(np.zeros((1, 2), np.int32))
        self._row_marks.compile()
        self._adapters.compile()

    @torch.inference_mode()
    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, after the steps that were already submitted."""
        self._device.make_current()
        part = self._decoder.part
        self._adapters.set(adapter_slot, adapter if part.size == 1 else RankAdapter(adapter, part))

    def start_adapter(self, adapter_slot: int, find: Callable[[], Adapter]) -> Future[None]:
        """Load an adapter into a slot. If `find` or loading fails at one rank, it fails at all of them."""
        return _done(lambda: done_together(self._host_ranks, lambda: self.set_adapter(adapter_slot, find())))

    def _packed(self, plan: StepPlan) -> StepInputs[Ints]:
        if self._states is not None and plan.states is None:
            raise InvariantError("a step of a model with recurrent layers names no states")
        return pack_step(plan, self._limits.block_size, self._decoder.query_rows)

    def _run_eagerly(
        self, staging: StagingBuffer, step: StepInputs[Ints], pooled: PooledTokens | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of a step, and the hidden states of its pooled tokens if there are any."""
        on_device = self._on_device(staging, step)
        hidden = self._hidden(on_device)
        if pooled is None:
            return self._sampled(on_device, hidden), None
        num_logits = len(hidden) - len(pooled.tokens)
        return self._sampled(on_device, hidden[:num_logits]), hidden[num_logits:]

    def _compute_for_graph(self, step: StepInputs[Tensor]) -> Tensor:
        # Kernels of steps with prompts run for so long that nothing is gained.
        with dependent_launches(enabled=self._limits.dependent_launches and not len(step.tiles)):
            return self._compute(step)

    def _compute(self, step: StepInputs[Tensor]) -> Tensor:
        return self._sampled(step, self._hidden(step))

    def _sampled(self, step: StepInputs[Tensor], hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, and sample the rows that depend only on their logits."""
        logits = self._decoder.logits(hidden)
        if len(step.rules):
            rows = len(step.rules)
            self._tokens[:rows] = sample(logits[:rows], step.rules, self._no_marks)
        return logits

    def _logprobs(self, plan: StepPlan, logits: Tensor) -> tuple[OnHost, OnHost]:
        """Return the logprobs of the sampling rows and of the scored tokens; None where they are not wanted."""
        rows, wanted, scored = len(plan.sample_tokens), plan.sampling.num_logprobs, plan.scored
        logprobs = scores = None
        if wanted is not None:
            logprobs = self._logprobs_to_host(*logprobs_of(logits[:rows], self._tokens[:rows], wanted))
        if scored is not None:
            targets = to_device_async(scored.targets, self._device.torch)
            scores = self._logprobs_to_host(*logprobs_of(logits[rows:], targets, scored.num_logprobs))
        return logprobs, scores

    def _logprobs_to_host(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._to_host_async(ids.to(torch.int32)), self._to_host_async(values)

    def _to_host_async(self, x: Tensor) -> Tensor:
        """Copy a tensor to pinned memory within the step; a later copy would wait for the next step."""
        return self._device.pinned(*x.shape, dtype=x.dtype).copy_(x, non_blocking=True)

    def _hidden(self, step: StepInputs[Tensor]) -> Tensor:
        splits = FIXED_SPLITS
        if len(step.decoding) and not len(step.tiles) and not self._limits.deterministic:
            splits = num_splits(len(step.decoding), self._decoder.num_kv_heads, self._device.torch)
        adapted = self._adapters.rows_of(step)
        return self._decoder.hidden(step, self._tokens, self._pool.layers, splits, adapted, self._states)

    def _on_device(self, staging: StagingBuffer, step: StepInputs[Ints]) -> StepInputs[Tensor]:
        arrival = torch.empty(size_of(step), dtype=torch.int32, device=self._device.torch)
        return to_device(staging.packed(step), arrival, step)


def _done(work: Callable[[], Result]) -> Future[Result]:
    """Do work that does not take long on the calling thread, whose place in the order of exchanges matters."""
    done: Future[Result] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done
