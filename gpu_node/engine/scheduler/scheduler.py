"""The scheduler: decide how many tokens each sequence computes in the next step, and allocate the blocks for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.policy import FirstComeFirstServed, SchedulingPolicy
from penstock.gpu_node.engine.scheduler.background import BackgroundBudget, StepBudget
from penstock.gpu_node.engine.scheduler.beside import BesideBlocks
from penstock.gpu_node.engine.scheduler.budget import (
    PrefillBudget,
    SmallSteps,
    StepLimits,
    StepSize,
    StepTime,
    StepWork,
)
from penstock.gpu_node.engine.scheduler.drafts import Drafts
from penstock.gpu_node.engine.scheduler.faults import FaultIsolator
from penstock.gpu_node.engine.scheduler.input_batch import NO_GUIDES, InputBatch, TokenGuide
from penstock.gpu_node.engine.scheduler.preemption import Preemptor, SwapCost
from penstock.gpu_node.engine.scheduler.queues import Admission, PrefixHits, WaitingQueues, leave_group
from penstock.gpu_node.engine.scheduler.running import DelayedRows, RunningBatch, StepOutcome, StepProgress
from penstock.gpu_node.engine.scheduler.turns import RequestTurns
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Rows, Step, step_of
from penstock.gpu_node.model.protocol import FAILED_TOKEN, StepPlan, StepResult

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import PreemptionName


class LearnedTimes:
    """The models of step times: one each for prefill, swapping and drafts. Every computed step teaches them."""

    def __init__(
        self,
        preemption: PreemptionName,
        block_bytes: int,
        note_decoding: Callable[[int, int, float, float], None] | None = None,
    ) -> None:
        """`note_decoding` learns what drafts cost, where sequences may draft.

        It takes the numbers of sequences and of drafted tokens of a step that only decodes, the milliseconds that the
        runner took, and those until the next step could begin.
        """
        self.step_time = StepTime()
        self.swap_cost = SwapCost(preemption, block_bytes)
        self._note_decoding = note_decoding

    def note_step(self, step: Step, result: StepResult, *, num_scored: int, whole_ms: float) -> None:
        """Learn from a step that scored `num_scored` prompt tokens.

        `whole_ms` is the time from the step's planning to its completion.
        """
        runner_ms = result.forward_ms + result.sample_ms
        self.swap_cost.note_copies(len(step.copies), result.copy_ms)
        self.swap_cost.note_forward(step.num_prefill_tokens, result.forward_ms)
        self.step_time.note(StepWork.of(step, num_scored), runner_ms)
        if self._note_decoding is not None and not step.num_prefill_tokens:
            self._note_decoding(len(step.seqs), step.num_drafted, runner_ms, whole_ms - runner_ms)


class Scheduler:
    """Continuous batching under one token budget a step. A policy orders the sequences, by default FCFS.

    A sequence needs `num_tokens - num_computed` tokens, be it a prompt, a chunk, a decode step or a recomputation.
    Running sequences get theirs first; then swapped and waiting ones start while budget, rows and blocks last. When no
    block is free, a sequence is preempted: its blocks are swapped out or, where that costs more, recomputed later.

    A step is scheduled after the previous one was committed or rolled back, or ahead of that. Sequences may be added
    and removed while it runs. The blocks of a removed sequence are free at once, for use in a later step.
    """

    def __init__(
        self,
        memory: KvCacheManager,
        limits: StepLimits,
        times: LearnedTimes,
        *,
        policy: SchedulingPolicy | None = None,
        drafts_of: Callable[[RunningBatch, KvCacheManager, int], Drafts] | None = None,
    ) -> None:
        """`drafts_of` makes the drafts of the running sequences, for blocks of a size. By default there are none."""
        self.queues, policy = WaitingQueues(), policy or FirstComeFirstServed()
        self._in_flight: Step | None = None
        """The newest step, until its tokens are counted."""
        self._memory = memory
        self._limits = limits
        self._table = InputBatch(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self._guides = self._table.guides
        beside = BesideBlocks(memory, self._table, limits.block_size, limits.max_num_batched_tokens)
        self._batch = RunningBatch(memory, beside, self._table, limits.block_size)
        self._isolator, self._delayed = FaultIsolator(), DelayedRows(self._guides)
        self.drafts = Drafts() if drafts_of is None else drafts_of(self._batch, memory, limits.block_size)
        self._step_size = StepSize(limits.max_num_batched_tokens)
        self._prefill_budget = PrefillBudget(limits, self._batch, self.queues, times.step_time)
        self._small_steps = SmallSteps(self._batch, times.step_time)
        self.background = BackgroundBudget(limits, self._batch, self.queues, times.step_time)
        self._progress = StepProgress(self._batch)
        sequences = self._batch, self.queues
        self._has_shares, self._prefers_shortest = policy.has_shares, True
        self._turns = RequestTurns(self._batch) if policy.takes_turns else None
        self._admission = Admission(memory, *sequences, policy, self._isolator)
        self._preemptor = Preemptor(
            memory, *sequences, self._admission, times.swap_cost, policy, self._isolator, limits.max_num_seqs
        )

    @property
    def running(self) -> list[Sequence]:
        """The sequences that compute, in order of admission."""
        return self._batch.seqs

    @property
    def num_running(self) -> int:
        """The number of sequences that have a row, including forks that wait for their prompt to be computed."""
        return self._limits.max_num_seqs - self._table.num_unused

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence was preempted."""
        return self._preemptor.num_preemptions

    @property
    def num_swaps(self) -> int:
        """The number of preemptions that swapped blocks to the host."""
        return self._preemptor.num_swaps

    @property
    def prefix_hits(self) -> PrefixHits:
        """The tokens that admitted sequences found in the prefix cache."""
        return self._admission.hits

    @property
    def has_suspects(self) -> bool:
        """Whether fault isolation still suspects any sequence of a failed or slow step."""
        return self._isolator.has_any

    @property
    def max_step_tokens(self) -> int:
        """The largest number of tokens that the next step may compute."""
        return self._step_size.max_tokens

    @property
    def num_tokens_unused(self) -> int:
        """The tokens that fit into the held blocks besides those that are stored or being stored."""
        in_host = sum(len(seq.blocks) * self._limits.block_size - seq.num_stored for seq in self.queues.swapped)
        being_stored = self._in_flight.num_tokens_running if self._in_flight else 0
        return self._batch.num_tokens_unused() + in_host - being_stored

    def tokens_of(self, seq: Sequence) -> Ints:
        """Return the prompt and output of a sequence. Only the last token may still be unknown; it is then negative."""
        return self._table.tokens_of(seq) if seq.row >= 0 else seq.token_ids

    def add(self, *choices: Sequence, guides: Mapping[Sequence, TokenGuide] = NO_GUIDES) -> None:
        """Queue a request's choices and their guides; the first computes the prompt. Too many form several groups."""
        self._guides.update(guides)
        self.background.add(choices)
        num_blocks = max(self._batch.num_blocks(len(seq.token_ids)) for seq in choices)
        group_size = max(1, min(self._limits.max_num_seqs, self._memory.device.num_total - num_blocks + 1))
        if (most := self._batch.beside.max_group) is not None:
            group_size = min(group_size, most)
        for first in range(0, len(choices), group_size):
            self.queues.add(choices[first : first + group_size])

    def remove(self, seq: Sequence) -> None:
        """Drop a sequence, whether it is running, waiting or swapped."""
        self._isolator.forget(seq)
        self.background.forget(seq)
        self.drafts.forget(seq)
        self._guides.pop(seq, None)
        if seq.beams is not None:
            seq.beams.remove(seq)
            seq.is_parked = False
        if seq.row < 0:
            self.queues.remove(seq)
            self._admission.free(seq)
            return
        self._batch.leave(seq)
        leave_group(seq)
        if seq.forks:
            self.queues.put_back(*seq.forks)
            seq.forks = []

    def schedule(self) -> Step | None:
        """Return the next step, or None when there is nothing to compute."""
        self._admission.recompute_lost()
        self._batch.own_last_blocks()
        self.background.protect(self._memory.device.num_total)
        self._preemptor.preempt_for_request(self.max_step_tokens)
        num_small = 0 if self._isolator.has_any else self._small_steps.take()
        max_drafted_step = 0 if self._isolator.has_any or num_small else self.max_step_tokens
        self.drafts.write(max_drafted_step, only_foreground=self.background.bounds())
        preemptions_before = self.num_preemptions
        if (step := self._decide_small(num_small) or self._decide(self._budget())) is not None:
            return step
        if self.num_preemptions > preemptions_before:
            # The sequence that would have used the whole budget was preempted, or all beams of the only search.
            return self.schedule()
        if self.running or self.queues:
            raise InvariantError(f"stuck: {len(self.running)} running, {self.queues.num_waiting} waiting sequences")
        return None

    def schedule_ahead(self) -> Step | None:
        """Return the step after one that still runs, or None where the running step must complete first.

        It must where its samples or drafts are needed, where a sequence would be preempted, and while any is suspected
        of a fault. A sequence that turns out to have ended computes one token too many, which is dropped.
        """
        step = self._in_flight
        if step is None or self.drafts.num_written or self._isolator.has_any or not self._table.can_plan_past(step):
            return None
        self._progress.assume(step)
        self._in_flight = None
        self.background.protect(self._memory.device.num_total)
        num_small = self._small_steps.take()
        if not self.running:
            return None
        budget = StepBudget(num_small) if num_small else self._budget(running=step)
        if self._turns is not None:
            # Which sequences get tokens decides how many blocks the step needs.
            self._deal_in_turns(self._turns, budget)
        if not self._has_free_blocks(budget):
            return None
        if self._preemptor.yielding(self.max_step_tokens) or self._preemptor.preemption_request() is not None:
            return None
        self._batch.own_last_blocks()
        return self._decide_small(num_small) or self._decide(budget, is_ahead=True)

    def plan(self, step: Step) -> StepPlan:
        """Return a scheduled step in the form that the runner takes."""
        return self._table.plan(step)

    def commit(self, step: Step, tokens: Ints, late: Collection[int] = (), *, is_slow: bool = False) -> StepOutcome:
        """Record a step and its sampled tokens; remove sequences that end. Samples in `late` were not drawn."""
        faulty = self._isolator.note_completed(step, is_slow=is_slow)
        self._step_size.note_completed()
        self._delayed.add(step.sampled_seqs[i] for i in late)
        accepted, tokens, samples, poisoned = self.drafts.accept_drafts(step, tokens, late)
        outcome = StepOutcome(accepted.sampled_seqs, tokens.tolist(), samples)
        ending = self._progress.complete(accepted, tokens)
        self._batch.beside.commit(step, outcome.failed)
        for i in ending:
            seq = accepted.sampled_seqs[i]
            if seq.row >= 0:
                self.remove(seq)
            if outcome.token_ids[i] == FAILED_TOKEN:
                self._batch.uncache_unheld(seq, seq.blocks)
            outcome.ended.add(seq)
        for seq in poisoned:
            self._preemptor.start_over(seq)
        for seq in self._batch.beside.take_lost():
            self._preemptor.requeue(seq)
        if self._in_flight is step:
            self._in_flight = None
        elif (ahead := self._in_flight) is not None:
            self._batch.cache_filled_blocks(ahead.seqs, ahead.rows, ahead.ends, ahead.cached_blocks)
        if is_slow and self._in_flight is None:
            self._preemptor.isolate()
        outcome.faulty = None if faulty in outcome.ended else faulty
        return outcome

    def roll_back(self, step: Step, *, for_memory: bool = False, has_begun: bool = True) -> Sequence | None:
        """Record that a step, and any planned ahead, failed. Drop and return the sequence at fault, if that is certain.

        The others start over or, after an out-of-memory error, continue in smaller steps, unless their state is lost.
        """
        ahead = None if self._in_flight is step else self._in_flight
        lost = [step] if ahead is None else [step, ahead]
        cached = {block for one in lost for block in (*one.cached_blocks, *self._batch.first_blocks(one))}
        copied = {block for one in lost for block in one.copies[:, 1].tolist()}
        self._in_flight = None
        self._memory.uncache(cached | copied)
        faulty = self._isolator.note_failed(step, for_memory=for_memory)
        starts_over = self._progress.revert() or not for_memory
        self._batch.beside.roll_back()
        for seq in self._batch.present[::-1]:
            if seq.row < 0:
                continue  # It went with another beam of its search.
            is_intact = not starts_over and self._batch.is_intact(seq, cached, copied)
            if is_intact and self._batch.beside.is_intact(seq, step, has_begun=has_begun):
                self._batch.uncache(seq)
            else:
                self._preemptor.requeue(seq)
        for seq in [seq for seq in self.queues.swapped if not copied.isdisjoint(seq.blocks)]:
            self._admission.recompute(seq)
        if faulty is not None:
            self._step_size.restore()
            self.remove(faulty)
        elif for_memory:
            self._step_size.note_out_of_memory(step.num_tokens)
            self._preemptor.shrink(self.max_step_tokens)
        return faulty

    def lose_blocks(self) -> None:
        """Record that the step in flight failed and that no block has its content any more. All sequences start over.

        No sequence is blamed: the fault isolator searches only in steps that failed by themselves.
        """
        self._in_flight = None
        self._memory.uncache_all()
        self._progress.revert()
        self._batch.beside.lose_all()
        for seq in self._batch.present[::-1]:
            if seq.row >= 0:
                self._preemptor.requeue(seq)
        for seq in list(self.queues.swapped):
            self._admission.recompute(seq)
        self._memory.take_copies()

    def park(self, seq: Sequence) -> None:
        """Let a running beam, which has computed its newest token, skip steps until `continue_beams`."""
        self._delayed.park(seq)

    def continue_beams(self, beams: Items[tuple[Sequence, Sequence, int]]) -> None:
        """Continue the beams of a search, all of which are parked: each from a beam of the last step, with a token.

        `beams`: the sequence that continues, the one that it continues, and the token. A sequence that is continued by
        itself comes before the others that continue it. The first step has one beam, which the others continue.
        """
        self._batch.branch([(source, seq) for seq, source, _ in beams if seq is not source])
        for seq, _, token_id in beams:
            seq.is_parked = False
            self._table.append_one(seq, token_id)
            self._batch.beside.continue_beam(seq)

    def check_integrity(self) -> None:
        """Raise InvariantError unless queues, rows and blocks agree. O(blocks), for tests."""
        self._batch.check_integrity(self.queues.swapped)
        self.queues.check_integrity()

    def _budget(self, *, running: Step | None = None) -> StepBudget:
        """Return the token budget of the next step, and where it is planned ahead, of the one after `running`."""
        rows, max_tokens = self._batch.rows, self.max_step_tokens
        to_compute = self._table.num_tokens[rows] - self._table.num_computed[rows]
        if self._isolator.has_any or not self.background.bounds():
            return StepBudget(self._num_tokens(to_compute, has_waiting=bool(self.queues)))
        is_background = self._table.is_background[rows]
        foreground, has_waiting = to_compute[~is_background], bool(self.queues.foreground(self.queues))
        to_compute[is_background] = 0
        num_tokens = 0
        if len(foreground) or has_waiting:
            num_tokens = self._num_tokens(to_compute, has_waiting=has_waiting, only_foreground=True)
        return self.background.divide(num_tokens, self.drafts.num_written, max_tokens, running)

    def _num_tokens(self, to_compute: Ints, *, has_waiting: bool, only_foreground: bool = False) -> int:
        """Return the token budget of the sequences that lack tokens."""
        max_tokens, num_decoding = self.max_step_tokens, int(np.count_nonzero(to_compute == 1))
        if not num_decoding or (num_decoding == np.count_nonzero(to_compute > 0) and not has_waiting):
            return max_tokens
        num_decoded = num_decoding + self.drafts.num_written
        num_prompt_tokens = self._prefill_budget.num_tokens(to_compute, num_decoded, only_foreground=only_foreground)
        return min(max_tokens, num_decoded + num_prompt_tokens)

    def _decide(self, budget: StepBudget, *, is_ahead: bool = False) -> Step | None:
        """Divide a token budget between running and new sequences. Return None where no sequence progresses."""
        cached: list[int] = []
        if self._has_shares:
            self._share_budget(budget.tokens, is_ahead=is_ahead)
        if self._turns is not None and not is_ahead:
            self._deal_in_turns(self._turns, budget)
        preemptions_before = self.num_preemptions
        ends = self._schedule_running(budget, cached)
        if self.num_preemptions == preemptions_before and len(ends) == len(self.running):
            ends = self._admit(budget, ends, cached)
        self._in_flight = self._step(ends, cached)
        if self._has_shares and self._in_flight is not None:
            self._small_steps.note_full(self._in_flight)
        if self._turns is not None and self._in_flight is not None:
            self._turns.note(self._in_flight)
        return self._in_flight

    def _decide_small(self, num_small: int) -> Step | None:
        """Return a step in which the first `num_small` sequences decode and no other computes; None for none."""
        if not num_small:
            return None
        cached: list[int] = []
        ends = self._schedule_running(StepBudget(num_small), cached)
        self._in_flight = self._step(ends, cached)
        return self._in_flight

    def _share_budget(self, budget: int, *, is_ahead: bool) -> None:
        """Where prompts take more than a step's budget, let each tenant's prompts have their turn.

        Every other step prefers the oldest prompts to the shortest ones, so that no long one waits for ever.
        """
        rows = self._batch.rows
        to_compute = self._table.num_tokens[rows] - self._table.num_computed[rows]
        if self.background.bounds():
            to_compute = to_compute[~self._table.is_background[rows]]
        if not len(to_compute) or sum(to_compute.tolist()) < budget:
            return
        if self.queues and not is_ahead:
            # Newcomers take blocks, which a step ahead has counted as free.
            self._admission.start_newcomers()
        self._batch.share_prefill(shortest_first=self._prefers_shortest)
        self._prefers_shortest = not self._prefers_shortest

    def _deal_in_turns(self, turns: RequestTurns, budget: StepBudget) -> None:
        """Where a step has too few tokens for all sequences, let each have its turn, those that wait included."""
        only_foreground = budget.granted is not None
        if self.queues and turns.is_short(budget.tokens, only_foreground=only_foreground):
            self._admission.start_newcomers(one_of_a_tenant=False)
        turns.arrange(budget.tokens, only_foreground=only_foreground)

    def _has_free_blocks(self, budget: StepBudget) -> bool:
        """Return whether enough blocks are free for all running sequences in a step."""
        rows, table = self._batch.rows, self._table
        ends = budget.ends(table, rows, table.num_tokens[rows])
        rows = rows[: len(ends)]
        lacking = np.maximum(ends - table.capacity[rows], 0)
        if int((-(-lacking // self._limits.block_size)).sum()) > self._memory.device.num_free:
            return False
        beside = self._batch.beside
        return beside.is_empty or sum(beside.lacking(rows, ends).tolist()) <= beside.num_free

    def _schedule_running(self, budget: StepBudget, cached: list[int]) -> Ints:
        """Return the end position of each running sequence that gets tokens; sequences without any come after them."""
        rows, table = self._batch.rows, self._table
        num_wanted = table.num_tokens[rows]
        if self.drafts.num_written:
            num_wanted += table.num_drafted[rows]
        ends = budget.ends(table, rows, num_wanted)
        ends = self._delayed.cut(self.running, table.num_computed[rows[: len(ends)]], ends)
        short = self._short(rows[: len(ends)], ends)
        ends = self._allocate(short, ends) if short else ends
        rows = self._batch.rows[: len(ends)]
        known = ends if self._progress.assumed is None else table.num_known(rows, ends)
        self._batch.cache_filled_blocks(self.running, rows, known, cached)
        return ends

    def _short(self, rows: Rows, ends: Ints) -> list[int]:
        """Return the indices of the rows that lack blocks to compute up to `ends` tokens."""
        is_short = ends > self._table.capacity[rows]
        if not self._batch.beside.is_empty:
            is_short |= self._batch.beside.lacking(rows, ends) > 0
        found: list[int] = is_short.nonzero()[0].tolist()
        return found

    def _allocate(self, short: list[int], ends: Ints) -> Ints:
        """Allocate blocks for the running sequences at the indices `short`; return the ends of those that still run."""
        seqs = self.running[: len(ends)]
        num_running = len(self.running)
        for i in short:
            if seqs[i].row >= 0:
                self._preemptor.grow(seqs[i], max(0, self._batch.num_blocks(int(ends[i])) - len(seqs[i].blocks)))
            if seqs[i].row >= 0:
                ends[i] = self._preemptor.widen(seqs[i], int(ends[i]))
        kept: Ints = ends[np.array([seq.row >= 0 for seq in seqs])]
        return ends if len(self.running) == num_running else kept

    def _admit(self, budget: StepBudget, ends: Ints, cached: list[int]) -> Ints:
        """Start queued sequences with the rest of the budget; return the ends of all running sequences."""
        if not self.queues:
            return ends
        grants = budget.grants(self._table, self._batch.rows, ends, cached)
        self._admission.admit(grants)
        return np.concatenate((ends, np.array(grants.ends, dtype=np.int32)))

    def _step(self, ends: Ints, cached: list[int]) -> Step | None:
        """Return the step in which the first `len(ends)` running sequences compute up to `ends`; None for no token."""
        num = len(ends)
        # A plan reuses the settings of the last one while the array of rows stays the same.
        rows = self._batch.rows if num == len(self.running) else self._batch.rows[:num]
        starts, num_tokens = self._table.num_computed[rows], self._table.num_tokens[rows]
        if not np.count_nonzero(ends > starts):
            return None
        step = step_of(
            self.running[:num], rows, starts, ends, num_tokens, cached_blocks=cached, copies=self._memory.take_copies()
        )
        return self._batch.beside.plan(step)
