"""Scheduler and memory under any order of events: every sequence reads its own keys, and all counts agree.

HYPOTHESIS_PROFILE=full runs more than 100,000 steps.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes.schedules import BLOCK_SIZE, EOS, LabelledCache, check_plan, new_scheduler, new_sequence
from fakes.slots import Beams, LabelledSlots, UncertainGuide
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gpu_node.engine.policy.policy import FirstComeFirstServed, NumTokens, in_turns
from penstock.gpu_node.engine.sequence import Sequence, block_hash
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN, NO_WINDOWS, StepPlan, WindowSizes

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
picks = st.integers(0, 1000)
COMMON_EVENTS = ("swap", "resume", "out", "in", "fork", "shared", "ahead", "awaited")
RARE_EVENTS = ("in place", "failure", "no memory", "overshot", "kept state", "lost state", "eviction", "late")
STATE_EVENTS = ("snapshot hit", "save", "other slot", "beams")
WINDOW_EVENTS = ("window hit", "window missed", "behind window", "window copy")
"""Few random examples may miss these."""


class Whim(FirstComeFirstServed):
    """A policy that follows the test: which sequence preempts, which may pass, and which is the victim."""

    def __init__(self) -> None:
        self.pressed: tuple[int, int] | None = None
        self.pick = 0
        self.takes_turns = False
        self.is_over = False
        """Whether it is fair from now on: a whim may preempt the beams of a search again and again."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Rotate the waiting sequences of each turn, and pass those that do not fit."""
        for seqs in in_turns(waiting):
            if self.is_over:
                super().offer(seqs, start)
                continue
            at = self.pick % len(seqs) if seqs else 0
            for seq in seqs[at:] + seqs[:at]:
                start(seq)

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Ask once, for the drawn sequence."""
        seqs, pressed = list(waiting), self.pressed
        self.pressed = None
        if pressed is None or not seqs:
            return None
        return seqs[pressed[0] % len(seqs)], running[pressed[1] % (len(running) + 1) :]

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the drawn sequence."""
        if self.is_over:
            return super().victim(running, num_tokens)
        return running[self.pick % len(running)]


