"""Who computes how many tokens in the next step, and who holds which blocks for it."""

from __future__ import annotations

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.admission import Admission, Grants, PrefixHits
from penstock.gpu_node.engine.discipline import Discipline, FirstComeFirstServed
from penstock.gpu_node.engine.limits import Limits, StepSize, within
from penstock.gpu_node.engine.memory import KvMemory
from penstock.gpu_node.engine.preemption import PreemptionCosts
from penstock.gpu_node.engine.queues import Queues, leave_group
from penstock.gpu_node.engine.residents import Residents
from penstock.gpu_node.engine.rows import Ints, Landed, RowTable, Step, step_of
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.suspects import Suspects
from penstock.gpu_node.model.protocol import FAILED_TOKEN, StepPlan


class Scheduler:
    """One token budget, without phases; the discipline says who is next, by default who came first.

    Every sequence needs `num_tokens - num_computed` tokens, be it a prompt, a chunk of one, a decode step or a
    recompute. Running sequences come first, then swapped and waiting ones while budget, rows and blocks last. A running
    sequence that finds no block has another one preempted, whose blocks are copied to the host or, where that has no
    room or costs more, computed again later. One that the device cannot hold alone runs in host blocks as well.

    A step is scheduled only after the one before it was committed or rolled back. Between the two, sequences may be
    added and removed; the blocks of a removed one are free at once, though the step may still write to them, because
    nobody is given a block before the next step is scheduled.
    """

    def __init__(
        self, memory: KvMemory, limits: Limits, costs: PreemptionCosts, *, discipline: Discipline | None = None
    ) -> None:
        self.queues = Queues()
        self.num_preemptions = self.num_swaps = 0
        self._in_flight: Step | None = None
        self._memory = memory
        self._limits = limits
        self._costs = costs
        self._discipline = discipline = discipline or FirstComeFirstServed()
        self._rows = RowTable(limits.max_num_seqs, limits.max_model_len, limits.block_size)
        self._residents = Residents(memory, self._rows, limits.block_size)
        self._suspects = Suspects()
        self._step_size = StepSize(limits.max_num_batched_tokens)
        self._admission = Admission(memory, self._residents, self.queues, discipline, self._suspects)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that compute, in order of admission."""
        return self._residents.seqs

    @property
    def num_running(self) -> int:
        """Sequences that have a row; some of them may wait for another one to compute their prompt."""
        return self._limits.max_num_seqs - self._rows.num_unused

    @property
    def prefix_hits(self) -> PrefixHits:
        """What sequences found computed when they were admitted."""
        return self._admission.hits

    @property
    def max_step_tokens(self) -> int:
        """Most tokens that the next step may have."""
        return self._step_size.max_tokens

    @property
    def num_tokens_unused(self) -> int:
        """Tokens that the blocks held have room for and nobody has stored or is storing."""
        in_host = sum(len(seq.blocks) * self._limits.block_size - seq.num_stored for seq in self.queues.swapped)
        under_way = 0 if self._in_flight is None else self._in_flight.num_tokens_running
        return self._residents.num_tokens_unused() + in_host - under_way

    def tokens_of(self, seq: Sequence) -> Ints:
        """Prompt and output of a sequence so far."""
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
        """Drop a sequence that is done or no longer wanted, wherever it is."""
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
        self._make_way()
        named: list[int] = []
        preemptions_before = self.num_preemptions
        budget = self._budget()
        ends = self._schedule_running(budget, named)
        if self.num_preemptions == preemptions_before and len(ends) == len(self.running):
            ends = self._admit(budget, ends, named)
        if len(ends):
            self._in_flight = self._step(ends, named)
            return self._in_flight
        if self.running and self.num_preemptions > preemptions_before:
            return self.schedule()  # whoever had the whole step gave way: the others have it
        if self.running or self.queues:
            raise InvariantError(f"{len(self.running)} running and {self.queues.num_waiting} waiting ones are stuck")
        return None

    def plan(self, step: Step) -> StepPlan:
        """A scheduled step as the runner sees it."""
        return self._rows.plan(step)

    def commit(self, step: Step, tokens: Ints) -> Landed:
        """Note that a step was computed and what it sampled; whoever ends by that leaves."""
        self._in_flight = None
        self._suspects.landed(step)
        self._step_size.landed()
        # A removed sequence's row is written to as well: nobody has it before the next step is scheduled.
        self._rows.num_computed[step.rows] = step.ends
        self._rows.append(step.sampled_rows, tokens)
        self._residents.start_forks()
        landed = Landed(step.sampled_seqs, token_ids := tokens.tolist(), set(), [])
        for i in self._may_end(step, token_ids):
            seq = step.sampled_seqs[i]
            if token_ids[i] == FAILED_TOKEN:
                landed.broken_blocks.extend(self._discard(seq))
            elif seq.row >= 0 and self._ends(seq, token_ids[i]):
                self.remove(seq)
            else:
                continue
            landed.ended.add(seq)
        return landed

    def roll_back(self, step: Step, *, for_memory: bool = False) -> Sequence | None:
        """Note that a step failed, and that what it was to store or to copy is not there: whoever runs starts over.

        Where it found no memory, all go on from where they were, but in smaller steps for a while, with as many of them
        as fit into one. Answers the sequence that makes steps fail and was dropped for it, once that is sure.
        """
        self._in_flight = None
        named, copied = set(step.named_blocks), set(step.copies[:, 1].tolist())
        self._memory.forget(named | copied)
        guilty = self._suspects.failed(step, for_memory=for_memory)
        for seq in self.running[::-1]:
            if for_memory and self._residents.is_intact(seq, named, copied):
                self._residents.unname(seq)
            else:
                self._requeue(seq)
        for seq in [seq for seq in self.queues.swapped if not copied.isdisjoint(seq.blocks)]:
            self._admission.recompute(seq)
        if guilty is not None:
            self._step_size.restore()
            self.remove(guilty)
        elif for_memory:
            self._step_size.found_no_memory(step.num_tokens)
            self._shrink_batch()
        return guilty

    def check_integrity(self) -> None:
        """Raise InvariantError unless lists, rows, blocks and reference counts agree; O(blocks), for tests."""
        self._residents.check_integrity(self.queues.swapped)
        self.queues.check_integrity()

    def _make_way(self) -> None:
        """Preempt for whoever does not wait for room, before anything of the step is decided."""
        pressing = None if self._suspects.is_trying else self._discipline.pressing(self.queues, self.running)
        if pressing is None:
            return
        newcomer, victims = pressing
        if not self._admission.could_have_room(newcomer, victims):
            return
        for victim in victims:
            if self._admission.has_room(newcomer):
                return
            self._preempt(victim)

    def _shrink_batch(self) -> None:
        """Preempt until the running ones fit into a step."""
        for seq in [seq for seq in self.running if self._suspects.bars(seq)]:
            self._preempt(seq)
        while len(self.running) > self.max_step_tokens:
            self._preempt(self._discipline.victim(self.running))

    def _budget(self) -> int:
        """Tokens of the next step."""
        rows, most = self._residents.rows, self._step_size.max_tokens
        to_compute = self._rows.num_tokens[rows] - self._rows.num_computed[rows]
        num_decoding = int(np.count_nonzero(to_compute == 1))
        if not num_decoding or self._limits.max_prefill_beside_decode >= most:
            return most
        waiting = int(to_compute.sum()) - num_decoding + self.queues.num_tokens_waiting
        return min(most, num_decoding + self._limits.prefill_beside_decode(waiting))

    def _schedule_running(self, budget: int, named: list[int]) -> Ints:
        """How far each of the running sequences gets that get something; the others are the last ones."""
        rows, table = self._residents.rows, self._rows
        ends = within(budget, table.num_computed[rows], table.num_tokens[rows])
        short = (ends > table.capacity[rows[: len(ends)]]).nonzero()[0].tolist()
        if short:
            ends = self._make_room(short, ends)
        filling = ends - table.num_named[self._residents.rows[: len(ends)]] >= self._limits.block_size
        for i in filling.nonzero()[0].tolist():
            self._residents.name_full_blocks(self.running[i], int(ends[i]), named)
        return ends

    def _make_room(self, short: list[int], ends: Ints) -> Ints:
        """Give blocks to those of the running that lack them; how far those get that still run."""
        seqs = self.running[: len(ends)]
        num_running = len(self.running)
        for i in short:
            if seqs[i].row >= 0:
                self._grow(seqs[i], self._residents.num_blocks(int(ends[i])) - len(seqs[i].blocks))
        if len(self.running) == num_running:
            return ends
        kept: Ints = ends[np.array([seq.row >= 0 for seq in seqs])]
        return kept

    def _grow(self, seq: Sequence, num_blocks: int) -> None:
        """Find blocks for a running sequence: preempt, at last itself; one that runs alone may have the host's."""
        device, host = self._memory.device, self._memory.host
        while num_blocks > device.num_free and len(self.running) > 1:
            victim = self._discipline.victim(self.running)
            self._preempt(victim)
            if victim is seq:
                return
        while num_blocks > device.num_free + host.num_free and self.queues.swapped:
            self._admission.recompute(self.queues.swapped[-1])
        self._residents.grow(seq, num_blocks)

    def _admit(self, budget: int, ends: Ints, named: list[int]) -> Ints:
        """Let others run with the budget that is left; how far each of all running ones gets."""
        if not self.queues:
            return ends
        spent = int((ends - self._rows.num_computed[self._residents.rows]).sum())
        grants = Grants(budget - spent, named)
        self._admission.admit(grants)
        return np.concatenate((ends, np.array(grants.ends, dtype=np.int32)))

    def _preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks: to the host, if that has room and is the cheaper way."""
        self.num_preemptions += 1
        num_stored = int(self._rows.num_computed[seq.row])
        num_blocks = self._memory.num_to_swap(seq.blocks[: self._residents.num_blocks(num_stored)])
        has_room = num_stored and not seq.forks and num_blocks <= self._memory.host.num_free
        if has_room and self._costs.prefers_swap(num_blocks, num_stored):
            self.num_swaps += 1
            self._residents.swap_out(seq)
            self.queues.put_back(seq)
        else:
            self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        """Let a running sequence wait, with the forks that it did not start yet, and compute all of it again."""
        self._residents.leave(seq)
        for one in (seq, *seq.forks):
            one.blocks = []
        self.queues.put_back(seq, *seq.forks)

    def _step(self, ends: Ints, named: list[int]) -> Step:
        """The step in which the first `len(ends)` running sequences get as far as that."""
        rows, num = self._residents.rows, len(ends)
        rows = rows if num == len(rows) else rows[:num]
        starts, num_tokens = self._rows.num_computed[rows], self._rows.num_tokens[rows]
        return step_of(
            self.running[:num], rows, starts, ends, num_tokens, named_blocks=named, copies=self._memory.take_copies()
        )

    def _may_end(self, step: Step, token_ids: list[int]) -> list[int]:
        """The samples that a look at all of them at once cannot clear."""
        found = (step.sampled_ends + 1 >= self._rows.limit[step.sampled_rows]).nonzero()[0].tolist()
        end_ids = self._residents.end_ids
        if end_ids.isdisjoint(token_ids):
            return found
        return sorted({*found, *(i for i, token_id in enumerate(token_ids) if token_id in end_ids)})

    def _ends(self, seq: Sequence, token_id: int) -> bool:
        num_output_tokens = int(self._rows.num_tokens[seq.row]) - seq.num_prompt_tokens
        return seq.end_rule.reason(token_id, num_output_tokens) is not None

    def _discard(self, seq: Sequence) -> list[int]:
        """Drop a sequence whose computation failed; the blocks that nobody holds any more, now unknown to all."""
        if seq.row >= 0:
            self.remove(seq)
        blocks = [block for block in seq.blocks if self._memory.ref_count(block) == 0]
        self._memory.forget(blocks)
        return blocks
