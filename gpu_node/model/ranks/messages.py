"""The messages of rank 0: a step or an adapter. Each is numbers at fixed places; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.adapters import AdapterRef
from penstock.gpu_node.model.protocol import ROW_COLUMNS, SamplingRows, StepPlan, TokenMasks
from penstock.gpu_node.model.ranks.memory import SharedMemory

Ints = NDArray[np.int32]

Array = NDArray[Any]

_ALIGNMENT = 16


class Kind(IntEnum):
    """What a message asks a rank to do."""

    NOTHING = 0
    STEP = 1
    ADAPTER = 2
    MASKS = 3


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
    sampling: SamplingRows | None = None
    """What each row samples by, where all ranks sample. Its arrays are copies."""


_COUNTS = (
    *("num_tokens", "num_seqs", "table_width", "num_samples", "num_copies", "num_adapters"),
    *("num_scored", "num_pooled", "returns_logits", "all_sample"),
)


def write_step(memory: SharedMemory, plan: StepPlan, *, returns_logits: bool, all_sample: bool = False) -> None:
    """Write a step; with `all_sample`, also what its rows sample by. Raises MemoryError if the memory is too small.

    Then there is memory for the masks of its rows, too.
    """
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
        *(len(plan.copies), len(adapters), len(scored), len(pooled), int(returns_logits), int(all_sample)),
    )
    if all_sample and plan.sampling.masks is not None:
        # They follow while the step runs. If there were no memory for them then, the ranks would never stop waiting.
        memory.grow(_aligned(plan.sampling.masks.words.nbytes))
    _write(memory, [np.array(counts, np.int32), *arrays, *(_arrays_of(plan.sampling) if all_sample else ())])


def read_step(memory: SharedMemory) -> RankStep:
    """Return the step that rank 0 has written. Its arrays are those in memory, valid until the next message."""
    reader = _Reader(memory)
    counts = dict(zip(_COUNTS, reader.next(np.int32, len(_COUNTS)).tolist(), strict=True))
    num_tokens, num_seqs, num_samples = (counts[name] for name in ("num_tokens", "num_seqs", "num_samples"))
    shapes = (
        *((num_tokens,), (num_tokens,), (num_seqs + 1,), (num_seqs,), (num_seqs, counts["table_width"])),
        *((num_samples,), (counts["num_copies"], 2), (counts["num_adapters"],)),
        *((counts["num_scored"],), (counts["num_pooled"],)),
    )
    arrays = [reader.next(np.int32, *shape) for shape in shapes]
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
        sampling=_read_sampling(reader, num_samples) if counts["all_sample"] else None,
    )


# --- what rows sample by, for ranks that all sample

_RAGGED: dict[str, type[np.generic]] = {"seen": np.int32, "banned": np.int32, "biased": np.int32, "biases": np.float32}
"""The arrays with any number for each row; the last two may be left out for all rows."""


def _arrays_of(rows: SamplingRows) -> Iterator[Array]:
    masks = rows.masks
    yield np.array([0 if masks is None else masks.words.shape[1]], np.int32)
    for name, kind in ROW_COLUMNS.items():
        yield np.asarray(getattr(rows, name), kind)
    for name, kind in _RAGGED.items():
        lists = getattr(rows, name)
        lengths = np.array([len(lists), *map(len, lists)], np.int32)
        yield lengths if len(lists) else np.zeros(1 + len(rows.seed), np.int32)
        yield np.concatenate([np.empty(0, kind), *lists]).astype(kind, copy=False)
    if masks is not None:
        yield masks.rows


def _read_sampling(reader: _Reader, num_rows: int) -> SamplingRows:
    (mask_words,) = reader.next(np.int32, 1).tolist()
    columns: dict[str, Any] = {name: reader.next(kind, num_rows).copy() for name, kind in ROW_COLUMNS.items()}
    ragged: dict[str, Any] = {}
    for name, kind in _RAGGED.items():
        count, *lengths = reader.next(np.int32, 1 + num_rows).tolist()
        numbers = reader.next(kind, sum(lengths)).copy()
        ends = np.cumsum([0, *lengths]).tolist()
        ragged[name] = tuple(numbers[start:end] for start, end in pairwise(ends))[:count]
    masks = TokenMasks(reader.next(np.int32, num_rows) >= 0, 32 * mask_words) if mask_words else None
    return SamplingRows(**columns, **ragged, masks=masks)


def copied(step: RankStep) -> RankStep:
    """Return a step whose arrays are not in memory that the next message overwrites."""
    given = {field.name: getattr(step, field.name) for field in fields(RankStep)}
    kept: dict[str, Any] = {name: one.copy() if isinstance(one, np.ndarray) else one for name, one in given.items()}
    return RankStep(**kept)


def write_masks(memory: SharedMemory, masks: TokenMasks) -> None:
    """Write the masks of the last step, once the engine has written them."""
    _write(memory, [masks.words])


def read_masks(memory: SharedMemory, masks: TokenMasks) -> None:
    """Read the masks of the last step, and finish them."""
    masks.words[...] = _Reader(memory).next(np.uint32, *masks.words.shape)
    masks.finish()


# --- adapters


def write_adapter(memory: SharedMemory, adapter_slot: int, adapter: AdapterRef) -> None:
    """Write that an adapter belongs into a slot. Raises MemoryError if the memory cannot hold that."""
    text = json.dumps([adapter.name, adapter.digest]).encode()
    _write(memory, [np.array([adapter_slot, len(text)], np.int32), np.frombuffer(text, np.uint8)])


def read_adapter(memory: SharedMemory) -> tuple[int, AdapterRef]:
    """Return the slot and the adapter that rank 0 has written."""
    reader = _Reader(memory)
    adapter_slot, length = reader.next(np.int32, 2).tolist()
    name, digest = json.loads(reader.next(np.uint8, length).tobytes())
    return adapter_slot, AdapterRef(name=name, digest=digest)


# --- arrays, one after another


def _write(memory: SharedMemory, arrays: Iterable[Array]) -> None:
    arrays, start = list(arrays), 0
    memory.num_written = sum(_aligned(array.nbytes) for array in arrays)
    memory.grow(memory.num_written)
    for array in arrays:
        memory.view(array.dtype.type, start, *array.shape)[...] = array
        start += _aligned(array.nbytes)


class _Reader:
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._start = 0

    def next(self, kind: type[np.generic], *shape: int) -> Array:
        array = self._memory.view(kind, self._start, *shape)
        self._start += _aligned(array.nbytes)
        return array


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
