"""The messages of rank 0: a step or an adapter. Each is numbers at fixed places; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from penstock.contract.adapters import AdapterRef
from penstock.gpu_node.model.protocol import StepPlan
from penstock.gpu_node.model.ranks.memory import SharedMemory

Ints = NDArray[np.int32]

_ALIGNMENT = 16


class Kind(IntEnum):
    """What a message asks a rank to do."""

    NOTHING = 0
    STEP = 1
    ADAPTER = 2


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a rank that does not sample knows of a step. The arrays are those of `StepPlan`, in shared memory."""

    token_ids: Ints
    positions: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    sample_tokens: Ints
    copies: Ints
    adapters: Ints | None
    scored_tokens: Ints
    pooled_tokens: Ints
    returns_logits: bool
    """Whether the logits after all tokens are wanted, and no samples."""


_COUNTS = (
    *("num_tokens", "num_seqs", "table_width", "num_samples", "num_copies", "num_adapters"),
    *("num_scored", "num_pooled", "returns_logits"),
)


def write_step(memory: SharedMemory, plan: StepPlan, *, returns_logits: bool) -> None:
    """Write a step. Raises MemoryError if the memory cannot hold it."""
    none = np.empty(0, np.int32)
    scored = none if plan.scored is None else plan.scored.tokens
    pooled = none if plan.pooled is None else plan.pooled.tokens
    adapters = none if plan.adapters is None else plan.adapters
    arrays: Sequence[Ints] = (
        *(plan.token_ids, plan.positions, plan.query_starts, plan.context_lens, plan.block_tables),
        *(plan.sample_tokens, plan.copies, adapters, scored, pooled),
    )
    counts = (
        *(len(plan.token_ids), len(plan.context_lens), plan.block_tables.shape[1], len(plan.sample_tokens)),
        *(len(plan.copies), len(adapters), len(scored), len(pooled), int(returns_logits)),
    )
    start = _aligned(4 * len(_COUNTS))
    memory.grow(start + sum(_aligned(4 * array.size) for array in arrays))
    memory.view(np.int32, 0, len(counts))[:] = counts
    for array in arrays:
        memory.view(np.int32, start, *array.shape)[...] = array
        start += _aligned(4 * array.size)


def read_step(memory: SharedMemory) -> RankStep:
    """Return the step that rank 0 has written. Its arrays are those in memory, valid until the next message."""
    counts = dict(zip(_COUNTS, memory.view(np.int32, 0, len(_COUNTS)).tolist(), strict=True))
    num_tokens, num_seqs = counts["num_tokens"], counts["num_seqs"]
    shapes = (
        *((num_tokens,), (num_tokens,), (num_seqs + 1,), (num_seqs,), (num_seqs, counts["table_width"])),
        *((counts["num_samples"],), (counts["num_copies"], 2), (counts["num_adapters"],)),
        *((counts["num_scored"],), (counts["num_pooled"],)),
    )
    start, arrays = _aligned(4 * len(_COUNTS)), list[Ints]()
    for shape in shapes:
        arrays.append(array := memory.view(np.int32, start, *shape))
        start += _aligned(4 * array.size)
    tokens, positions, query_starts, context_lens, tables, samples, copies, adapters, scored, pooled = arrays
    return RankStep(
        token_ids=tokens,
        positions=positions,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables,
        sample_tokens=samples,
        copies=copies,
        adapters=adapters if counts["num_adapters"] else None,
        scored_tokens=scored,
        pooled_tokens=pooled,
        returns_logits=bool(counts["returns_logits"]),
    )


def write_adapter(memory: SharedMemory, adapter_slot: int, adapter: AdapterRef) -> None:
    """Write that an adapter belongs into a slot. Raises MemoryError if the memory cannot hold that."""
    text = json.dumps([adapter.name, adapter.digest]).encode()
    memory.grow(8 + len(text))
    memory.view(np.int32, 0, 2)[:] = adapter_slot, len(text)
    memory.view(np.uint8, 8, len(text))[:] = np.frombuffer(text, np.uint8)


def read_adapter(memory: SharedMemory) -> tuple[int, AdapterRef]:
    """Return the slot and the adapter that rank 0 has written."""
    adapter_slot, length = memory.view(np.int32, 0, 2).tolist()
    name, digest = json.loads(memory.view(np.uint8, 8, length).tobytes())
    return adapter_slot, AdapterRef(name=name, digest=digest)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
