"""Who computes how many tokens in the next step, and who holds which blocks for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.blocks import BlockPool
from penstock.gpu_node.engine.rows import RowTable
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import StepPlan

_WATERMARK_FRACTION = 0.01


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step: `plan` is what the runner sees, `seqs[i]` computes `counts[i]` tokens in it."""

    plan: StepPlan
    seqs: list[Sequence]
    counts: list[int]
    named_blocks: list[int]
    """Blocks that this step fills and that the prefix cache already knows."""


@dataclass(slots=True)
class _Draft:
    """A step while it is being planned; 0 <= budget."""

    budget: int
    seqs: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    named_blocks: list[int] = field(default_factory=list)


class Scheduler:
    """First come, first served over one token budget, without phases.

    Every sequence needs `num_tokens - num_computed` tokens, be it a prompt, a chunk of one, a decode step or a
    recompute. Running sequences come first, then waiting ones while budget, rows and blocks last. A running sequence
    that finds no block sends the one admitted last back to the head of the queue, its blocks to the pool.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self._pool = pool
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._rows = RowTable(max_num_seqs, -(-max_model_len // block_size))
        # A few blocks stay free at admission so that the newcomer is not the next one to be preempted.
        self._watermark = max(1, int(pool.num_total * _WATERMARK_FRACTION))

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        seq.hash_full_blocks(self._block_size)
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Drop a sequence that is done or no longer wanted, wherever it is."""
        if seq.row >= 0:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)

    def discard(self, seq: Sequence) -> list[int]:
        """Drop a running sequence whose computation failed; the blocks nobody holds any more, now unknown to all."""
        blocks = [block for block in seq.blocks if self._pool.ref_count(block) == 1]
        self._pool.forget(blocks)
        self.remove(seq)
        return blocks

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to do."""
        draft = _Draft(self._max_num_batched_tokens)
        preemptions_before = self.num_preemptions
        self._plan_running(draft)
        if self.num_preemptions == preemptions_before:
            self._admit_waiting(draft)
        if draft.seqs:
            return Step(self._rows.plan(draft.seqs, draft.counts), draft.seqs, draft.counts, draft.named_blocks)
        if self.running or self.waiting:
            raise InvariantError(f"{len(self.running)} running and {len(self.waiting)} waiting sequences are stuck")
        return None

    def commit(self, step: Step) -> list[Sequence]:
        """Note that a step was computed; the sequences that sampled, in the order of the plan's samples."""
        for seq, count in zip(step.seqs, step.counts, strict=True):
            seq.num_computed += count
        return [step.seqs[i] for i in step.plan.sample_seqs]

    def roll_back(self, step: Step) -> None:
        """Note that a step failed: whoever runs starts over, for what the step was to store is not there."""
        self._pool.forget(step.named_blocks)
        while self.running:
            self._requeue(self.running[-1])

    def _plan_running(self, draft: _Draft) -> None:
        i = 0
        while i < len(self.running) and draft.budget > 0:
            seq = self.running[i]
            count = min(seq.num_uncomputed, draft.budget)
            if not self._make_room(seq, count):
                break
            self._schedule(seq, count, draft)
            i += 1

    def _admit_waiting(self, draft: _Draft) -> None:
        while self.waiting and draft.budget > 0 and self._rows.num_unused > 0:
            seq = self.waiting[0]
            # The last token is always computed: its logits are what the next one is sampled from.
            hits = self._pool.match(seq.block_hashes[: (seq.num_tokens - 1) // self._block_size])
            if not self._fits(seq, hits):
                break
            self.waiting.popleft()
            self._admit(seq, hits)
            count = min(seq.num_uncomputed, draft.budget)
            self._make_room(seq, count)
            self._schedule(seq, count, draft)

    def _schedule(self, seq: Sequence, count: int, draft: _Draft) -> None:
        draft.seqs.append(seq)
        draft.counts.append(count)
        draft.budget -= count
        self._name_full_blocks(seq, seq.num_computed + count, draft.named_blocks)

    def _fits(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether all of a sequence fits, not only its first chunk, so that admission does not cause preemption."""
        needed = self._num_blocks(seq.num_tokens) - len(hits)
        watermark = self._watermark if self.running else 0
        return needed + watermark <= self._pool.num_free_without(hits)

    def _admit(self, seq: Sequence, hits: list[int]) -> None:
        self._pool.touch(hits)
        self._rows.take(seq)
        self._rows.add_blocks(seq, hits)
        self.running.append(seq)
        seq.num_computed = len(hits) * self._block_size
        seq.num_committed = len(hits)
        self.prefix_hit_tokens += seq.num_computed
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.num_computed, seq.num_prompt_tokens)

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Hold blocks for the next `count` tokens, preempting from the tail; False when `seq` itself had to go."""
        needed = self._num_blocks(seq.num_computed + count) - len(seq.blocks)
        while needed > self._pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        if needed > 0:
            self._rows.add_blocks(seq, self._pool.alloc(needed))
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._requeue(seq)
        self.num_preemptions += 1

    def _requeue(self, seq: Sequence) -> None:
        self.running.pop()
        self._release(seq)
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self._rows.give_back(seq)
        self._pool.free(seq.blocks)
        seq.blocks = []
        seq.num_computed = seq.num_committed = 0

    def _name_full_blocks(self, seq: Sequence, num_tokens: int, named: list[int]) -> None:
        """Offer the blocks that a step fills to the prefix cache at once, so that its own newcomers can share them.

        They may read them in the same step because a runner stores all keys before any query attends.
        """
        num_full = num_tokens // self._block_size
        if num_full == seq.num_committed:
            return
        seq.hash_full_blocks(self._block_size)
        for i in range(seq.num_committed, num_full):
            self._pool.commit(seq.blocks[i], seq.block_hashes[i])
            named.append(seq.blocks[i])
        seq.num_committed = num_full

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
