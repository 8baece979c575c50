"""A step's plan on the device: packed into one run of integers, which one copy brings there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.protocol import StepPlan
from penstock.kernels.triton.prefill_attention import prefill_tiles
from penstock.kernels.triton.sampler import RULE_COLUMNS, pack_rules

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What the kernels read of a step, int32 on the device."""

    token_ids: Tensor
    """[num_tokens]; below 0: -1 - i stands for the token that row i of the step before sampled."""
    positions: Tensor
    slots: Tensor
    """[num_tokens]: where keys and values go; -1 for a token of padding."""
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    decoding: Tensor
    """[num_decoding]: sequences of one token."""
    tiles: Tensor
    """[num_tiles, 2]: of the queries of all others."""
    sampling: Tensor
    """Tokens whose logits are wanted: [num_samples] that a row is sampled behind, then those that are only scored."""
    rules: Tensor
    """[num_samples, columns of a rule]: none of them with a row of marks."""


def pack_step(plan: StepPlan, block_size: int) -> list[Ints]:
    """A plan's arrays in the order of StepInputs; by its rules nobody looks at more than logits."""
    counts = np.diff(plan.query_starts)
    seqs = np.repeat(np.arange(len(counts)), counts)
    blocks = plan.block_tables[seqs, plan.positions // block_size]
    return [
        plan.token_ids,
        plan.positions,
        blocks * block_size + plan.positions % block_size,
        plan.query_starts,
        plan.context_lens,
        plan.block_tables,
        np.flatnonzero(counts == 1).astype(np.int32),
        prefill_tiles(plan.query_starts, np.flatnonzero(counts > 1).astype(np.int32)),
        plan.sample_tokens if plan.scored is None else np.concatenate((plan.sample_tokens, plan.scored.tokens)),
        pack_rules(plan.sampling, np.full(len(plan.sample_tokens), -1, np.int32)),
    ]


def pad_decode(arrays: list[Ints], num_rows: int) -> list[Ints]:
    """A packed step in which every sequence decodes and samples, with rows of padding behind; tables come last.

    Padding has no context, stores nothing and takes the best of its logits.
    """
    ids, positions, slots, _, contexts, tables, _, tiles, _, rules = arrays
    more = num_rows - len(ids)
    rows = np.arange(num_rows, dtype=np.int32)
    padding = np.zeros((more, len(RULE_COLUMNS)), np.int32)
    padding[:, -1] = -1
    return [
        *(np.pad(ids, (0, more)), np.pad(positions, (0, more)), np.pad(slots, (0, more), constant_values=-1)),
        *(np.arange(num_rows + 1, dtype=np.int32), np.pad(contexts, (0, more))),
        *(rows, tiles, rows, np.concatenate((rules, padding)), tables),
    ]


def to_device(packed: Tensor, arrival: Tensor, arrays: list[Ints]) -> list[Tensor]:
    """Copy arrays through pinned memory to one place on the device; views of them there, which are aligned."""
    views, at = [], 0
    host = packed.numpy()
    for array in arrays:
        host[at : at + array.size] = array.ravel()
        views.append(arrival[at : at + array.size].view(array.shape))
        at += aligned(array.size)
    arrival[:at].copy_(packed[:at], non_blocking=True)
    return views


def aligned(count: int) -> int:
    """Integers in whole lines of 16: kernels load what is aligned in one go."""
    return -(-count // 16) * 16


def size_of(arrays: list[Ints]) -> int:
    """Integers that `to_device` needs room for."""
    return sum(aligned(array.size) for array in arrays)
