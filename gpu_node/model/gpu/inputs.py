"""The inputs of a step on the GPU, and the sampler's marks for rows that depend on more than their logits.

The inputs are packed into one int32 array, so that one copy transfers them. Marks are seen and banned tokens, biases
and masks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.protocol import SamplingRows, StepPlan
from penstock.kernels.triton.copies import to_device_async
from penstock.kernels.triton.decode_attention import longest_first
from penstock.kernels.triton.lora import lora_tiles
from penstock.kernels.triton.prefill_attention import QUERY_TILE, prefill_tiles
from penstock.kernels.triton.sampler import Marks, mark_entries, pack_rules

Ints = NDArray[np.int32]
Array = TypeVar("Array", Ints, Tensor)
_NO_ADAPTER_TILES = np.zeros((0, 3), np.int32)
_NOTHING = np.zeros(0, np.int32)
_NO_SAVES = np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs(Generic[Array]):
    """The int32 arrays that the kernels read for a step, on the host or on the device."""

    token_ids: Array
    """[num_tokens]; -1 - i stands for the token that row i of the previous step sampled."""
    positions: Array
    slots: Array
    """[num_tokens]: KV cache slots that keys and values are stored to; -1 for padding tokens."""
    query_starts: Array
    context_lens: Array
    decoding: Array
    """[num_decoding]: sequences with one token in the step, the one with the longest context first; -1 for padding."""
    tiles: Array
    """[num_tiles, 2]: query tiles of all other sequences, from `prefill_tiles`; -1 for padding tiles."""
    sampling: Array
    """Tokens that the last layer computes: [num_samples] tokens to sample after, then tokens that are only scored, then
    tokens of which only the hidden state is wanted."""
    rules: Array
    """[num_samples, len(RULE_COLUMNS)]: sampling rules, none of which refers to a row of marks."""
    adapter_tiles: Array
    """[num_tiles, 3]: tiles of tokens with an adapter, from `lora_tiles`; a padding tile has no row."""
    sampled_adapter_tiles: Array
    """[num_tiles, 3]: the same for the tokens of `sampling`."""
    owners: Array
    """[num_tokens]: the sequence of each token, -1 for padding tokens; as the next four, empty for a model without
    recurrent layers. `StateRows` describes them."""
    state_reads: Array
    """[num_seqs]: the slot with the state before a sequence's first token; -1: zeros."""
    state_writes: Array
    """[num_seqs]: the slot for the state after its last token."""
    save_starts: Array
    """[num_seqs + 1]: the first of `state_saves` of each sequence."""
    state_saves: Array
    """[num_saves, 2]: a token, ascending, and the slot that gets the state after it."""
    block_tables: Array
    """[num_seqs, max_blocks]. Stays the last field, because one graph runs steps with tables of any width."""

    @property
    def arrays(self) -> list[Array]:
        """All fields in order."""
        return [getattr(self, field.name) for field in fields(self)]


