"""The number of prompt tokens that a step may compute while other sequences decode in it."""

from __future__ import annotations

from itertools import chain

from penstock.gpu_node.engine.scheduler.limits import StepLimits
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.scheduler.step_time import StepTime
from penstock.gpu_node.engine.scheduler.waiting import WaitingQueues
from penstock.gpu_node.engine.steps import Ints

BACKLOG_STEPS = 8
"""A backlog of prompts may be spread over this many steps, if only its own tenant waits for them."""
MAX_BACKLOG_FACTOR = 4
"""Such a backlog lengthens a step to at most this multiple of the limit."""


class PrefillBudget:
    """Bounds the time that prompts add to the steps of sequences that decode.

    The time is the larger one of `StepLimits.max_prefill_ms_beside_decode` and of what the decoding sequences need
    themselves, so prompts get at least half of the time. Chunked prefill with a bound on the time between tokens is
    described as Sarathi-Serve (Agrawal et al., arXiv:2403.02310).
    """

    def __init__(self, limits: StepLimits, batch: RunningBatch, queues: WaitingQueues, step_time: StepTime) -> None:
        self._limits = limits
        self._batch = batch
        self._queues = queues
        self._time = step_time

    def num_tokens(self, num_to_compute: Ints, num_decoded: int) -> int:
        """Return the number of prompt tokens for the next step, at least one.

        num_to_compute: [num_running], tokens that each running sequence lacks; those that lack one decode.

        num_decoded: tokens that the decoding sequences compute, drafted ones included.
        """
        limits = self._limits
        max_tokens = limits.max_prefill_beside_decode
        if limits.max_prefill_ms_beside_decode is None:
            return max_tokens
        chunks = self._chunks(num_to_compute, max_tokens)
        limit_ms = max(limits.max_prefill_ms_beside_decode, self._time.decode_ms(num_decoded))
        backlog_ms = sum(count * token_ms for count, token_ms in chunks) / BACKLOG_STEPS
        if backlog_ms > limit_ms and self._has_one_tenant():
            limit_ms = max(limit_ms, min(backlog_ms, MAX_BACKLOG_FACTOR * limits.max_prefill_ms_beside_decode))
        return max(1, min(max_tokens, _tokens_within(limit_ms, chunks)))

    def _chunks(self, num_to_compute: Ints, max_tokens: int) -> list[tuple[int, float]]:
        """Return, for each prompt in the order of the step, its tokens to compute and the milliseconds of one token.

        Prompts beyond the longest backlog that counts make no difference, so they are left out.
        """
        table, rows, seqs = self._batch.table, self._batch.rows, self._batch.seqs
        chunks: list[tuple[int, float]] = []
        left = max_tokens * BACKLOG_STEPS * MAX_BACKLOG_FACTOR
        for i in (num_to_compute > 1).nonzero()[0].tolist():
            count, seq = int(num_to_compute[i]), seqs[i]
            chunks.append((count, self._time.token_ms(int(table.num_computed[rows[i]]), is_scored=seq.is_scoring)))
            left -= count
        for seq in self._queues.waiting:
            if left <= 0:
                break
            chunks.append((len(seq.token_ids), self._time.token_ms(0, is_scored=seq.is_scoring)))
            left -= len(seq.token_ids)
        return chunks

    def _has_one_tenant(self) -> bool:
        return len({seq.tenant for seq in chain(self._batch.seqs, self._queues)}) == 1


def _tokens_within(limit_ms: float, chunks: list[tuple[int, float]]) -> int:
    """Return how many tokens of the chunks, in order, take at most `limit_ms`."""
    num_tokens = 0
    for count, token_ms in chunks:
        if count * token_ms > limit_ms:
            return num_tokens + int(limit_ms / token_ms)
        num_tokens += count
        limit_ms -= count * token_ms
    return num_tokens
