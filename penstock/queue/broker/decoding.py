"""Decoding of what may be large, in steps that leave the event loop to others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.contract.job import Chunk, Outcome, Result
from penstock.queue import results, wire
from penstock.queue.packed_result import PackedResult
from penstock.runtime.cooperative import CooperativeTurns

_BYTES_PER_STEP = 64 << 10
"""Of log-probabilities, which take longest: a few milliseconds."""
_LARGE_BYTES = 16 << 10
MAX_PAGE_BYTES = 64 << 10
"""Of log-probabilities in one page of a log; decoded they take seven times as much."""
_MAX_BYTES_ON_LOOP = 256 << 10


async def decoded(
    entries: Sequence[bytes], turns: CooperativeTurns, *, max_bytes: float = MAX_PAGE_BYTES
) -> list[Chunk]:
    """The chunks of a page of a log. It ends early, with a chunk that has log-probabilities, where those are many."""
    chunks: list[Chunk] = []
    num_bytes = since_step = 0
    for entry in entries:
        if since_step > _BYTES_PER_STEP or len(entry) > _LARGE_BYTES:
            await turns.wait()
            since_step = 0
        chunks += wire.decode_chunks(entry)
        if not has_logprobs(chunks):
            continue
        num_bytes += len(entry)
        since_step += len(entry)
        if num_bytes > max_bytes:
            break
    return chunks


def has_logprobs(chunks: Sequence[Chunk]) -> bool:
    """Whether the last one of some chunks has log-probabilities."""
    return bool(chunks) and bool(chunks[-1].logprobs or chunks[-1].prompt_logprobs)


async def packed_result_of(data: bytes | None, job_id: str, outcome: Outcome, turns: CooperativeTurns) -> PackedResult:
    """A result whose parts are looked up, but not decoded."""
    if data is not None and len(data) > _LARGE_BYTES:
        await turns.wait()
    return PackedResult(data, job_id, outcome)


async def result_of(data: bytes | None, job_id: str, outcome: Outcome, times_ms: tuple[int, int, int, int]) -> Result:
    """A result from its bytes, if any; a large one is decoded on a thread, which lets others run in between."""
    if data is None:
        return Result(job_id, outcome, (), None, *times_ms)
    if len(data) <= _MAX_BYTES_ON_LOOP:
        return results.decode_result(data, job_id, outcome, times_ms)
    return await asyncio.to_thread(results.decode_result, data, job_id, outcome, times_ms)
