"""Steps for a runner, made by hand: sequences that advance by as many tokens as a test likes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from fakes.sampling import rows_of
from numpy.typing import NDArray

from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import NO_ADAPTER, SamplingRows, StepPlan


@dataclass
class Track:
    """A sequence on its way through the steps."""

    token_ids: Sequence[int]
    blocks: Sequence[int]
    done: int = 0
    adapter: int = NO_ADAPTER

    @property
    def left(self) -> int:
        return len(self.token_ids) - self.done


def plan_of(
    parts: Iterable[tuple[Track, int]], sampling: SamplingRows | None = None, copies: Sequence[tuple[int, int]] = ()
) -> StepPlan:
    """A step in which each track advances by a number of tokens; with `sampling`, all of them sample."""
    parts = list(parts)
    spans = [range(track.done, track.done + count) for track, count in parts]
    adapters = np.array([track.adapter for track, _ in parts], np.int32)
    tables = np.zeros((len(parts), max(len(track.blocks) for track, _ in parts)), np.int32)
    for row, (track, _) in zip(tables, parts, strict=True):
        row[: len(track.blocks)] = track.blocks
    query_starts = np.cumsum([0, *(count for _, count in parts)]).astype(np.int32)
    return StepPlan(
        token_ids=np.array([t.token_ids[i] for (t, _), span in zip(parts, spans, strict=True) for i in span], np.int32),
        positions=np.array([i for span in spans for i in span], np.int32),
        query_starts=query_starts,
        context_lens=np.array([span.stop for span in spans], np.int32),
        block_tables=tables,
        sample_tokens=query_starts[1:] - 1 if sampling else np.empty(0, np.int32),
        sampling=sampling or rows_of(0),
        copies=np.array(copies, np.int32).reshape(-1, 2),
        adapters=adapters if (adapters != NO_ADAPTER).any() else None,
    )


def logits_of_step(runner: NativeRunner, parts: Sequence[tuple[Track, int]]) -> list[NDArray[np.float32]]:
    """Advance tracks in one step; the logits of each track's tokens."""
    plan = plan_of(parts)
    logits = runner.logits(plan)
    for track, count in parts:
        track.done += count
    return np.split(logits, plan.query_starts[1:-1])


def tokens_of_step(
    runner: NativeRunner, parts: Sequence[tuple[Track, int]], sampling: SamplingRows
) -> NDArray[np.int32]:
    """Advance tracks in one step; the token that each samples."""
    plan = plan_of(parts, sampling)
    tokens = runner.submit(plan).result().tokens
    for track, count in parts:
        track.done += count
    return tokens


def logits_alone(runner: NativeRunner, token_ids: Sequence[int], block_size: int = 16) -> NDArray[np.float32]:
    """The logits of a sequence that is computed by itself, in one step and from the first block on."""
    track = Track(token_ids, range(1, 1 + -(-len(token_ids) // block_size)))
    return logits_of_step(runner, [(track, len(token_ids))])[0]
