"""Preemption: evict sequences for an urgent request, for lack of free blocks, or after a step ran out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.policy import SchedulingPolicy, SharedDevice
from penstock.gpu_node.engine.scheduler.faults import FaultIsolator
from penstock.gpu_node.engine.scheduler.queues import Admission, Freed, WaitingQueues
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import PreemptionName

_BYTES_PER_S = float(4 << 30)
"""Assumed copy rate until copies are measured."""
_WEIGHT = 0.2
"""Weight of a new measurement in the moving average."""
_MIN_PREFILL = 16
"""Tokens: the time of smaller steps shows the fixed cost of a step, not the cost of a token."""


class SwapCost:
    """Decides whether a preempted sequence's blocks are swapped or recomputed, by rates measured on the way."""

    def __init__(self, preemption: PreemptionName, block_bytes: int) -> None:
        self._preemption = preemption
        self._block_bytes = block_bytes
        self._copied_bytes_per_ms = _BYTES_PER_S / 1e3
        self._prefilled_per_ms: float | None = None

    def note_copies(self, num_blocks: int, took_ms: float) -> None:
        """Record that a step copied `num_blocks` blocks in `took_ms`."""
        if num_blocks and took_ms > 0:
            self._copied_bytes_per_ms += _WEIGHT * (
                num_blocks * self._block_bytes / took_ms - self._copied_bytes_per_ms
            )

    def note_forward(self, num_prefill_tokens: int, took_ms: float) -> None:
        """Record that a step with `num_prefill_tokens` prompt tokens took `took_ms`, other tokens included."""
        if num_prefill_tokens >= _MIN_PREFILL and took_ms > 0:
            rate = num_prefill_tokens / took_ms
            known = rate if self._prefilled_per_ms is None else self._prefilled_per_ms
            self._prefilled_per_ms = known + _WEIGHT * (rate - known)

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying the blocks out and back costs less than computing the tokens again."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        if self._prefilled_per_ms is None:
            return True
        copy_ms = 2 * num_blocks * self._block_bytes / self._copied_bytes_per_ms
        return copy_ms < num_tokens / self._prefilled_per_ms


