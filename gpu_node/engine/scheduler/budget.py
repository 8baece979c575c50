"""The size of a step: its predicted time, its limits, and the shares of prompts, sequences and small steps in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from penstock.gpu_node.engine.scheduler.queues import WaitingQueues
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Step

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig


_LEARNING_RATE = 0.3
"""Share of a prediction's error, as a ratio, that one step corrects."""
_MAX_LOG_ERROR = math.log(2)
"""Larger errors count as this: other processes may have delayed a single step."""
_DECODE_SHARE = 0.1
"""Weight of errors in steps with prompts for the decode cost: steps without prompts show that cost by itself."""
_MIN_MS = 1e-3
_CONTEXT_TOKENS = 1000


class StepWork(NamedTuple):
    """What a step computes, in the quantities that its time depends on."""

    num_decoded: int
    """Tokens of sequences that decode, drafted ones included."""
    num_prefilled: int
    """Prompt tokens."""
    num_attended: int
    """Sum, over prompt tokens, of the tokens that are stored before their chunk."""
    num_scored: int
    """Prompt tokens with log-probabilities requested; each needs a row of logits."""

    @classmethod
    def of(cls, step: Step, num_scored: int) -> Self:
        """Return the work of a step that scores `num_scored` prompt tokens."""
        num_attended = 0
        if step.num_prefill_tokens:
            counts = step.ends - step.starts
            is_chunk = counts > 1
            num_attended = int((counts[is_chunk].astype("int64") * step.starts[is_chunk]).sum())
        return cls(step.num_tokens - step.num_prefill_tokens, step.num_prefill_tokens, num_attended, num_scored)


class StepTime:
    """A linear model of a step's milliseconds with five positive weights.

    The weights are learned by normalized least mean squares (Haykin, Adaptive Filter Theory, chapter 7). The error is
    that of the logarithm of the prediction, so the weights stay positive and need no units. Each weight takes the part
    of the error that is in proportion to its part of the prediction. The first step sets the scale of all weights.
    """

    def __init__(self) -> None:
        # A fixed part, a decoded token, a prompt token, 1,000 tokens before a prompt token, a scored token: measured
        # ratios of a 135M model on two cores.
        self._weights = [4.0, 1.0, 1.0, 0.15, 0.3]
        self._has_scale = False

    def note(self, work: StepWork, took_ms: float) -> None:
        """Learn from a step that took `took_ms`."""
        parts = self._parts(work)
        predicted = sum(parts)
        error = math.log(max(took_ms, _MIN_MS) / predicted)
        if not self._has_scale:
            self._has_scale = True
            self._weights = [weight * math.exp(error) for weight in self._weights]
            return
        error = _LEARNING_RATE * min(max(error, -_MAX_LOG_ERROR), _MAX_LOG_ERROR)
        shares = [part / predicted for part in parts]
        steps = [_DECODE_SHARE * share if work.num_prefilled and i < 2 else share for i, share in enumerate(shares)]
        norm = sum(map(mul, steps, shares))
        self._weights = [
            weight * math.exp(error * step / norm) for weight, step in zip(self._weights, steps, strict=True)
        ]

    @property
    def costs_ms(self) -> tuple[float, float, float] | None:
        """The milliseconds of a step without tokens, of a decoded and of a prompt token; None before any step."""
        return (self._weights[0], self._weights[1], self._weights[2]) if self._has_scale else None

    def decode_ms(self, num_decoded: int) -> float:
        """Return the milliseconds of a step that decodes `num_decoded` tokens and nothing else."""
        return self.step_ms(StepWork(num_decoded, 0, 0, 0))

    def step_ms(self, work: StepWork) -> float:
        """Return the milliseconds of a step."""
        return sum(self._parts(work))

    def token_ms(self, num_before: int, *, is_scored: bool) -> float:
        """Return the milliseconds that a prompt token adds to a step after `num_before` stored tokens of its prompt."""
        _, _, token, context, scored = self._weights
        return token + context * num_before / _CONTEXT_TOKENS + (scored if is_scored else 0.0)

    def _parts(self, work: StepWork) -> tuple[float, ...]:
        fixed, decoded, token, context, scored = self._weights
        return (
            fixed,
            decoded * work.num_decoded,
            token * work.num_prefilled,
            context * work.num_attended / _CONTEXT_TOKENS,
            scored * work.num_scored,
        )


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of steps and sequences."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_beside_decode: int
    """Prompt tokens in a step in which other sequences decode."""
    max_model_len: int
    max_prefill_ms_beside_decode: float | None = None
    """Milliseconds that prompts may add to a step in which other sequences decode; see `PrefillBudget`."""
    background_slowdown: float = 1.5
    """Factor by which background sequences may lengthen a step in which foreground sequences decode."""
    background_share: float = 0.1
    """Share of the engine's time that background sequences get at least."""
    background_step_ms: float = 50.0
    """Milliseconds of a step of background sequences alone while foreground sequences may come."""

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> StepLimits:
        """Return the limits that an engine's settings define."""
        return cls(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_beside_decode=config.max_prefill_beside_decode or config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_prefill_ms_beside_decode=config.max_prefill_ms_beside_decode,
            background_slowdown=config.background_slowdown,
            background_share=config.background_share,
            background_step_ms=config.background_step_ms,
        )