def pack_step(plan: StepPlan, block_size: int, query_rows: int = QUERY_TILE) -> StepInputs[Ints]:
    """Pack the arrays of a plan. Its sampling rules refer to no marks, so rows choose by their logits alone.

    query_rows: queries per tile of prefill attention.
    """
    counts = np.diff(plan.query_starts)
    seqs = np.repeat(np.arange(len(counts)), counts)
    blocks = plan.block_tables[seqs, plan.positions // block_size]
    others = (some.tokens for some in (plan.scored, plan.pooled) if some is not None)
    sampling = np.concatenate((plan.sample_tokens, *others))
    tiles = sampled_tiles = _NO_ADAPTER_TILES
    if plan.adapters is not None:
        slots = plan.adapters[seqs]
        tiles, sampled_tiles = lora_tiles(slots), lora_tiles(slots[sampling])
    return StepInputs(
        token_ids=plan.token_ids,
        positions=plan.positions,
        slots=blocks * block_size + plan.positions % block_size,
        query_starts=plan.query_starts,
        context_lens=plan.context_lens,
        decoding=longest_first(np.flatnonzero(counts == 1).astype(np.int32), plan.context_lens),
        tiles=prefill_tiles(plan.query_starts, np.flatnonzero(counts > 1).astype(np.int32), query_rows),
        sampling=sampling,
        rules=pack_rules(plan.sampling, np.full(len(plan.sample_tokens), -1, np.int32)),
        adapter_tiles=tiles,
        sampled_adapter_tiles=sampled_tiles,
        **_state_arrays(plan, seqs),
        block_tables=plan.block_tables,
    )


def _state_arrays(plan: StepPlan, owners: NDArray[np.int64]) -> dict[str, Ints]:
    """Return the arrays of a step's states. owners: the sequence of each token."""
    states = plan.states
    if states is None:
        empty = dict.fromkeys(("owners", "state_reads", "state_writes", "save_starts"), _NOTHING)
        return {**empty, "state_saves": _NO_SAVES}
    return {
        "owners": owners.astype(np.int32),
        "state_reads": states.reads,
        "state_writes": states.writes,
        "save_starts": np.searchsorted(states.saves[:, 0], plan.query_starts).astype(np.int32),
        "state_saves": states.saves,
    }


def to_device(packed: Tensor, arrival: Tensor, step: StepInputs[Ints]) -> StepInputs[Tensor]:
    """Copy a step's arrays to the device in one transfer and return aligned views of them there.

    packed: a pinned staging buffer; arrival: the device buffer.
    """
    views, at = [], 0
    host = packed.numpy()
    for array in step.arrays:
        host[at : at + array.size] = array.ravel()
        views.append(arrival[at : at + array.size].view(array.shape))
        at += aligned(array.size)
    arrival[:at].copy_(packed[:at], non_blocking=True)
    return StepInputs(*views)


def aligned(count: int) -> int:
    """Round a number of int32 up to a multiple of 16 (64 bytes), because kernels load aligned arrays faster."""
    return -(-count // 16) * 16


def size_of(step: StepInputs[Ints]) -> int:
    """Return the number of int32 that `to_device` needs for a step."""
    return sum(aligned(array.size) for array in step.arrays)


FIRST_ROWS = 8
"""Rows of marks allocated at start. A row takes 8 bytes per token of the vocabulary."""


class RowMarks:
    """Holds the sampler's marks: one row per sampling row that needs marks. Grows to the largest step so far."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.marks = Marks.empty(FIRST_ROWS, vocab, device)

    def write(self, rows: SamplingRows, mark_rows: Ints) -> Tensor:
        """Wait for the masks, write the marks, and return the sampling rules of all rows.

        mark_rows: [num_samples], from `mark_rows_of`.
        """
        marked = np.flatnonzero(mark_rows >= 0).tolist()
        self.reserve(len(marked))
        self.marks.clear(len(marked))
        entries = [
            mark_entries(mark_row, rows.seen[i], int(rows.num_seen_prompt[i]), rows.banned[i])
            for mark_row, i in enumerate(marked)
        ]
        self.marks.add(self._sent(np.concatenate(entries)))
        if rows.biased:
            owners = np.repeat(mark_rows[marked], [len(rows.biased[i]) for i in marked])
            biased, biases = (np.concatenate([lists[i] for i in marked]) for lists in (rows.biased, rows.biases))
            self.marks.biases[self._sent(owners), self._sent(biased)] = self._sent(biases)
        if rows.masks is not None:
            rows.masks.wait()
            masked = np.flatnonzero(rows.masks.rows >= 0)
            words = rows.masks.words[rows.masks.rows[masked]].view(np.int32)
            self.marks.allow_only(self._sent(mark_rows[masked]), self._sent(words))
        return self._sent(pack_rules(rows, mark_rows))

    def compile(self) -> None:
        """Compile the kernels that write marks by writing unused ones."""
        row, words = np.zeros(1, np.int32), np.zeros((1, -(-self.marks.marks.shape[1] // 32)), np.int32)
        self.marks.add(self._sent(np.zeros((1, 3), np.int32)))
        self.marks.allow_only(self._sent(row), self._sent(words))

    def reserve(self, num_rows: int) -> None:
        """Allocate at least `num_rows` rows of marks; growing discards their contents."""
        have, vocab = self.marks.marks.shape
        if num_rows > have:
            device = self.marks.marks.device
            self.marks = Marks.empty(1, 1, device)  # free the old marks before allocating new ones
            self.marks = Marks.empty(max(num_rows, 2 * have), vocab, device)

    def _sent(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return to_device_async(array, self.marks.marks.device)


def mark_rows_of(rows: SamplingRows) -> Ints:
    """Return the row of marks of each sampling row, [num_samples]; -1 for rows that depend only on their logits."""
    has_marks = np.zeros(len(rows.seen), dtype=bool)
    for arrays in (rows.seen, rows.banned, rows.biased):
        if any(map(len, arrays)):
            has_marks |= np.fromiter(map(len, arrays), np.int64, len(arrays)) > 0
    if rows.masks is not None:
        has_marks |= rows.masks.rows >= 0
    return np.where(has_marks, np.cumsum(has_marks) - 1, -1).astype(np.int32)
