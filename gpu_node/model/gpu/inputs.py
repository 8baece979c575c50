"""A step's plan on the device: packed into one run of integers, which one copy brings there."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.protocol import StepPlan
from penstock.kernels.triton.lora import lora_tiles
from penstock.kernels.triton.prefill_attention import prefill_tiles
from penstock.kernels.triton.sampler import RULE_COLUMNS, pack_rules

Ints = NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)
_NO_ADAPTER_TILES = np.zeros((0, 3), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs(Generic[Array]):
    """What the kernels read of a step, int32: as it is packed on the host, or as it lies on the device."""

    token_ids: Array
    """[num_tokens]; below 0: -1 - i stands for the token that row i of the step before sampled."""
    positions: Array
    slots: Array
    """[num_tokens]: where keys and values go; -1 for a token of padding."""
    query_starts: Array
    context_lens: Array
    decoding: Array
    """[num_decoding]: sequences of one token."""
    tiles: Array
    """[num_tiles, 2]: of the queries of all others."""
    sampling: Array
    """Tokens whose logits are wanted: [num_samples] that a row is sampled behind, then those that are only scored."""
    rules: Array
    """[num_samples, columns of a rule]: none of them with a row of marks."""
    adapter_tiles: Array
    """[num_tiles, 3]: as `lora_tiles` says of all tokens."""
    sampled_adapter_tiles: Array
    """The same of the tokens of `sampling`."""
    block_tables: Array
    """The last one, because the same graph runs steps with tables of any width."""

    @property
    def arrays(self) -> list[Array]:
        """All of them, in order."""
        return [getattr(self, field.name) for field in fields(self)]


def pack_step(plan: StepPlan, block_size: int) -> StepInputs[Ints]:
    """A plan's arrays; by its rules nobody looks at more than logits."""
    counts = np.diff(plan.query_starts)
    seqs = np.repeat(np.arange(len(counts)), counts)
    blocks = plan.block_tables[seqs, plan.positions // block_size]
    sampling = plan.sample_tokens if plan.scored is None else np.concatenate((plan.sample_tokens, plan.scored.tokens))
    tiles = sampled_tiles = _NO_ADAPTER_TILES
    if plan.adapters is not None:
        places = plan.adapters[seqs]
        tiles, sampled_tiles = lora_tiles(places), lora_tiles(places[sampling])
    return StepInputs(
        token_ids=plan.token_ids,
        positions=plan.positions,
        slots=blocks * block_size + plan.positions % block_size,
        query_starts=plan.query_starts,
        context_lens=plan.context_lens,
        decoding=np.flatnonzero(counts == 1).astype(np.int32),
        tiles=prefill_tiles(plan.query_starts, np.flatnonzero(counts > 1).astype(np.int32)),
        sampling=sampling,
        rules=pack_rules(plan.sampling, np.full(len(plan.sample_tokens), -1, np.int32)),
        adapter_tiles=tiles,
        sampled_adapter_tiles=sampled_tiles,
        block_tables=plan.block_tables,
    )


def pad_decode(step: StepInputs[Ints], num_rows: int) -> StepInputs[Ints]:
    """A packed step in which every sequence decodes and samples, with rows of padding behind; they have no tables.

    Padding has no context, stores nothing and takes the best of its logits.
    """
    more = num_rows - len(step.token_ids)
    rows = np.arange(num_rows, dtype=np.int32)
    padding = np.zeros((more, len(RULE_COLUMNS)), np.int32)
    padding[:, -1] = -1
    return replace(
        step,
        token_ids=np.pad(step.token_ids, (0, more)),
        positions=np.pad(step.positions, (0, more)),
        slots=np.pad(step.slots, (0, more), constant_values=-1),
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        context_lens=np.pad(step.context_lens, (0, more)),
        decoding=rows,
        sampling=rows,
        rules=np.concatenate((step.rules, padding)),
    )


def to_device(packed: Tensor, arrival: Tensor, step: StepInputs[Ints]) -> StepInputs[Tensor]:
    """Copy arrays through pinned memory to one place on the device; views of them there, which are aligned."""
    views, at = [], 0
    host = packed.numpy()
    for array in step.arrays:
        host[at : at + array.size] = array.ravel()
        views.append(arrival[at : at + array.size].view(array.shape))
        at += aligned(array.size)
    arrival[:at].copy_(packed[:at], non_blocking=True)
    return StepInputs(*views)


def aligned(count: int) -> int:
    """Integers in whole lines of 16: kernels load what is aligned in one go."""
    return -(-count // 16) * 16


def size_of(step: StepInputs[Ints]) -> int:
    """Integers that `to_device` needs room for."""
    return sum(aligned(array.size) for array in step.arrays)
