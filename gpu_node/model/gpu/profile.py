"""Measure the GPU memory that the largest step needs, and compute how much is left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.inputs import StepInputs, aligned
from penstock.gpu_node.model.gpu.kv_pool import KvPool
from penstock.gpu_node.model.gpu.recurrent import StatePool
from penstock.kernels.triton.prefill_attention import prefill_tiles
from penstock.kernels.triton.sampler import RULE_COLUMNS, Marks, sample

_WORKSPACE_BYTES = 2 * (32 << 20)
"""Workspaces of cuBLAS and cuBLASLt on Hopper, for the stream that captures graphs."""
_EXECUTABLE_BYTES = 2 << 20
"""Of one instantiated graph of a few hundred kernels; an estimate until a GPU was measured."""


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What the graphs of decode steps will take of the GPU's memory."""

    num_graphs: int
    num_rows: int
    """Of the largest graph."""
    logits_width: int
    itemsize: int
    """Bytes of one logit."""
    max_blocks: int
    """KV blocks of one sequence."""
    step_bytes: int
    """Peak of the largest graph's step, its logits included. All graphs share one private pool of this size."""

    @property
    def num_bytes(self) -> int:
        """The private pool, the logits copied out of it, the inputs, cuBLAS's workspace and the executables."""
        logits = self.num_rows * self.logits_width * self.itemsize
        # The block tables lie in the inputs and, spread to their full width, beside them.
        tables = 2 * 4 * self.num_rows * self.max_blocks
        return self.step_bytes + logits + tables + _WORKSPACE_BYTES + self.num_graphs * _EXECUTABLE_BYTES


@torch.inference_mode()
def run_largest_step(
    decoder: GpuDecoder, pool: KvPool, num_tokens: int, num_samples: int, states: StatePool | None = None
) -> None:
    """Run a prefill step of `num_tokens` and sample `num_samples` rows after its first token.

    It stores nothing, but the last state in slot 0.
    """
    device = pool.layers[0].k.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    # No prompt is longer than the maximum context, where position biases end.
    longest = min(num_tokens, decoder.num_positions)
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    counts = np.diff(starts)
    seqs = np.arange(len(counts), dtype=np.int32)
    num_states = 0 if states is None else len(counts)
    # All contexts consist of the null block.
    tables = ints(len(counts), aligned(longest // pool.layers[0].block_size + 1))
    step = StepInputs(
        token_ids=ints(num_tokens),
        positions=ints(num_tokens),
        slots=ints(num_tokens) - 1,
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(counts).to(device),
        decoding=ints(0),
        tiles=torch.from_numpy(prefill_tiles(starts, seqs, decoder.query_rows)).to(device),
        sampling=ints(num_samples),
        rules=ints(num_samples, len(RULE_COLUMNS)),
        adapter_tiles=ints(0, 3),
        sampled_adapter_tiles=ints(0, 3),
        owners=torch.from_numpy(np.repeat(seqs, counts)).to(device) if states is not None else ints(0),
        state_reads=ints(num_states) - 1,
        state_writes=ints(num_states),
        save_starts=ints(num_states + 1 if states is not None else 0),
        state_saves=ints(0, 2),
        block_tables=tables,
    )
    step.rules[:, -1] = -1
    logits = decoder.logits(decoder.hidden(step, step.token_ids, pool.layers, 1, states=states))
    sample(logits, step.rules, Marks.empty(1, logits.shape[1], device))


def peak_bytes(
    decoder: GpuDecoder, pool: KvPool, num_tokens: int, num_samples: int, states: StatePool | None = None
) -> int:
    """Return the peak GPU memory of the largest step, beyond the memory allocated before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_largest_step(decoder, pool, num_tokens, num_samples, states)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def split_bytes(num_rows: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Return what decode attention takes for the results of splits, until it has merged them."""
    return 4 * num_rows * num_heads * splits * (head_dim + 1) if splits > 1 else 0


def bytes_left(*, total: int, free: int, reserved: int, peak: int, utilization: float) -> int:
    """Return the bytes for the KV cache, within a share `utilization` of the GPU's memory.

    total, free: GPU memory now, over all processes; reserved: unused memory that torch holds and can use for the
    step's `peak`.
    """
    taken = total - free
    return int(total * utilization) - taken - max(0, peak - reserved)
