"""How unsent chunks are divided into emit calls."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.queue.broker.node import MAX_EMIT_BYTES, MAX_EMIT_JOBS, Emission


def fits_one_call(num_jobs: int, num_bytes: int) -> bool:
    """Return whether the emissions of so many jobs, with so many bytes of chunks, may share one emit call."""
    return num_jobs <= MAX_EMIT_JOBS and num_bytes <= MAX_EMIT_BYTES


def size_of(emission: Emission) -> int:
    """Return the bytes of an emission's chunks."""
    return sum(map(len, emission.chunks))


def emit_batches(emissions: Iterable[Emission]) -> list[list[Emission]]:
    """Split emissions into emit calls, by number of jobs and by bytes. A larger emission has a call of its own."""
    batches: list[list[Emission]] = []
    num_bytes = 0
    for emission in emissions:
        size = size_of(emission)
        if not batches or not fits_one_call(len(batches[-1]) + 1, num_bytes + size):
            batches.append([])
            num_bytes = 0
        batches[-1].append(emission)
        num_bytes += size
    return batches
