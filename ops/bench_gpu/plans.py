"""Step plans made by hand: sequences that compute any number of tokens behind a context."""

from __future__ import annotations

from typing import Any

import numpy as np
from fixtures.sampling import PLAIN
from numpy.typing import NDArray

from bench_gpu.models import BLOCK_SIZE, Model
from penstock.gpu_node.model.protocol import NO_ADAPTER, ROW_COLUMNS, SamplingRows, StepPlan

Ints = NDArray[np.int32]
_NOTHING = np.zeros(0, np.int32)


def sampling_rows(positions: Ints, **rules: Any) -> SamplingRows:
    """Return rows that draw from the whole softmax. rules: fields of SamplingRows with one number for all rows."""
    count = len(positions)
    given: dict[str, Any] = dict.fromkeys(ROW_COLUMNS, 0) | {"seed": np.arange(count)}
    given |= PLAIN | {"position": positions}
    columns: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(rules.pop(name, given[name]), dtype), (count,)).copy()
        for name, dtype in ROW_COLUMNS.items()
    }
    zeros = np.zeros(0, np.float32)
    return SamplingRows(
        **columns,
        seen=(_NOTHING,) * count,
        banned=(_NOTHING,) * count,
        biased=(_NOTHING,) * count,
        biases=(zeros,) * count,
        **rules,
    )


def plan_of(ids: list[Ints], starts: NDArray[Any], tables: Ints, sampled: NDArray[Any], **rules: Any) -> StepPlan:
    """Return a step in which sequence i computes `ids[i]` behind `starts[i]` tokens, and those of `sampled` sample.

    rules: as for `sampling_rows`; `adapters`: the adapter slot of each sequence, -1 for none.
    """
    counts = np.array([len(tokens) for tokens in ids])
    adapters = rules.pop("adapters", None)
    contexts = (starts + counts).astype(np.int32)
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
    return StepPlan(
        token_ids=np.concatenate(ids).astype(np.int32),
        positions=positions.astype(np.int32),
        query_starts=query_starts,
        context_lens=contexts,
        block_tables=np.ascontiguousarray(tables[:, :width]),
        sample_tokens=(query_starts[sampled + 1] - 1).astype(np.int32),
        sampling=sampling_rows(contexts[sampled], **rules),
        adapters=adapters if adapters is not None and (adapters != NO_ADAPTER).any() else None,
    )


def decode_plan(ids: Ints, context: int, tables: Ints, **rules: Any) -> StepPlan:
    """Return a step in which every sequence computes one token, ids[i], at the end of a context, and samples."""
    count = len(ids)
    return plan_of(list(ids.reshape(-1, 1)), np.full(count, context - 1), tables, np.arange(count), **rules)


def random_tables(model: Model, batch: int, tokens: int) -> Ints | None:
    """Return block tables with blocks dealt at random, or None if the cache does not hold them."""
    width = -(-tokens // BLOCK_SIZE)
    if batch * width > model.sizes.num_device_blocks:
        return None
    blocks = np.random.default_rng(0).permutation(model.sizes.num_device_blocks)[: batch * width] + 1
    return blocks.astype(np.int32).reshape(batch, width)