class EngineMachine(RuleBasedStateMachine):
    """Any order of arrivals, aborts, steps, failures and preemptions, also while a step is in flight."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.slots = LabelledCache(), LabelledSlots()
        self.windows = LabelledCache()
        self.guides: dict[Sequence, UncertainGuide] = {}
        self.searches: list[Beams] = []
        self.texts: dict[Sequence, list[int]] = {}
        self.flights: list[tuple[Step, StepPlan]] = []
        self.num_added = 0
        self.whim = Whim()

    @initialize(
        num_blocks=st.integers(6, 14),
        num_host_blocks=st.sampled_from((0, 3, 8, 20)),
        budget=st.integers(6, 20),
        preemption=st.sampled_from(("recompute", "swap", "swap", "auto")),
        eviction=st.sampled_from(("lru", "lfu", "length")),
        caching=st.sampled_from((True, True, True, False)),
        in_order=st.booleans(),
        in_turns=st.booleans(),
        max_in_flight=st.integers(1, 2),
        num_slots=st.sampled_from((12, 12, 0, 13, 18)),
        window=st.sampled_from((0, 0, 1, 3, 6, 11)),
        alignment=st.sampled_from((1, 4, 8)),
        spare_windows=st.integers(0, 16),
    )
    def start(
        self,
        num_blocks: int,
        num_host_blocks: int,
        budget: int,
        preemption: str,
        eviction: str,
        caching: bool,
        in_order: bool,
        in_turns: bool,
        max_in_flight: int,
        num_slots: int,
        window: int = 0,
        alignment: int = 1,
        spare_windows: int = 0,
    ) -> None:
        windows = NO_WINDOWS
        if window:
            self.window_each = WindowSizes(1, 1, window, alignment).most_held(BLOCK_SIZE) + 1
            windows = WindowSizes(self.window_each + spare_windows, 1, window, alignment)
        self.has_windows = window > 0
        self.windows = LabelledCache(windows)
        self.budget, self.max_in_flight = budget, max_in_flight
        self.whim.takes_turns = in_turns
        self.scheduler, self.memory = new_scheduler(
            num_blocks,
            num_host_blocks,
            max_num_seqs=6,
            budget=budget,
            preemption=preemption,
            eviction=eviction,
            enable_prefix_caching=caching,
            policy=None if in_order else self.whim,
            num_slots=num_slots,
            windows=windows,
        )
        self.num_windows = windows.num_blocks
        self.has_states = num_slots > 0
        self.num_blocks, self.room = num_blocks, (num_blocks + num_host_blocks) * BLOCK_SIZE

    @rule(
        num_prompt=st.sampled_from((1, 3, 4, 5, 8, 11, 16, 20, 29)),
        num_output=st.integers(1, 12),
        first_token=st.integers(0, 1),
        n=st.sampled_from((1, 1, 2, 4, 7)),
        salt=st.sampled_from((None, None, None, "a")),
        cut=st.integers(0, 2),
        penalty=st.sampled_from((*[0.0] * 7, 1.0)),
        background=st.sampled_from((False, False, True)),
        guided=st.booleans(),
    )
    def add(self, num_prompt: int, num_output: int, n: int, cut: int, guided: bool, **settings: Any) -> None:
        """Add a request. `cut`: another node has generated some tokens of some choices."""
        num_prompt = min(num_prompt, self.room - 1)
        num_output = min(num_output, self.room - num_prompt)
        name, self.num_added = str(self.num_added), self.num_added + 1
        seqs = [new_sequence(name, num_prompt, num_output, choice=i, **settings) for i in range(n)]
        for i, seq in enumerate(seqs):
            logged = [1000 + i % 2] * min(cut * i, num_output - 1)
            seq.token_ids = np.array([*seq.token_ids, *logged], dtype=np.int32)
            self.texts[seq] = seq.token_ids.tolist()
        guides = {seq: UncertainGuide() for seq in seqs} if guided else {}
        self.guides |= guides
        self.scheduler.add(*seqs, guides=guides)

    @rule(num_prompt=st.sampled_from((1, 4, 5, 11)), num_output=st.integers(1, 9), width=st.integers(2, 4))
    def search(self, num_prompt: int, num_output: int, width: int) -> None:
        """Add a beam search whose beams fit even if they share no output."""
        num_output = min(num_output, (self.num_blocks - num_prompt // BLOCK_SIZE) // width * BLOCK_SIZE - 3)
        if self.has_windows and width * self.window_each > self.num_windows:
            num_output = min(num_output, ((self.num_windows - self.window_each) // width - 1) * BLOCK_SIZE)
        if num_output < 1:
            return
        name, self.num_added = str(self.num_added), self.num_added + 1
        seqs = [new_sequence(name, num_prompt, num_output, choice=i) for i in range(width)]
        self.searches.append(Beams(seqs))
        self.texts |= {seq: seq.token_ids.tolist() for seq in seqs}
        self.scheduler.add(*seqs)

    @precondition(lambda self: self.texts)
    @rule(pick=picks, whole=st.booleans())
    def remove(self, pick: int, whole: bool) -> None:
        name = list(self.texts)[pick % len(self.texts)]
        whole |= name.beams is not None
        for seq in [seq for seq in self.texts if seq is name or (whole and seq.request_id == name.request_id)]:
            del self.texts[seq]
            self.scheduler.remove(seq)

    @rule(newcomer=picks, first_victim=st.integers(0, 3), pick=picks)
    def preempt(self, newcomer: int, first_victim: int, pick: int) -> None:
        self.whim.pressed, self.whim.pick = (newcomer, first_victim), pick

    @precondition(lambda self: len(self.flights) < self.max_in_flight)
    @rule()
    def launch(self) -> None:
        swaps_before, swapped = self.scheduler.num_swaps, len(self.scheduler.queues.swapped)
        preemptions_before = self.scheduler.num_preemptions
        if self.flights:
            step = self.scheduler.schedule_ahead()
            assert self.scheduler.num_preemptions == preemptions_before
            self.seen["awaited" if step is None else "ahead"] += 1
        else:
            step = self.scheduler.schedule()
            assert (step is None) == (not self.texts)
        if step is None:
            return
        plan = check_plan(self.scheduler, step, self.budget)
        assert (plan.states is not None) == self.has_states
        assert (plan.windows is not None) == self.has_windows
        if not self.flights:
            self._run(step, plan)
        self.flights.append((step, plan))
        swaps = self.scheduler.num_swaps - swaps_before
        self.seen["swap"] += swaps
        self.seen["resume"] += len(self.scheduler.queues.swapped) < swapped + swaps
        on_device = [tuple(map(self.memory.is_on_device, pair)) for pair in plan.copies.tolist()]
        self.seen["out"] += (True, False) in on_device
        self.seen["in"] += (False, True) in on_device
        self.seen["fork"] += (True, True) in on_device
        self.seen["shared"] += any(self.memory.ref_count(block) > 1 for seq in step.seqs for block in seq.blocks)
        if plan.states is not None:
            self.seen["save"] += len(plan.states.saves)
            self.seen["other slot"] += int(((plan.states.reads != plan.states.writes) & (step.starts > 0)).sum())
        if plan.windows is not None:
            hits = [0 < start == seq.cached_tokens for seq, start in zip(step.seqs, step.starts.tolist(), strict=True)]
            self.seen["window hit"] += sum(hits)
            self.seen["behind window"] += int((plan.windows.block_tables[:, 0] == 0).sum())
            self.seen["window copy"] += len(plan.windows.copies)
        self.seen["in place"] += not all(self.memory.is_on_device(block) for seq in step.seqs for block in seq.blocks)

    def _run(self, step: Step, plan: StepPlan) -> None:
        self.cache.run(self.scheduler, step, plan)
        if self.has_states:
            self.slots.run(self.scheduler, step, plan)
        if self.has_windows:
            self.windows.run(self.scheduler, step, plan)

    @precondition(lambda self: self.texts)
    @rule(num_steps=st.integers(1, 3), is_late=st.booleans())
    def go_on(self, num_steps: int, is_late: bool) -> None:
        """Run several steps. `is_late`: the masks of the first one are late. Those of earlier steps have arrived."""
        for guide in self.guides.values():
            guide.is_waiting = False
        for turn in range(num_steps):
            self._go_on(is_late=is_late and turn == 0)

    def _go_on(self, *, is_late: bool = False) -> None:
        for _ in range(self.max_in_flight - len(self.flights)):
            self.launch()
        if self.flights:
            num_samples = len(self.flights[0][0].sampled)
            self._commit([1000 + i % 2 for i in range(num_samples)], [is_late] * num_samples)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        num_samples = len(self.flights[0][0].sampled)
        one = st.sampled_from((1000, 1001, 1000, 1001, 1000, 1001, 1000, 1001, EOS, FAILED_TOKEN))
        tokens = data.draw(st.lists(one, min_size=num_samples, max_size=num_samples))
        late = data.draw(st.lists(st.booleans(), min_size=num_samples, max_size=num_samples))
        self._commit(tokens, late, data.draw(st.lists(picks, min_size=4, max_size=4)))

    @precondition(lambda self: self.flights)
    @rule(for_memory=st.booleans(), ahead=st.booleans(), has_begun=st.booleans())
    def fail(self, for_memory: bool, ahead: bool, has_begun: bool) -> None:
        """Fail a step, with those planned ahead of it."""
        has_begun |= not for_memory
        if ahead and len(self.flights) < self.max_in_flight:
            self.launch()
        self.seen["no memory" if for_memory else "failure"] += 1
        for flight in self.flights:
            if has_begun:
                self.cache.fail(*flight, for_memory=for_memory)
            if has_begun and self.has_windows:
                self.windows.fail(*flight, for_memory=for_memory)
            if has_begun and self.has_states:
                self.slots.fail(flight[1])
        if not has_begun:
            self.slots.undo()
        step, num_running = self.flights[0][0], len(self.scheduler.running)
        self.flights.clear()
        guilty = self.scheduler.roll_back(step, for_memory=for_memory, has_begun=has_begun)
        self.seen["kept state" if len(self.scheduler.running) == num_running else "lost state"] += self.has_states
        if guilty is not None:
            for seq in [guilty] if guilty.beams is None else [guilty, *guilty.beams]:
                del self.texts[seq]
                if seq is not guilty:
                    self.scheduler.remove(seq)
        assert for_memory or not self.scheduler.running
        assert len(self.scheduler.running) <= self.scheduler.max_step_tokens

    def _commit(self, tokens: list[int], late: Items[bool] = (), choices: Items[int] = (0, 0, 1, 2)) -> None:
        """Commit the oldest step. `late`: which samples have no mask in time, if they have a guide."""
        step, plan = self.flights.pop(0)
        self.scheduler.background.note_step(step, 5.0)
        undrawn = self._undrawn(step, late or [False] * len(tokens))
        kept = [i for i in range(len(tokens)) if i not in undrawn]
        tokens = [1000 if i in undrawn else token for i, token in enumerate(tokens)]
        at_samples = dict(enumerate(step.sampled.tolist()))
        failed = {at_samples[i] for i in kept if tokens[i] == FAILED_TOKEN}
        # A block that another sequence of the step shares holds good values: that sequence got a token from them.
        shared = {block for i, seq in enumerate(step.seqs) if i not in failed for block in seq.blocks}
        broken = {block for i in failed for block in step.seqs[i].blocks} - shared
        landed = self.scheduler.commit(step, np.array(tokens, dtype=np.int32), undrawn)
        assert landed.seqs == [step.seqs[at_samples[i]] for i in kept] and landed.token_ids == [tokens[i] for i in kept]
        for seq, token in zip(landed.seqs, landed.token_ids, strict=True):
            self.seen["overshot"] += seq not in self.texts
            if seq in self.texts:
                self.texts[seq].append(token)
                if token in (EOS, FAILED_TOKEN) or len(self.texts[seq]) == seq.max_num_tokens:
                    del self.texts[seq]
        self._continue_searches(choices)
        for flight in self.flights:
            self._run(*flight)
        if (states := self.memory.states) is not None:
            # Nothing may read what a sequence without finite logits left, even if its slots have no new content.
            targets = set(self.slots.targets(plan, sorted(failed))) if failed else set()
            pool = states._pool
            self.slots.spoil({at for at in targets if pool.ref_count(at) == 0 and not pool.is_cached(at)})
        self.cache.spoil({block for block in broken if self.memory.ref_count(block) == 0})

    def _undrawn(self, step: Step, late: Items[bool]) -> list[int]:
        """Return the samples that are not drawn: those without a mask in time, and those of beams, which park."""
        undrawn = []
        for i, seq in enumerate(step.sampled_seqs):
            if seq.beams is not None and seq.row >= 0:
                self.scheduler.park(seq)
                undrawn.append(i)
            elif (guide := self.guides.get(seq)) is not None:
                guide.is_waiting = late[i]
                self.seen["late"] += bool(late[i] and self.has_states)
                undrawn += [i] if late[i] else []
        return undrawn

    def _continue_searches(self, choices: Items[int]) -> None:
        for search in self.searches:
            if not search.remaining or not (beams := search.next(choices)):
                continue
            before = {seq: self.texts[seq] for seq in search.all_seqs}
            if len(before[beams[0][1]]) + 1 == beams[0][1].max_num_tokens:
                for seq in search.all_seqs:
                    del self.texts[seq]
                    self.scheduler.remove(seq)
                continue
            self.scheduler.continue_beams(beams)
            self.texts |= {seq: [*before[source], token] for seq, source, token in beams}
            self.seen["beams"] += self.has_states

    @invariant()
    def adds_up(self) -> None:
        if self.num_added == 0:
            return
        self.scheduler.check_integrity()
        heads = [*self.scheduler.running, *self.scheduler.queues]
        known = [one for seq in heads for one in (seq, *seq.forks)]
        assert len(known) == len(set(known)) and self.texts.keys() >= set(known)
        for seq, tokens in self.texts.items():
            at_hand = self.scheduler.tokens_of(seq).tolist()
            assert [token for token in at_hand if token >= 0] == tokens == at_hand[: len(tokens)]
            assert seq.block_hashes == _hashes(seq, tokens)[: len(seq.block_hashes)]
            is_to_come = len(at_hand) == len(tokens) + 1
            assert is_to_come or (len(at_hand) == len(tokens) and seq in known)
            assert seq in known or (seq.row >= 0 and len(at_hand) == seq.max_num_tokens)
        assert 0 <= self.scheduler.num_tokens_unused <= self.memory.num_held * BLOCK_SIZE

    def teardown(self) -> None:
        """Assert that after all sequences have ended, all blocks are free."""
        if self.num_added == 0:
            return
        self.whim.is_over = True
        for _ in range(2000):
            self._go_on()
            if not self.flights and not self.texts:
                break
        assert not self.texts and self.memory.num_held == 0
        if (windows := self.memory.windows) is not None:
            assert windows.pool.num_free == windows.pool.num_total
            self.seen["window missed"] += windows.missed_tokens
            self.seen["window eviction"] += windows.pool.num_evictions
        if (states := self.memory.states) is not None:
            assert states.num_free == states.num_slots
            self.seen["snapshot hit"] += states.num_hits
            self.seen["eviction"] += states.num_evictions


def _hashes(seq: Sequence, tokens: list[int]) -> list[bytes]:
    """Names of the full blocks of so many tokens."""
    names, ids = [seq.root_hash], np.array(tokens, dtype=np.int32)
    for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        names.append(block_hash(names[-1], ids[end - BLOCK_SIZE : end]))
    return names[1:]


@pytest.mark.timeout(3600 if FULL else 300)
def test_any_load_is_served_in_full_and_every_sequence_reads_its_own_blocks() -> None:
    examples, steps = (2500, 50) if FULL else (60, 40)
    events = (*COMMON_EVENTS, *STATE_EVENTS, *WINDOW_EVENTS, *(RARE_EVENTS if FULL else ()))
    for _ in range(4):  # the random examples of one turn may miss an event
        stateful.run_state_machine_as_test(
            EngineMachine,
            settings=settings(
                max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck)
            ),
        )
        if all(EngineMachine.seen[event] for event in events):
            return
    pytest.fail(f"not seen: {[event for event in events if not EngineMachine.seen[event]]}")


def test_a_sequence_that_is_larger_than_the_device_runs_from_device_and_host() -> None:
    """Random runs meet this too seldom."""
    machine = EngineMachine()
    machine.start(
        num_blocks=6,
        num_host_blocks=8,
        budget=20,
        preemption="swap",
        eviction="lru",
        caching=True,
        in_order=True,
        in_turns=False,
        max_in_flight=1,
        num_slots=0,
    )
    machine.seen.clear()
    machine.add(num_prompt=29, num_output=12, n=1, cut=0, first_token=0, salt=None, penalty=0.0, guided=False)
    for _ in range(5):
        machine.go_on(num_steps=2, is_late=False)
        machine.adds_up()
    machine.teardown()
    assert machine.seen["in place"]
