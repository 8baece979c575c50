"""A step in the form that the kernels take: counts, and the addresses of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import Logprobs, SamplingRows, StepPlan
from penstock.gpu_node.model.ranks.messages import RankStep
from penstock.kernels.cpu.structs import SAMPLING_COLUMNS, NativePlan


class StepOutputs(NamedTuple):
    """The arrays that the kernels write a step's results to."""

    tokens: NDArray[np.int32]
    logprobs: Logprobs | None
    scores: Logprobs | None
    times_ms: NDArray[np.float32]
    hidden: NDArray[np.float32] | None


_columns_of = attrgetter(*SAMPLING_COLUMNS)
"""Returns the columns of SamplingRows in the order of a NativePlan."""


def step_fields(plan: StepPlan) -> tuple[int | None, ...]:
    """Return the fields of a NativePlan that come before its ragged ones."""
    return (
        *(len(plan.token_ids), len(plan.context_lens), len(plan.sample_tokens)),
        plan.block_tables.strides[0] // plan.block_tables.itemsize,
        *addresses(plan.token_ids, plan.positions, plan.query_starts, plan.block_tables, plan.sample_tokens),
        *addresses(*_columns_of(plan.sampling)),
    )


def logprob_buffers(num_logprobs: NDArray[np.int32] | None, vocab_size: int) -> Logprobs | None:
    """Allocate uninitialized logprobs, wide enough for the row that wants the most; None where no row wants any."""
    if num_logprobs is None:
        return None
    shape = len(num_logprobs), 1 + min(int(num_logprobs.max()), vocab_size)
    return Logprobs(np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32))


def wanted_logprobs(plan: StepPlan, outputs: StepOutputs) -> dict[str, int | None]:
    """Return the fields of a NativePlan for logprobs and scores."""
    fields: dict[str, int | None] = {}
    if (buffers := outputs.logprobs) is not None:
        arrays = plan.sampling.num_logprobs, buffers.token_ids, buffers.values
        fields |= zip(("num_logprobs", "logprob_ids", "logprobs"), addresses(*arrays), strict=True)
        fields["logprobs_width"] = buffers.values.shape[1]
    if (scored := plan.scored) is not None and (buffers := outputs.scores) is not None:
        names = "scored_tokens", "score_targets", "num_score_logprobs", "score_ids", "scores"
        wanted = scored.tokens, scored.targets, scored.num_logprobs
        fields |= zip(names, addresses(*wanted, buffers.token_ids, buffers.values), strict=True)
        fields |= {"num_scored": len(scored.tokens), "scores_width": buffers.values.shape[1]}
    return fields


def wanted_hidden(plan: StepPlan, outputs: StepOutputs) -> dict[str, int | None]:
    """Return the fields of a NativePlan for hidden states."""
    if plan.pooled is None:
        return {}
    tokens, hidden = addresses(plan.pooled.tokens, outputs.hidden)
    return {"num_pooled": len(plan.pooled.tokens), "pooled_tokens": tokens, "hidden": hidden}


Table: TypeAlias = NDArray[Any] | None
NOTHING_RAGGED: tuple[Table, ...] = (None,) * 10


def ragged_fields(rows: SamplingRows) -> tuple[Table, ...]:
    """Return the per-row lists of `rows` as tables of addresses and lengths; None where all lists are empty."""
    seen, num_seen = _table(rows.seen)
    banned, num_banned = _table(rows.banned)
    biased, num_biased = _table(rows.biased)
    biases = None if biased is None else _pointers(rows.biases)
    masks = written = None
    if (given := rows.masks) is not None:
        # The address of each row's mask; 0 for rows without a mask.
        starts = given.words.ctypes.data + given.rows.astype(np.uint64) * np.uint64(given.words.strides[0])
        masks, written = np.where(given.rows >= 0, starts, np.uint64(0)), given.written
    return seen, num_seen, rows.num_seen_prompt, banned, num_banned, biased, biases, num_biased, masks, written


def _table(lists: Sequence[NDArray[np.int32]]) -> tuple[Table, Table]:
    if not any(map(len, lists)):
        return None, None
    return _pointers(lists), np.array([len(ids) for ids in lists], dtype=np.int32)


def _pointers(lists: Sequence[NDArray[Any]]) -> NDArray[np.uint64]:
    return np.array(addresses(*lists), dtype=np.uint64)


def addresses(*arrays: Table) -> list[int | None]:
    return [None if array is None else array.__array_interface__["data"][0] for array in arrays]


def rank_plan(step: RankStep) -> NativePlan:
    """Return a step for a rank that does not sample. The step's arrays must outlive it."""
    names = ("token_ids", "positions", "query_starts", "block_tables", "sample_tokens")
    arrays = step.token_ids, step.positions, step.query_starts, step.block_tables, step.sample_tokens
    plan = NativePlan(len(step.token_ids), len(step.context_lens), len(step.sample_tokens), step.block_tables.shape[1])
    fields = dict(zip(names, addresses(*arrays), strict=True))
    fields["adapters"], fields["copies"] = addresses(step.adapters, step.copies)
    fields["scored_tokens"], fields["pooled_tokens"] = addresses(step.scored_tokens, step.pooled_tokens)
    # It writes no logits: the address only tells that rank 0 does.
    fields["logits"] = fields["token_ids"] if step.returns_logits else None
    for name, address in fields.items():
        setattr(plan, name, address)
    plan.num_copies, plan.num_scored = len(step.copies), len(step.scored_tokens)
    plan.num_pooled = len(step.pooled_tokens)
    return plan