class StepSize:
    """The largest number of tokens in a step. It is halved when a step runs out of memory, and grows back later.

    It doubles after a number of computed steps. If a step then runs out of memory again, that number doubles too.
    """

    _FIRST_WAIT = 8
    _LONGEST_WAIT = 1024

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.restore()

    def restore(self) -> None:
        """Restore the full size, because the cause of failures is gone."""
        self.max_tokens = self._limit
        self._wait = self._FIRST_WAIT
        self._num_completed = 0
        self._has_grown = False

    def note_out_of_memory(self, num_tokens: int) -> None:
        """Record that a step of `num_tokens` tokens ran out of memory."""
        self.max_tokens = max(1, num_tokens // 2)
        if self._has_grown:
            self._wait = min(self._LONGEST_WAIT, 2 * self._wait)
        self._num_completed, self._has_grown = 0, False

    def note_completed(self) -> None:
        """Record that a step was computed."""
        if self.max_tokens == self._limit:
            return
        self._num_completed += 1
        if self._num_completed == self._wait:
            self.max_tokens = min(self._limit, 2 * self.max_tokens)
            self._num_completed, self._has_grown = 0, True


def ends_within_budget(budget: int, starts: Ints, num_tokens: Ints) -> Ints:
    """Spend a budget on sequences in order; return the end of each one up to the last that gets tokens."""
    lacking = num_tokens - starts
    if sum(lacking.tolist()) <= budget:
        return num_tokens
    spent = np.cumsum(lacking)
    ends: Ints = num_tokens - np.maximum(spent - budget, 0).astype(np.int32)
    served: Ints = ends[: np.count_nonzero(spent - lacking < budget)]
    return served


BACKLOG_STEPS = 8
"""A backlog of prompts may be spread over this many steps, if only its own tenant waits for them."""
MAX_BACKLOG_FACTOR = 4
"""Such a backlog lengthens a step to at most this multiple of the limit. So do sequences that an earlier node began,
however few they are, and also beside other tenants: their readers stand still until these are computed again."""


class _Chunk(NamedTuple):
    """The tokens that a prompt lacks, the milliseconds of one, and whether an earlier node had begun its output."""

    num_tokens: int
    token_ms: float
    is_resumed: bool


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

    def num_tokens(self, num_to_compute: Ints, num_decoded: int, *, only_foreground: bool = False) -> int:
        """Return the number of prompt tokens for the next step, at least one.

        num_to_compute: [num_running], tokens that each running sequence lacks; those that lack one decode. Those that
        lack none do not count.

        num_decoded: tokens that the decoding sequences compute, drafted ones included.

        only_foreground: background sequences that wait do not count either.
        """
        limits = self._limits
        max_tokens = limits.max_prefill_beside_decode
        if limits.max_prefill_ms_beside_decode is None:
            return max_tokens
        queues = self._queues
        waiting = queues.foreground(queues) if only_foreground else list(queues)
        chunks = self._chunks(num_to_compute, max_tokens, waiting[len(queues.swapped) :])
        limit_ms = max(limits.max_prefill_ms_beside_decode, self._time.decode_ms(num_decoded))
        resumed_ms = sum(one.num_tokens * one.token_ms for one in chunks if one.is_resumed)
        backlog_ms = sum(one.num_tokens * one.token_ms for one in chunks) / BACKLOG_STEPS
        # A longer step delays no other tenant if there is none.
        if backlog_ms > max(limit_ms, resumed_ms) and len(self._tenants(num_to_compute, waiting)) > 1:
            backlog_ms = 0.0
        longest_ms = MAX_BACKLOG_FACTOR * limits.max_prefill_ms_beside_decode
        limit_ms = max(limit_ms, min(max(backlog_ms, resumed_ms), longest_ms))
        return max(1, min(max_tokens, _tokens_within(limit_ms, chunks)))

    def _tenants(self, num_to_compute: Ints, waiting: Iterable[Sequence]) -> set[str]:
        running = (seq for seq, count in zip(self._batch.seqs, num_to_compute.tolist(), strict=True) if count)
        return {seq.tenant for seq in chain(running, waiting)}

    def _chunks(self, num_to_compute: Ints, max_tokens: int, waiting: Iterable[Sequence]) -> list[_Chunk]:
        """Return what each prompt lacks, in the order of the step.

        Prompts beyond the longest backlog that counts make no difference, so they are left out.
        """
        table, rows, seqs = self._batch.table, self._batch.rows, self._batch.seqs
        chunks: list[_Chunk] = []
        left = max_tokens * BACKLOG_STEPS * MAX_BACKLOG_FACTOR
        for i in (num_to_compute > 1).nonzero()[0].tolist():
            count, seq = int(num_to_compute[i]), seqs[i]
            token_ms = self._time.token_ms(int(table.num_computed[rows[i]]), is_scored=seq.is_scoring)
            chunks.append(_Chunk(count, token_ms, is_resumed=seq.num_resumed > 0))
            left -= count
        for seq in waiting:
            if left <= 0:
                break
            token_ms = self._time.token_ms(0, is_scored=seq.is_scoring)
            chunks.append(_Chunk(len(seq.token_ids), token_ms, is_resumed=seq.num_resumed > 0))
            left -= len(seq.token_ids)
        return chunks


def _tokens_within(limit_ms: float, chunks: list[_Chunk]) -> int:
    """Return how many tokens of the chunks, in order, take at most `limit_ms`."""
    num_tokens = 0
    for count, token_ms, _ in chunks:
        if count * token_ms > limit_ms:
            return num_tokens + int(limit_ms / token_ms)
        num_tokens += count
        limit_ms -= count * token_ms
    return num_tokens


MAX_SLOWDOWN = 3.0
"""A tenant's average time between tokens is at most this multiple of its time alone ÷ its share of the weights."""
MIN_REMAINDER = 2
"""The average time between tokens stays at this multiple of a small step, so these take less than half of all time."""


class SmallSteps:
    """Small steps, in which tenants with few sequences decode alone between two steps of all sequences.

    A step computes a token for each running sequence, so a tenant with one sequence waits for all sequences of the
    others. Such a step may take much longer than a step of the tenant's own would. Then the tenant gets further steps,
    so that the average time between its tokens stays within a bound. Where a large step takes hardly longer than a
    small one, as on most GPUs, there are no small steps.
    """

    def __init__(self, batch: RunningBatch, step_time: StepTime) -> None:
        self._batch = batch
        self._time = step_time
        self._tenants: set[str] = set()
        self._num_due = 0

    def note_full(self, step: Step) -> None:
        """Decide after a step of all sequences which tenants get small steps, and how many."""
        self._tenants, self._num_due = set(), 0
        weights = self._batch.weights
        if len(weights) < 2:
            return
        decodes = ((step.ends - step.starts) == 1).nonzero()[0].tolist()
        counts = Counter(step.seqs[i].tenant for i in decodes if not step.seqs[i].background)
        full_ms, total = self._time.step_ms(StepWork.of(step, 0)), sum(weights.values())
        bounds = {
            tenant: MAX_SLOWDOWN * self._time.decode_ms(count) * total / weights[tenant]
            for tenant, count in counts.items()
            if tenant in weights
        }
        self._tenants = {tenant for tenant, bound_ms in bounds.items() if bound_ms < full_ms}
        if not self._tenants:
            return
        small_ms = self._time.decode_ms(sum(counts[tenant] for tenant in self._tenants))
        bound_ms = max(min(bounds[tenant] for tenant in self._tenants), MIN_REMAINDER * small_ms)
        self._num_due = max(0, math.ceil((full_ms - bound_ms) / (bound_ms - small_ms)))

    def take(self) -> int:
        """Return the number of sequences in the small step that is due, after moving them to the front; 0 if none is.

        They lack one token each.
        """
        if not self._num_due:
            return 0
        self._num_due -= 1
        batch = self._batch
        lacking = batch.table.num_tokens[batch.rows] - batch.table.num_computed[batch.rows]
        lacks_one = (lacking == 1) & ~batch.table.is_background[batch.rows]
        small = [i for i in lacks_one.nonzero()[0].tolist() if batch.seqs[i].tenant in self._tenants]
        if not small or len(small) == len(batch.seqs):
            self._num_due = 0
            return 0
        batch.put_first(small)
        return len(small)
