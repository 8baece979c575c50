"""How unsent chunks are divided into emit calls."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.queue.broker.node import MAX_EMIT_BYTES, MAX_EMIT_JOBS, Emission


def emit_batches(emissions: Iterable[Emission]) -> list[list[Emission]]:
    """Split emissions into emit calls, by number of jobs and by bytes."""
    batches: list[list[Emission]] = []
    num_bytes = 0
    for emission in emissions:
        size = sum(map(len, emission.chunks))
        if not batches or len(batches[-1]) >= MAX_EMIT_JOBS or num_bytes + size > MAX_EMIT_BYTES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(emission)
        num_bytes += size
    return batches
