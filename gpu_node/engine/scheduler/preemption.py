"""Running sequences give way: to who does not wait for room, to who finds no block, to what a step cannot hold."""

from __future__ import annotations

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.base import SchedulingPolicy
from penstock.gpu_node.engine.scheduler.admission import Admission
from penstock.gpu_node.engine.scheduler.fault_isolation import FaultIsolator
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.scheduler.swap_cost import SwapCost
from penstock.gpu_node.engine.scheduler.waiting import WaitingQueues
from penstock.gpu_node.engine.sequence import Sequence


class Preemptor:
    """Moves sequences from the residents back to the queues."""

    def __init__(
        self,
        memory: KvCacheManager,
        residents: RunningBatch,
        queues: WaitingQueues,
        admission: Admission,
        costs: SwapCost,
        discipline: SchedulingPolicy,
        suspects: FaultIsolator,
    ) -> None:
        self.num_preemptions = self.num_swaps = 0
        self._memory = memory
        self._residents = residents
        self._queues = queues
        self._admission = admission
        self._costs = costs
        self._discipline = discipline
        self._suspects = suspects

    def pressing(self) -> tuple[Sequence, list[Sequence]] | None:
        """One that does not wait for room, if it could have some, and who gives way to it, in order."""
        if self._suspects.is_trying:
            return None
        pressing = self._discipline.pressing(self._queues, self._residents.seqs)
        return pressing if pressing is not None and self._admission.could_have_room(*pressing) else None

    def make_way(self) -> None:
        """Preempt for whoever presses, as far as that makes room for it."""
        pressing = self.pressing()
        if pressing is None:
            return
        newcomer, victims = pressing
        for victim in victims:
            if self._admission.has_room(newcomer):
                return
            self.preempt(victim)

    def preempt_next(self) -> Sequence:
        """Preempt whoever is to give way first."""
        victim = self._discipline.victim(self._residents.seqs)
        self.preempt(victim)
        return victim

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks: to the host, if that has room and is the cheaper way."""
        self.num_preemptions += 1
        num_stored = int(self._residents.table.num_computed[seq.row])
        num_blocks = self._memory.num_to_swap(seq.blocks[: self._residents.num_blocks(num_stored)])
        has_room = num_stored and not seq.forks and num_blocks <= self._memory.host.num_free
        if has_room and self._costs.prefers_swap(num_blocks, num_stored):
            self.num_swaps += 1
            self._residents.swap_out(seq)
            self._queues.put_back(seq)
        else:
            self.requeue(seq)

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Find blocks for a running sequence: preempt, at last itself; one that runs alone may have the host's."""
        device, host = self._memory.device, self._memory.host
        while num_blocks > device.num_free and len(self._residents.seqs) > 1:
            if self.preempt_next() is seq:
                return
        while num_blocks > device.num_free + host.num_free and self._queues.swapped:
            self._admission.recompute(self._queues.swapped[-1])
        self._residents.grow(seq, num_blocks)

    def start_over(self, seq: Sequence) -> list[int]:
        """Have a sequence, if it still runs, compute all of it again; the blocks that nobody holds any more."""
        blocks = seq.blocks
        if seq.row >= 0:
            self.requeue(seq)
        return self._memory.forget_unheld(blocks)

    def requeue(self, seq: Sequence) -> None:
        """Let a running sequence wait, with the forks that it did not start yet, and compute all of it again."""
        self._residents.leave(seq)
        for one in (seq, *seq.forks):
            one.blocks = []
        self._queues.put_back(seq, *seq.forks)

    def isolate(self) -> None:
        """Have the suspects of a slow step stop running."""
        for seq in self._suspects.to_stop[::-1]:
            if seq.row >= 0:
                self.requeue(seq)

    def shrink(self, max_step_tokens: int) -> None:
        """Preempt who may not go on after a step that found no memory, then until the others fit into one."""
        for seq in [seq for seq in self._residents.seqs if self._suspects.bars(seq)]:
            self.preempt(seq)
        while len(self._residents.seqs) > max_step_tokens:
            self.preempt_next()
