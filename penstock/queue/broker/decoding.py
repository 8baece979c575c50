"""Decoding of large logs and results in small steps, so that the event loop stays responsive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.contract.output import Chunk, Outcome, Result
from penstock.queue import results, wire
from penstock.queue.packed_result import PackedResult
from penstock.runtime.cooperative import LoopYielder

_BYTES_PER_STEP = 64 << 10
"""Packed log-probabilities decoded in one step, which takes a few milliseconds; other chunks decode faster."""
_LARGE_BYTES = 16 << 10
MAX_PAGE_BYTES = 64 << 10
"""Packed log-probabilities in one page of a log; decoded, they take seven times as much memory."""
_MAX_BYTES_ON_LOOP = 256 << 10


async def decoded(entries: Sequence[bytes], yielder: LoopYielder, *, max_bytes: float = MAX_PAGE_BYTES) -> list[Chunk]:
    """Decode one page of a log. The result ends early once its log-probabilities exceed `max_bytes` packed bytes.

    `yielder` runs each step in its own round of the event loop.
    """
    chunks: list[Chunk] = []
    num_bytes = since_step = 0
    for entry in entries:
        if since_step > _BYTES_PER_STEP or len(entry) > _LARGE_BYTES:
            await yielder.wait()
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
    """Return whether the last of these chunks has log-probabilities."""
    return bool(chunks) and bool(chunks[-1].logprobs or chunks[-1].prompt_logprobs)


async def packed_result_of(data: bytes | None, job_id: str, outcome: Outcome, yielder: LoopYielder) -> PackedResult:
    """Index a result's parts without decoding them."""
    if data is not None and len(data) > _LARGE_BYTES:
        await yielder.wait()
    return PackedResult(data, job_id, outcome)


async def result_of(data: bytes | None, job_id: str, outcome: Outcome, times_ms: tuple[int, int, int, int]) -> Result:
    """Decode a result. A large one is decoded on a thread, so that the event loop can run in between."""
    if data is None:
        return Result(job_id, outcome, (), None, *times_ms)
    if len(data) <= _MAX_BYTES_ON_LOOP:
        return results.decode_result(data, job_id, outcome, times_ms)
    return await asyncio.to_thread(results.decode_result, data, job_id, outcome, times_ms)