class Preemptor:
    """Moves sequences from the running batch back to the queues."""

    def __init__(
        self,
        memory: KvCacheManager,
        batch: RunningBatch,
        queues: WaitingQueues,
        admission: Admission,
        costs: SwapCost,
        policy: SchedulingPolicy,
        isolator: FaultIsolator,
        max_num_seqs: int,
    ) -> None:
        self.num_preemptions = self.num_swaps = 0
        self._memory = memory
        self._batch = batch
        self._queues = queues
        self._admission = admission
        self._costs = costs
        self._policy = policy
        self._isolator = isolator
        self._device = SharedDevice(max_num_seqs, memory.device.num_total, batch.num_blocks)

    def preemption_request(self) -> tuple[Sequence, list[Sequence]] | None:
        """Return a waiting sequence that could fit, with the sequences to preempt for it, in order; or None.

        It is urgent, or its tenant is below its share.
        """
        if self._isolator.is_isolating:
            return None
        if not self._queues:
            return None
        running = self._batch.seqs
        if any(seq.is_protected for seq in running):
            running = [seq for seq in running if not seq.is_protected]
        request = _spare_foreground(self._policy.preemption_request(self._queues, running, self._batch.num_tokens))
        if request is not None and self._admission.could_fit(*request):
            return request
        waiting = self._queues.foreground(self._queues)
        if not waiting:
            waiting, running = list(self._queues), [seq for seq in running if seq.background]
        request = self._policy.share_request(waiting, running, self._device)
        if request is None or self._admission.fits(request[0]) or not self._admission.could_fit(*request):
            return None
        return request

    def yielding(self, max_tokens: int) -> list[Sequence]:
        """Return the background sequences that yield to the foreground sequences that a step of `max_tokens` starts.

        Least urgent and newest first. Blocks that they share count as freed.
        """
        victims = [seq for seq in self._batch.seqs if seq.background and not seq.is_protected]
        if not victims or self._isolator.is_isolating:
            return []
        victims.sort(key=lambda seq: seq.urgency)
        yielding: list[Sequence] = []
        freed = Freed()
        for seq, needed in self._admission.shortages():
            more: list[Sequence] = []
            while victims and not freed.suffices(needed):
                more.append(victims.pop())
                freed = self._with(freed, more[-1])
            if max_tokens <= 0 or not freed.suffices(needed):
                break
            yielding += more
            max_tokens -= len(seq.token_ids)
        return yielding

    def _with(self, freed: Freed, victim: Sequence) -> Freed:
        """Return what is free once a sequence is preempted with its forks."""
        leaving = (victim, *victim.forks)
        return Freed(
            freed.rows + len(leaving),
            freed.blocks + sum(len(one.blocks) + (one.spare is not None) for one in leaving),
            freed.blocks_of_windows + sum(map(self._batch.beside.num_held, leaving)),
        )

    def preempt_for_request(self, max_tokens: int) -> None:
        """Preempt for waiting sequences: background ones for foreground ones, then for an urgent one until it fits.

        Or for one of a tenant below its share. `max_tokens`: the largest number of tokens of the next step.
        """
        for victim in self.yielding(max_tokens):
            self.preempt(victim)
        request = self.preemption_request()
        if request is None:
            return
        candidate, victims = request
        for victim in victims:
            if self._admission.fits(candidate):
                return
            self.preempt(victim)

    def preempt_next(self) -> Sequence:
        """Preempt the sequence that the policy chooses (`policy/policy.py`, `policy/by_policy.py`), and return it.

        Foreground sequences are preempted only where no background sequence runs.
        """
        seqs = self._batch.seqs
        background = [seq for seq in seqs if seq.background]
        yielding = [seq for seq in background if not seq.is_protected] or background or seqs
        victim = self._policy.victim(yielding, self._batch.num_tokens)
        self.preempt(victim)
        return victim

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks: swap them to the host if that is possible and cheaper, else free them."""
        if seq.row < 0:
            return  # It went with another beam of its search.
        self.num_preemptions += 1
        seq.num_preemptions += 1
        num_stored = int(self._batch.table.num_computed[seq.row])
        num_blocks = self._memory.num_to_swap(seq.blocks[: self._batch.num_blocks(num_stored)])
        is_single = not seq.forks and seq.beams is None
        can_swap = num_stored and is_single and num_blocks <= self._memory.host.num_free
        if can_swap and self._costs.prefers_swap(num_blocks, num_stored):
            self.num_swaps += 1
            self._batch.swap_out(seq)
            self._queues.put_back(seq)
        else:
            self.requeue(seq)

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Allocate blocks for a running sequence, and preempt sequences, at last itself, while too few are free.

        A sequence that runs alone may use host blocks.
        """
        device, host = self._memory.device, self._memory.host
        while num_blocks > device.num_free and len(self._batch.seqs) > 1:
            if self.preempt_next() is seq or seq.row < 0:
                return
        while num_blocks > device.num_free + host.num_free and self._queues.swapped:
            self._admission.recompute(self._queues.swapped[-1])
        self._batch.grow(seq, num_blocks)

    def widen(self, seq: Sequence, end: int) -> int:
        """Give a running sequence the blocks of its window up to `end` tokens. Return how many tokens they reach.

        While too few are free, sequences are preempted, at last itself. One that runs alone gets what is free, and so
        do the beams of a search that runs alone.
        """
        beside, row, target = self._batch.beside, np.array([seq.row]), np.array([end])
        while beside.lacking(row, target)[0] > beside.num_free and self._has_others(seq):
            if self.preempt_next() is seq or seq.row < 0:
                return 0
        return beside.grow(seq, end)

    def _has_others(self, seq: Sequence) -> bool:
        """Return whether a sequence runs that is no beam of the same search."""
        return any(one is not seq and (seq.beams is None or one.beams is not seq.beams) for one in self._batch.seqs)

    def start_over(self, seq: Sequence) -> None:
        """Requeue a sequence, if it runs, for recomputation. Uncache its blocks that no other sequence holds."""
        blocks = seq.blocks
        if seq.row >= 0:
            self.requeue(seq)
        self._batch.uncache_unheld(seq, blocks)

    def requeue(self, seq: Sequence) -> None:
        """Move a running sequence and its waiting forks back to the queue, to compute all of it again.

        All beams of a search go together, since none of them could go on alone.
        """
        if seq.beams is not None:
            self._requeue_beams(seq.beams)
            return
        self._batch.leave(seq)
        for one in (seq, *seq.forks):
            one.blocks = []
        self._queues.put_back(seq, *seq.forks)

    def _requeue_beams(self, beams: list[Sequence]) -> None:
        for one in beams:
            # A leader takes its waiting forks along.
            if one.forks_from is None and one.row >= 0:
                self._batch.leave(one)
        for one in beams:
            one.blocks, one.is_parked = [], False
        first = beams[0].token_ids
        num_same = [_num_same(first, one.token_ids) for one in beams[1:]]
        for one in beams:
            one.num_common = max(one.num_prompt_tokens, min(num_same, default=len(first)))
        self._queues.put_back(*beams)

    def isolate(self) -> None:
        """Stop the sequences that are suspected after a slow step."""
        for seq in self._isolator.to_stop[::-1]:
            if seq.row >= 0:
                self.requeue(seq)

    def shrink(self, max_step_tokens: int) -> None:
        """After an out-of-memory error, preempt the sequences that must stop, then more until one step serves all."""
        for seq in [seq for seq in self._batch.seqs if self._isolator.must_stop(seq)]:
            self.preempt(seq)
        while len(self._batch.seqs) > max_step_tokens:
            self.preempt_next()


def _num_same(one: Ints, other: Ints) -> int:
    """Return the number of leading tokens that two sequences share."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _spare_foreground(request: tuple[Sequence, list[Sequence]] | None) -> tuple[Sequence, list[Sequence]] | None:
    """Return a request without the foreground sequences that would yield to a background sequence."""
    if request is None or not request[0].background:
        return request
    victims = [seq for seq in request[1] if seq.background]
    return (request[0], victims) if victims else None
