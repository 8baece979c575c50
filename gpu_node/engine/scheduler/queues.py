"""The queues of sequences that do not run, and the admission from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.policy import SchedulingPolicy
from penstock.gpu_node.engine.scheduler.faults import FaultIsolator
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence


class WaitingQueues:
    """Swapped sequences, which hold blocks on the host, then waiting ones, which hold none.

    In each queue preempted sequences come first, in order of admission.

    Choices of a request that start together are queued as one entry: the first choice, with the others as its `forks`.
    """

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.swapped, self.waiting)

    def __bool__(self) -> bool:
        return bool(self.swapped or self.waiting)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without blocks."""
        return sum(1 + len(seq.forks) for seq in self.waiting)

    @staticmethod
    def foreground(seqs: Iterable[Sequence]) -> list[Sequence]:
        """Return the foreground sequences among some."""
        return [seq for seq in seqs if not seq.background]

    def queue_of(self, seq: Sequence) -> deque[Sequence]:
        """Return the queue that holds a sequence that does not run."""
        return self.swapped if seq.blocks else self.waiting

    def add(self, choices: Items[Sequence]) -> None:
        """Queue new choices that start together."""
        self.waiting.append(_group(choices))

    def put_back(self, *choices: Sequence) -> None:
        """Put choices that ran, or were to start with one that ran, at the head of their queue."""
        seq = _group(choices)
        self.queue_of(seq).appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; its forks stay queued."""
        queue = self.queue_of(seq)
        if seq.forks:
            queue[queue.index(seq)] = _group(seq.forks)
            seq.forks = []
        elif seq.forks_from is not None:
            leave_group(seq)
        else:
            queue.remove(seq)

    def check_integrity(self) -> None:
        """Raise InvariantError unless each sequence is in the right queue, without a row or spare block."""
        for queue, is_swapped in ((self.waiting, False), (self.swapped, True)):
            for seq in queue:
                if any(one.row >= 0 or one.spare is not None for one in (seq, *seq.forks)):
                    raise InvariantError(f"{seq.request_id} is queued and has a row or a spare block")
                if bool(seq.blocks) != is_swapped or any(one.forks_from is not seq for one in seq.forks):
                    raise InvariantError(f"{seq.request_id} is in the wrong queue, or its forks do not know it")


def leave_group(seq: Sequence) -> None:
    """Separate a fork from the sequence that it would start with."""
    if seq.forks_from is not None:
        seq.forks_from.forks.remove(seq)
        seq.forks_from = None


def _group(choices: Items[Sequence]) -> Sequence:
    """Make the first choice the leader and the others its forks."""
    leader, forks = choices[0], list(choices[1:])
    leader.forks, leader.forks_from = forks, None
    for fork in forks:
        fork.forks_from = leader
    return leader


_WATERMARK_FRACTION = 0.01


@dataclass(slots=True)
class Grants:
    """The token budget left for newly admitted sequences, and what they were granted."""

    budget: int
    cached: list[int]
    """Blocks that the step fills and that the prefix cache already lists."""
    ends: list[int] = field(default_factory=list)
    foreground: int | None = None
    """The part of the budget that foreground sequences may use; None: all of it."""
    background: int | None = None
    """The same for background sequences. Both parts together may be more than the budget."""

    def left_for(self, seq: Sequence) -> int:
        """Return the tokens that a sequence may compute."""
        part = self.background if seq.background else self.foreground
        return self.budget if part is None else min(part, self.budget)

    def note(self, seq: Sequence, start: int, end: int) -> None:
        """Count a sequence that computes from `start` to `end`."""
        self.ends.append(end)
        self.budget -= end - start
        if seq.background and self.background is not None:
            self.background -= end - start
        elif not seq.background and self.foreground is not None:
            self.foreground -= end - start


class Freed(NamedTuple):
    """What preempted sequences give back."""

    rows: int = 0
    blocks: int = 0
    """On the device."""
    blocks_of_windows: int = 0

    def suffices(self, needed: Freed) -> bool:
        """Return whether this is at least as much."""
        return all(own >= other for own, other in zip(self, needed, strict=True))


@dataclass(slots=True)
class PrefixHits:
    """Tokens of admitted sequences, those found in the prefix cache, and those of the latter found on the host."""

    lookup_tokens: int = 0
    hit_tokens: int = 0
    host_tokens: int = 0


class Admission:
    """Moves sequences from the queues to the running batch."""

    def __init__(
        self,
        memory: KvCacheManager,
        batch: RunningBatch,
        queues: WaitingQueues,
        policy: SchedulingPolicy,
        isolator: FaultIsolator,
    ) -> None:
        self.hits = PrefixHits()
        self._memory = memory
        self._batch = batch
        self._queues = queues
        self._policy = policy
        self._isolator = isolator
        # A few blocks stay free, so that the new sequence is not preempted at once.
        self._watermark = max(1, int(memory.device.num_total * _WATERMARK_FRACTION))

    def admit(self, grants: Grants) -> None:
        """Start queued sequences while they fit."""
        self._offer(grants)
        while not self._batch.seqs and self._queues.swapped:
            # Swapped sequences hold blocks that the next sequence needs, on the host or shared ones on the device.
            self.recompute(self._queues.swapped[-1])
            self._offer(grants)

    def start_newcomers(self, *, one_of_a_tenant: bool = True) -> None:
        """Start queued foreground sequences without tokens: one of each tenant that computes no prompt, or all.

        Otherwise they would wait until the other prompts leave something of a step's budget.
        """
        busy = self._batch.tenants_in_prefill() if one_of_a_tenant else set()
        started: list[tuple[deque[Sequence], Sequence]] = []

        def start(seq: Sequence) -> bool:
            if seq.tenant in busy or not self._isolator.may_join(seq, self._batch.seqs) or not self.fits(seq):
                return False
            if one_of_a_tenant:
                busy.add(seq.tenant)
            started.append((self._queues.queue_of(seq), seq))
            self._start(seq)
            return True

        eligible = self._isolator.eligible(self._queues, self._batch.seqs)
        queued = [seq for seq in eligible if seq.tenant not in busy and not seq.background]
        if queued:
            self._policy.offer(queued, start)
        for queue, seq in started:
            queue.remove(seq)

    def fits(self, seq: Sequence) -> bool:
        """Return whether rows and blocks suffice for all of a sequence, so that admission does not cause preemption."""
        batch, memory = self._batch, self._memory
        if batch.table.num_unused <= len(seq.forks):
            return False
        if batch.beside.is_lost(seq):
            return False
        held = batch.held_by(seq)
        if not batch.beside.fits(seq, len(held), is_alone=not batch.seqs):
            return False
        num_missing, num_free = batch.num_missing(seq, held), memory.num_free_without(held)
        if seq.beams is not None:
            num_missing += batch.num_tail_blocks(seq)
        if batch.seqs:
            return num_missing + self._watermark <= num_free
        num_free_in_both = num_free + memory.num_free_without(held, on_host=True)
        return num_missing <= num_free or batch.num_missing(seq, held, in_place=True) <= num_free_in_both

    def shortages(self) -> Iterator[tuple[Sequence, Freed]]:
        """Yield the foreground sequences that may start, each with what must be freed for it and all before it.

        The numbers are negative where nothing must be freed.
        """
        batch, memory = self._batch, self._memory
        num_rows, num_blocks, held = -batch.table.num_unused, self._watermark, list[int]()
        num_of_windows = batch.beside.shortage()
        for seq in self._policy.startable(self._isolator.eligible(self._queues, batch.seqs)):
            if not seq.background:
                own = batch.held_by(seq)
                held += own
                num_rows += 1 + len(seq.forks)
                num_blocks += batch.num_missing(seq, own)
                num_of_windows += batch.beside.num_missing(seq, len(own))
                yield seq, Freed(num_rows, num_blocks - memory.num_free_without(held), num_of_windows)

    def could_fit(self, seq: Sequence, victims: list[Sequence]) -> bool:
        """Return whether a sequence might fit after preempting the victims. Blocks that they share count as freed."""
        batch = self._batch
        leaving = [one for victim in victims for one in (victim, *victim.forks)]
        held = batch.held_by(seq)
        num_freed = sum(len(one.blocks) + (one.spare is not None) for one in leaving)
        has_rows = len(seq.forks) < batch.table.num_unused + len(leaving)
        watermark = self._watermark if len(victims) < len(batch.seqs) else 0
        num_free = self._memory.num_free_without(held) + num_freed
        if not has_rows or batch.num_missing(seq, held) + watermark > num_free:
            return False
        freed, is_alone = sum(map(batch.beside.num_held, leaving)), len(victims) == len(batch.seqs)
        return batch.beside.fits(seq, len(held), is_alone=is_alone, num_freed=freed)

    def recompute(self, seq: Sequence) -> None:
        """Drop a swapped sequence's blocks and queue it for recomputation."""
        self._queues.remove(seq)
        self.free(seq)
        seq.blocks = []
        self._queues.put_back(seq)

    def recompute_lost(self) -> None:
        """Queue the swapped sequences for recomputation whose states or windows gave way to others."""
        for seq in [seq for seq in self._queues.swapped if self._batch.beside.is_lost(seq)]:
            self.recompute(seq)

    def free(self, seq: Sequence) -> None:
        """Free what a sequence without a row holds: blocks and what is beside them, if it is swapped."""
        self._memory.free(seq.blocks)
        self._batch.beside.release(seq)

    def _offer(self, grants: Grants) -> None:
        started: list[tuple[deque[Sequence], Sequence]] = []

        def start(seq: Sequence) -> bool:
            if grants.left_for(seq) <= 0 or not self._isolator.may_join(seq, self._batch.seqs) or not self.fits(seq):
                return False
            started.append((self._queues.queue_of(seq), seq))
            num_stored = self._start(seq)
            end = self._batch.beside.grow(seq, min(len(seq.token_ids), num_stored + grants.left_for(seq)))
            self._batch.cache_full_blocks(seq, end, grants.cached)
            grants.note(seq, num_stored, end)
            return True

        self._policy.offer(self._isolator.eligible(self._queues, self._batch.seqs), start)
        for queue, seq in started:
            queue.remove(seq)

    def _start(self, seq: Sequence) -> int:
        """Start a sequence. Return how many of its tokens are stored."""
        is_swapped, held = bool(seq.blocks), self._batch.held_by(seq)
        in_place = self._batch.num_missing(seq, held) > self._memory.num_free_without(held)
        num_on_host = len(held) - sum(map(self._memory.is_on_device, held))
        num_stored = self._batch.admit(seq, held, in_place=in_place)
        if not is_swapped:
            self.hits.lookup_tokens += len(seq.token_ids)
            self.hits.hit_tokens += num_stored
            self.hits.host_tokens += num_stored * num_on_host // max(1, len(held))
            if seq.cached_tokens is None:
                seq.cached_tokens = min(num_stored, seq.num_prompt_tokens)
        return num_stored
