"""Who of the queued sequences starts to run: those in turn for whom there are a row, blocks and budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.base import SchedulingPolicy
from penstock.gpu_node.engine.scheduler.fault_isolation import FaultIsolator
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.scheduler.waiting import WaitingQueues
from penstock.gpu_node.engine.sequence import Sequence

_WATERMARK_FRACTION = 0.01


@dataclass(slots=True)
class Grants:
    """The tokens that a step has left for newcomers, and how far those get that it was granted to."""

    budget: int
    named: list[int]
    """Blocks that the step fills and that the prefix cache knows by now."""
    ends: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PrefixHits:
    """Tokens of admitted sequences, those of them that were found computed, and those of these that the host had."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    host_tokens: int = 0


class Admission:
    """Moves sequences from the queues to the residents."""

    def __init__(
        self,
        memory: KvCacheManager,
        residents: RunningBatch,
        queues: WaitingQueues,
        discipline: SchedulingPolicy,
        suspects: FaultIsolator,
    ) -> None:
        self.hits = PrefixHits()
        self._memory = memory
        self._residents = residents
        self._queues = queues
        self._discipline = discipline
        self._suspects = suspects
        # A few blocks stay free so that the newcomer is not the next one to be preempted.
        self._watermark = max(1, int(memory.device.num_total * _WATERMARK_FRACTION))

    def admit(self, grants: Grants) -> None:
        """Let sequences run in their turn as far as there is room."""
        self._offer(grants)
        while not self._residents.seqs and self._queues.swapped:
            # What others keep on the host, or keep from being free on the device, is in the way of the next one.
            self.recompute(self._queues.swapped[-1])
            self._offer(grants)

    def has_room(self, seq: Sequence) -> bool:
        """Whether all of a sequence fits, not only its first chunk, so that admission does not cause preemption."""
        residents, memory = self._residents, self._memory
        if residents.table.num_unused <= len(seq.forks):
            return False
        held = residents.held_by(seq)
        num_missing, num_free = residents.num_missing(seq, held), memory.num_free_without(held)
        if residents.seqs:
            return num_missing + self._watermark <= num_free
        num_free_in_both = num_free + memory.num_free_without(held, on_host=True)
        return num_missing <= num_free or residents.num_missing(seq, held, in_place=True) <= num_free_in_both

    def could_have_room(self, seq: Sequence, victims: list[Sequence]) -> bool:
        """Whether a sequence might fit if these gave way; what they share with others is counted as if they did not."""
        residents = self._residents
        leaving = [one for victim in victims for one in (victim, *victim.forks)]
        held = residents.held_by(seq)
        num_freed = sum(len(one.blocks) + (one.spare is not None) for one in leaving)
        has_rows = len(seq.forks) < residents.table.num_unused + len(leaving)
        watermark = self._watermark if len(victims) < len(residents.seqs) else 0
        num_free = self._memory.num_free_without(held) + num_freed
        return has_rows and residents.num_missing(seq, held) + watermark <= num_free

    def recompute(self, seq: Sequence) -> None:
        """Let a swapped sequence go without its blocks."""
        self._queues.remove(seq)
        self._memory.free(seq.blocks)
        seq.blocks = []
        self._queues.put_back(seq)

    def _offer(self, grants: Grants) -> None:
        started: list[tuple[deque[Sequence], Sequence]] = []

        def start(seq: Sequence) -> bool:
            if grants.budget <= 0 or not self._suspects.may_join(seq, self._residents.seqs) or not self.has_room(seq):
                return False
            started.append((self._queues.queue_of(seq), seq))
            self._start(seq, grants)
            return True

        self._discipline.offer(self._suspects.eligible(self._queues, self._residents.seqs), start)
        for queue, seq in started:
            queue.remove(seq)

    def _start(self, seq: Sequence, grants: Grants) -> None:
        is_swapped, held = bool(seq.blocks), self._residents.held_by(seq)
        in_place = self._residents.num_missing(seq, held) > self._memory.num_free_without(held)
        num_on_host = len(held) - sum(map(self._memory.is_on_device, held))
        num_stored = self._residents.admit(seq, held, in_place=in_place)
        if not is_swapped:
            self.hits.lookup_tokens += len(seq.token_ids)
            self.hits.hit_tokens += num_stored
            self.hits.host_tokens += num_stored * num_on_host // max(1, len(held))
            if seq.cached_tokens is None:
                seq.cached_tokens = min(num_stored, seq.num_prompt_tokens)
        end = min(len(seq.token_ids), num_stored + grants.budget)
        self._residents.name_full_blocks(seq, end, grants.named)
        grants.budget -= end - num_stored
        grants.ends.append(end)
