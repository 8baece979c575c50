"""Who computes how many tokens in the next step, and who holds which blocks for it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.base import FirstComeFirstServed, SchedulingPolicy
from penstock.gpu_node.engine.scheduler.admission import Admission, Grants, PrefixHits
from penstock.gpu_node.engine.scheduler.delayed_rows import DelayedRows
from penstock.gpu_node.engine.scheduler.drafts import Drafts
from penstock.gpu_node.engine.scheduler.fault_isolation import FaultIsolator
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch
from penstock.gpu_node.engine.scheduler.limits import StepLimits, StepSize, within
from penstock.gpu_node.engine.scheduler.preemption import Preemptor
from penstock.gpu_node.engine.scheduler.prefill_budget import PrefillBudget
from penstock.gpu_node.engine.scheduler.progress import StepOutcome, StepProgress
from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.scheduler.swap_cost import SwapCost
from penstock.gpu_node.engine.scheduler.waiting import WaitingQueues, leave_group
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.speculative.budget import DraftBudget
from penstock.gpu_node.engine.steps import Ints, Step, step_of
from penstock.gpu_node.model.protocol import FAILED_TOKEN, StepPlan


class Scheduler:
    """One token budget, without phases; the discipline says who is next, by default who came first.

    Every sequence needs `num_tokens - num_computed` tokens, be it a prompt, a chunk of one, a decode step or a
    recompute. Running sequences come first, then swapped and waiting ones while budget, rows and blocks last. When no
    block is free another sequence is preempted: its blocks are swapped out or, where that costs more, recomputed later.

    A step is scheduled after the one before it was committed or rolled back, or ahead of that. While it runs, sequences
    may be added and removed. Blocks of a removed one are free at once: what gets them runs in a later step.
    """

    def __init__(
        self,
        memory: KvCacheManager,
        limits: StepLimits,
        costs: SwapCost,
        *,
        discipline: SchedulingPolicy | None = None,
        speculation: DraftBudget | None = None,
    ) -> None:
        self.queues, discipline = WaitingQueues(), discipline or FirstComeFirstServed()
        self._in_flight: Step | None = None
        """The newest step, as long as nothing counts what it computes."""
        self._memory = memory
        self._limits = limits
        self._rows = InputBatch(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self._residents = RunningBatch(memory, self._rows, limits.block_size)
        self._suspects, self._held_back = FaultIsolator(), DelayedRows()
        self.drafts = Drafts(self._residents, memory, speculation or DraftBudget(0), limits.block_size)
        self._step_size = StepSize(limits.max_num_batched_tokens)
        self.prefill_budget = PrefillBudget(limits, self._residents, self.queues)
        self._progress = StepProgress(self._residents)
        parties = self._residents, self.queues
        self._admission = Admission(memory, *parties, discipline, self._suspects)
        self._retreat = Preemptor(memory, *parties, self._admission, costs, discipline, self._suspects)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that compute, in order of admission."""
        return self._residents.seqs

    @property
    def num_running(self) -> int:
        """Sequences that have a row; some of them may wait for another one to compute their prompt."""
        return self._limits.max_num_seqs - self._rows.num_unused

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence lost its blocks."""
        return self._retreat.num_preemptions

    @property
    def num_swaps(self) -> int:
        """How many of these times they were copied to the host."""
        return self._retreat.num_swaps

    @property
    def prefix_hits(self) -> PrefixHits:
        """What sequences found computed when they were admitted."""
        return self._admission.hits

    @property
    def has_suspects(self) -> bool:
        """Whether sequences of a step that failed or was slow are told apart."""
        return self._suspects.has_any

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that the next step may have."""
        return self._step_size.max_tokens

    @property
    def num_tokens_unused(self) -> int:
        """Tokens that fit into the held blocks beside those that are stored or being stored."""
        in_host = sum(len(seq.blocks) * self._limits.block_size - seq.num_stored for seq in self.queues.swapped)
        under_way = self._in_flight.num_tokens_running if self._in_flight else 0
        return self._residents.num_tokens_unused() + in_host - under_way

    def tokens_of(self, seq: Sequence) -> Ints:
        """Prompt and output of a sequence so far; at most the last one is still to come, and below 0."""
        return self._rows.tokens_of(seq) if seq.row >= 0 else seq.token_ids

    def add(self, *choices: Sequence) -> None:
        """Queue choices of one request: the first one computes the prompt for all, and they start together.

        More of them than could ever be held at once start in several groups.
        """
        num_blocks = max(self._residents.num_blocks(len(seq.token_ids)) for seq in choices)
        most = max(1, min(self._limits.max_num_seqs, self._memory.device.num_total - num_blocks + 1))
        for first in range(0, len(choices), most):
            self.queues.add(choices[first : first + most])

    def remove(self, seq: Sequence) -> None:
        """Drop a sequence, wherever it is."""
        self._suspects.forget(seq)
        if seq.row < 0:
            self.queues.remove(seq)
            self._memory.free(seq.blocks)
            return
        self._residents.leave(seq)
        leave_group(seq)
        if seq.forks:
            self.queues.put_back(*seq.forks)
            seq.forks = []

    def schedule(self) -> Step | None:
        """Decide the next step, or None when there is nothing to do."""
        self._residents.own_last_blocks()
        self._retreat.make_way()
        self.drafts.write(0 if self._suspects.has_any else self.max_step_tokens)
        preemptions_before = self.num_preemptions
        if (step := self._decide()) is not None:
            return step
        if self.running and self.num_preemptions > preemptions_before:
            return self.schedule()  # whoever had the whole step gave way: the others have it
        if self.running or self.queues:
            raise InvariantError(f"{len(self.running)} running and {self.queues.num_waiting} waiting ones are stuck")
        return None

    def schedule_ahead(self) -> Step | None:
        """Decide the step behind one that still runs, or None where that one should land first.

        That one lands first where its samples or drafts must be known, where a sequence would be preempted, and while
        sequences are suspects. A sequence that turns out to have ended computes one token too many, which is dropped.
        """
        step = self._in_flight
        if step is None or self.drafts.num_written or self._suspects.has_any or not self._rows.can_plan_past(step):
            return None
        self._progress.assume(step)
        self._in_flight = None
        if not self.running or not self._have_room() or self._retreat.pressing() is not None:
            return None
        self._residents.own_last_blocks()
        return self._decide()

    def plan(self, step: Step) -> StepPlan:
        """A scheduled step as the runner sees it."""
        return self._rows.plan(step)

    def commit(self, step: Step, tokens: Ints, late: Collection[int] = (), *, is_slow: bool = False) -> StepOutcome:
        """Note that a step was computed and what it sampled but for the `late` ones; sequences that end leave."""
        faulty = self._suspects.landed(step, is_slow=is_slow)
        self._step_size.landed()
        self._held_back.add(step.sampled_seqs[i] for i in late)
        standing, tokens, samples, poisoned = self.drafts.settle(step, tokens, late)
        landed = StepOutcome(standing.sampled_seqs, tokens.tolist(), samples)
        for i in self._progress.land(standing, tokens):
            seq = standing.sampled_seqs[i]
            if landed.token_ids[i] == FAILED_TOKEN:
                landed.broken_blocks.extend(self._discard(seq))
            else:
                self.remove(seq)
            landed.ended.add(seq)
        for seq in poisoned:
            landed.broken_blocks.extend(self._retreat.start_over(seq))
        if self._in_flight is step:
            self._in_flight = None
        elif (ahead := self._in_flight) is not None:
            self._residents.name_filled(ahead.seqs, ahead.rows, ahead.ends, ahead.named_blocks)
        if is_slow and self._in_flight is None:
            self._retreat.isolate()
        landed.faulty = None if faulty in landed.ended else faulty
        return landed

    def roll_back(self, step: Step, *, for_memory: bool = False) -> Sequence | None:
        """Note that a step failed: all that run start over, or go on in smaller steps where it found no memory.

        Return the sequence at fault, once that is sure; it is dropped. A step scheduled ahead is rolled back as well.
        """
        ahead = None if self._in_flight is step else self._in_flight
        lost = [step] if ahead is None else [step, ahead]
        named = {block for one in lost for block in one.named_blocks}
        copied = {block for one in lost for block in one.copies[:, 1].tolist()}
        self._in_flight = None
        self._memory.forget(named | copied)
        guilty = self._suspects.failed(step, for_memory=for_memory)
        starts_over = self._progress.take_back() or not for_memory
        for seq in self._residents.present[::-1]:
            if starts_over or not self._residents.is_intact(seq, named, copied):
                self._retreat.requeue(seq)
            else:
                self._residents.unname(seq)
        for seq in [seq for seq in self.queues.swapped if not copied.isdisjoint(seq.blocks)]:
            self._admission.recompute(seq)
        if guilty is not None:
            self._step_size.restore()
            self.remove(guilty)
        elif for_memory:
            self._step_size.found_no_memory(step.num_tokens)
            self._retreat.shrink(self.max_step_tokens)
        return guilty

    def check_integrity(self) -> None:
        """Raise InvariantError unless lists, rows and blocks agree; O(blocks), for tests."""
        self._residents.check_integrity(self.queues.swapped)
        self.queues.check_integrity()

    def _budget(self) -> int:
        """Tokens of the next step."""
        rows, most = self._residents.rows, self.max_step_tokens
        to_compute = self._rows.num_tokens[rows] - self._rows.num_computed[rows]
        if not (num_decoding := int((to_compute == 1).sum())) or (num_decoding == len(rows) and not self.queues):
            return most
        num_decoded = num_decoding + self.drafts.num_written
        return min(most, num_decoded + self.prefill_budget.num_tokens(to_compute, num_decoded))

    def _decide(self) -> Step | None:
        """The step that running sequences and newcomers get out of a budget; None where nobody gets anything."""
        named: list[int] = []
        preemptions_before = self.num_preemptions
        ends = self._schedule_running(budget := self._budget(), named)
        if self.num_preemptions == preemptions_before and len(ends) == len(self.running):
            ends = self._admit(budget, ends, named)
        moves = ends > self._rows.num_computed[self._residents.rows[: len(ends)]]
        self._in_flight = self._step(ends, named) if moves.any() else None
        return self._in_flight

    def _have_room(self) -> bool:
        """Whether the running sequences find all blocks for the next step."""
        rows, table = self._residents.rows, self._rows
        ends = within(self._budget(), table.num_computed[rows], table.num_tokens[rows])
        lacking = np.maximum(ends - table.capacity[rows[: len(ends)]], 0)
        return int((-(-lacking // self._limits.block_size)).sum()) <= self._memory.device.num_free

    def _schedule_running(self, budget: int, named: list[int]) -> Ints:
        """How far each of the running sequences gets that get something; the others are the last ones."""
        rows, table = self._residents.rows, self._rows
        num_wanted = table.num_tokens[rows]
        if self.drafts.num_written:
            num_wanted += table.num_drafted[rows]
        ends = within(budget, table.num_computed[rows], num_wanted)
        ends = self._held_back.cut(self.running, table.num_computed[rows[: len(ends)]], ends)
        short = (ends > table.capacity[rows[: len(ends)]]).nonzero()[0].tolist()
        ends = self._make_room(short, ends) if short else ends
        rows = self._residents.rows[: len(ends)]
        known = ends if self._progress.assumed is None else table.num_known(rows, ends)
        self._residents.name_filled(self.running, rows, known, named)
        return ends

    def _make_room(self, short: list[int], ends: Ints) -> Ints:
        """Give blocks to those of the running that lack them; how far those get that still run."""
        seqs = self.running[: len(ends)]
        num_running = len(self.running)
        for i in short:
            if seqs[i].row >= 0:
                self._retreat.grow(seqs[i], self._residents.num_blocks(int(ends[i])) - len(seqs[i].blocks))
        kept: Ints = ends[np.array([seq.row >= 0 for seq in seqs])]
        return ends if len(self.running) == num_running else kept

    def _admit(self, budget: int, ends: Ints, named: list[int]) -> Ints:
        """Let others run with the budget that is left; how far each of all running ones gets."""
        if not self.queues:
            return ends
        grants = Grants(budget - int((ends - self._rows.num_computed[self._residents.rows]).sum()), named)
        self._admission.admit(grants)
        return np.concatenate((ends, np.array(grants.ends, dtype=np.int32)))

    def _step(self, ends: Ints, named: list[int]) -> Step:
        """The step in which the first `len(ends)` running sequences get as far as that."""
        num = len(ends)
        rows = self._residents.rows[:num]
        starts, num_tokens = self._rows.num_computed[rows], self._rows.num_tokens[rows]
        return step_of(
            self.running[:num], rows, starts, ends, num_tokens, named_blocks=named, copies=self._memory.take_copies()
        )

    def _discard(self, seq: Sequence) -> list[int]:
        """Drop a sequence whose computation failed; the blocks that nobody holds any more, now unknown to all."""
        if seq.row >= 0:
            self.remove(seq)
        return self._memory.forget_unheld(seq.blocks)
