"""Who computes how many tokens in the next step, and who holds which blocks for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.blocks import BlockPool
from penstock.gpu_node.engine.rows import Ints, Rows, RowTable, Step
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import FAILED_TOKEN, StepPlan

_WATERMARK_FRACTION = 0.01


@dataclass(frozen=True, slots=True)
class Landed:
    """What a step gave: a token or FAILED_TOKEN for each of `seqs`, which may have been removed meanwhile."""

    seqs: list[Sequence]
    token_ids: list[int]
    broken_blocks: list[int]
    """Blocks of failed sequences, held by nobody and known to nobody."""


class _Running:
    """The running sequences in order of admission, and what follows from who they are."""

    def __init__(self) -> None:
        self.seqs: list[Sequence] = []
        self.changed()

    def changed(self) -> None:
        """Say that `seqs` is not what it was."""
        self._rows: Rows | None = None
        self._end_ids: frozenset[int] | None = None

    @property
    def rows(self) -> Rows:
        """Their rows; the same array as long as nobody comes or goes."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self.seqs], dtype=np.intp)
        return self._rows

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that may end one of them."""
        if self._end_ids is None:
            self._end_ids = frozenset((FAILED_TOKEN,)).union(*(seq.end_rule.end_ids for seq in self.seqs))
        return self._end_ids


class Scheduler:
    """First come, first served over one token budget, without phases.

    Every sequence needs `num_tokens - num_computed` tokens, be it a prompt, a chunk of one, a decode step or a
    recompute. Running sequences come first, then waiting ones while budget, rows and blocks last. A running sequence
    that finds no block sends the one admitted last back to the head of the queue, its blocks to the pool.

    A step is scheduled only after the one before it was committed or rolled back. Between the two, sequences may be
    added and removed; the blocks of a removed one are free at once, though the step may still write to them, because
    nobody is given a block before the next step is scheduled.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self._running = _Running()
        self._pool = pool
        self._block_size = block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._rows = RowTable(max_num_seqs, max_model_len, block_size)
        # A few blocks stay free at admission so that the newcomer is not the next one to be preempted.
        self._watermark = max(1, int(pool.num_total * _WATERMARK_FRACTION))

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold rows and blocks, in order of admission."""
        return self._running.seqs

    def tokens_of(self, seq: Sequence) -> Ints:
        """Prompt and output of a sequence so far."""
        return self._rows.tokens_of(seq) if seq.row >= 0 else seq.token_ids

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        seq.hash_full_blocks(seq.token_ids, self._block_size)
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Drop a sequence that is done or no longer wanted, wherever it is."""
        if seq.row >= 0:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)

    def schedule(self) -> Step | None:
        """Decide the next step, or None when there is nothing to do."""
        named: list[int] = []
        preemptions_before = self.num_preemptions
        ends = self._schedule_running(named)
        if self.num_preemptions == preemptions_before:
            ends = self._admit_waiting(ends, named)
        if len(ends):
            return self._step(ends, named)
        if self.running or self.waiting:
            raise InvariantError(f"{len(self.running)} running and {len(self.waiting)} waiting sequences are stuck")
        return None

    def plan(self, step: Step) -> StepPlan:
        """A scheduled step as the runner sees it."""
        return self._rows.plan(step)

    def commit(self, step: Step, tokens: Ints) -> Landed:
        """Note that a step was computed and what it sampled; whoever ends by that leaves."""
        # A removed sequence's row is written to as well: nobody has it before the next step is scheduled.
        self._rows.num_computed[step.rows] = step.ends
        self._rows.append(step.sampled_rows, tokens)
        token_ids, broken = tokens.tolist(), []
        for i in self._may_end(step, token_ids):
            seq = step.sampled_seqs[i]
            if token_ids[i] == FAILED_TOKEN:
                broken += self._discard(seq)
            elif seq.row >= 0 and self._ends(seq, token_ids[i]):
                self.remove(seq)
        return Landed(step.sampled_seqs, token_ids, broken)

    def roll_back(self, step: Step) -> None:
        """Note that a step failed: whoever runs starts over, for what the step was to store is not there."""
        self._pool.forget(step.named_blocks)
        while self.running:
            self._requeue(self.running[-1])

    def _schedule_running(self, named: list[int]) -> Ints:
        """How far each of the running sequences gets that get something; the others are the last ones."""
        rows = self._running.rows
        ends = _within(self._max_num_batched_tokens, self._rows.num_computed[rows], self._rows.num_tokens[rows])
        rows = rows[: len(ends)]
        for i in (ends > self._rows.capacity[rows]).nonzero()[0].tolist():
            if i >= len(self.running) or not self._make_room(self.running[i], int(ends[i])):
                break
        ends = ends[: len(self.running)]
        filling = ends - self._rows.num_named[rows[: len(ends)]] >= self._block_size
        for i in filling.nonzero()[0].tolist():
            self._name_full_blocks(self.running[i], int(ends[i]), named)
        return ends

    def _admit_waiting(self, ends: Ints, named: list[int]) -> Ints:
        """Let waiting sequences run with the budget that is left; how far each of all running ones gets."""
        if not self.waiting or len(ends) < len(self.running):
            return ends
        budget = self._max_num_batched_tokens - int((ends - self._rows.num_computed[self._running.rows]).sum())
        admitted: list[int] = []
        while self.waiting and budget > 0 and self._rows.num_unused > 0:
            seq = self.waiting[0]
            # The last token is always computed: its logits are what the next one is sampled from.
            hits = self._pool.match(seq.block_hashes[: (len(seq.token_ids) - 1) // self._block_size])
            if not self._fits(seq, hits):
                break
            self.waiting.popleft()
            num_computed = self._admit(seq, hits)
            end = min(len(seq.token_ids), num_computed + budget)
            self._make_room(seq, end)
            self._name_full_blocks(seq, end, named)
            budget -= end - num_computed
            admitted.append(end)
        return np.concatenate((ends, np.array(admitted, dtype=np.int32)))

    def _step(self, ends: Ints, named: list[int]) -> Step:
        """The step in which the first `len(ends)` running sequences get as far as that."""
        rows = self._running.rows if len(ends) == len(self.running) else self._running.rows[: len(ends)]
        seqs = self.running[: len(ends)]
        starts, num_tokens = self._rows.num_computed[rows], self._rows.num_tokens[rows]
        sampled = (ends == num_tokens).nonzero()[0]
        sampled_rows, sampled_ends, sampled_seqs = rows, ends, seqs
        if len(sampled) < len(seqs):
            sampled_rows, sampled_ends, sampled_seqs = rows[sampled], ends[sampled], [seqs[i] for i in sampled]
        is_prefill = num_tokens - starts > 1
        return Step(
            seqs=seqs,
            rows=rows,
            starts=starts,
            ends=ends,
            sampled=sampled.astype(np.int32),
            sampled_seqs=sampled_seqs,
            sampled_rows=sampled_rows,
            sampled_ends=sampled_ends,
            num_prefill_tokens=int((ends - starts)[is_prefill].sum()),
            named_blocks=named,
        )

    def _may_end(self, step: Step, token_ids: list[int]) -> list[int]:
        """The samples that a look at all of them at once cannot clear."""
        found = (step.sampled_ends + 1 >= self._rows.limit[step.sampled_rows]).nonzero()[0].tolist()
        if self._running.end_ids.isdisjoint(token_ids):
            return found
        end_ids = self._running.end_ids
        return sorted({*found, *(i for i, token_id in enumerate(token_ids) if token_id in end_ids)})

    def _ends(self, seq: Sequence, token_id: int) -> bool:
        num_output_tokens = int(self._rows.num_tokens[seq.row]) - seq.num_prompt_tokens
        return seq.end_rule.reason(token_id, num_output_tokens) is not None

    def _discard(self, seq: Sequence) -> list[int]:
        """Drop a sequence whose computation failed; the blocks that nobody holds any more, now unknown to all."""
        if seq.row >= 0:
            self.remove(seq)
        blocks = [block for block in seq.blocks if self._pool.ref_count(block) == 0]
        self._pool.forget(blocks)
        return blocks

    def _fits(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether all of a sequence fits, not only its first chunk, so that admission does not cause preemption."""
        needed = self._num_blocks(len(seq.token_ids)) - len(hits)
        watermark = self._watermark if self.running else 0
        return needed + watermark <= self._pool.num_free_without(hits)

    def _admit(self, seq: Sequence, hits: list[int]) -> int:
        """Let a sequence run from behind the blocks that are known; how many tokens of it these hold."""
        self._pool.touch(hits)
        self._rows.take(seq)
        self._rows.add_blocks(seq, hits)
        self.running.append(seq)
        self._running.changed()
        num_computed = len(hits) * self._block_size
        self._rows.num_computed[seq.row] = self._rows.num_named[seq.row] = num_computed
        self.prefix_hit_tokens += num_computed
        if seq.cached_tokens is None:
            seq.cached_tokens = min(num_computed, seq.num_prompt_tokens)
        return num_computed

    def _make_room(self, seq: Sequence, end: int) -> bool:
        """Hold blocks for the first `end` tokens, preempting from the tail; False when `seq` itself had to go."""
        needed = self._num_blocks(end) - len(seq.blocks)
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
        seq.blocks = []
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        self._running.changed()
        self._rows.give_back(seq)
        self._pool.free(seq.blocks)

    def _name_full_blocks(self, seq: Sequence, num_tokens: int, named: list[int]) -> None:
        """Offer the blocks that a step fills to the prefix cache at once, so that its own newcomers can share them.

        They may read them in the same step because a runner stores all keys before any query attends.
        """
        num_full = num_tokens // self._block_size
        seq.hash_full_blocks(self._rows.tokens_of(seq), self._block_size)
        for i in range(int(self._rows.num_named[seq.row]) // self._block_size, num_full):
            self._pool.commit(seq.blocks[i], seq.block_hashes[i])
            named.append(seq.blocks[i])
        self._rows.num_named[seq.row] = num_full * self._block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _within(budget: int, starts: Ints, num_tokens: Ints) -> Ints:
    """How far each gets with its part of a budget that is spent in order; whoever gets nothing is left out."""
    spent = np.cumsum(num_tokens - starts)
    if not len(spent) or spent[-1] <= budget:
        return num_tokens
    ends: Ints = num_tokens - np.maximum(spent - budget, 0).astype(np.int32)
    served: Ints = ends[ends > starts]
    return served
