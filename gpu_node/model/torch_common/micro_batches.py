"""The micro-batches of a step: disjoint sets of its sequences, which stages of a pipeline compute one after another."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import NO_COPIES, StepPlan


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a step."""

    plan: StepPlan
    """Its tokens alone, without copies and samples."""
    tokens: NDArray[np.int64]
    """[num_wanted]: indices into the plan's tokens, of which the hidden state is wanted."""
    rows: NDArray[np.int64]
    """[num_wanted]: the place of each one among the wanted tokens of the whole step, ascending."""


def micro_batches(plan: StepPlan, wanted: NDArray[np.int64], block_size: int, most: int) -> list[MicroBatch]:
    """Divide a step into at most `most` micro-batches with about as many tokens each.

    wanted: indices of the tokens whose hidden state is wanted. A sequence that reads a block which another one fills in
    this step is in the same micro-batch. The result depends on nothing else, so all ranks have the same.
    """
    counts = np.diff(plan.query_starts)
    parts = _shared_out(_linked(plan, block_size), counts, most) if most > 1 else [np.arange(len(counts))]
    return [_micro_batch(plan, wanted, seqs) for seqs in parts]


def _linked(plan: StepPlan, block_size: int) -> NDArray[np.int64]:
    """Return a number for each sequence, equal for those that share a block which the step fills."""
    num_seqs = len(plan.context_lens)
    group, owner = np.arange(num_seqs), dict[int, int]()
    firsts = plan.context_lens - np.diff(plan.query_starts)
    tables = [
        table[: -(-context // block_size)].tolist()
        for table, context in zip(plan.block_tables, plan.context_lens.tolist(), strict=True)
    ]
    for seq, (table, first) in enumerate(zip(tables, firsts.tolist(), strict=True)):
        for block in table[first // block_size :]:
            group[group == group[seq]] = group[owner.setdefault(block, seq)]
    for seq, (table, first) in enumerate(zip(tables, firsts.tolist(), strict=True)):
        for block in table[: first // block_size]:
            if block in owner:
                group[group == group[seq]] = group[owner[block]]
    return group


def _shared_out(group: NDArray[np.int64], counts: NDArray[np.int32], most: int) -> list[NDArray[np.int64]]:
    """Return the sequences of each micro-batch, ascending: the largest groups first, each to the smallest batch."""
    groups = sorted((np.flatnonzero(group == one) for one in np.unique(group)), key=lambda seqs: -counts[seqs].sum())
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(min(most, len(groups)))]
    sizes = [0] * len(parts)
    for seqs in groups:
        smallest = sizes.index(min(sizes))
        parts[smallest].append(seqs)
        sizes[smallest] += int(counts[seqs].sum())
    return [np.sort(np.concatenate(part)) for part in parts]


def _micro_batch(plan: StepPlan, wanted: NDArray[np.int64], seqs: NDArray[np.int64]) -> MicroBatch:
    counts = np.diff(plan.query_starts)[seqs]
    if len(seqs) == len(plan.context_lens):
        return MicroBatch(plan, wanted, np.arange(len(wanted)))
    at = np.concatenate([np.arange(plan.query_starts[seq], plan.query_starts[seq + 1]) for seq in seqs])
    places = np.full(len(plan.token_ids), -1, np.int64)
    places[at] = np.arange(len(at))
    rows = np.flatnonzero(places[wanted] >= 0)
    part = replace(
        plan,
        token_ids=plan.token_ids[at],
        positions=plan.positions[at],
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=plan.context_lens[seqs],
        block_tables=plan.block_tables[seqs],
        adapters=None if plan.adapters is None else plan.adapters[seqs],
        sample_tokens=np.empty(0, np.int32),
        copies=NO_COPIES,
        scored=None,
        pooled=None,
    )
    return MicroBatch(part, places[wanted[rows]], rows)
