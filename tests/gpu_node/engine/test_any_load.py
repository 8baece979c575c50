"""Scheduler and memory under any order of events: every sequence always reads its own keys, and everything adds up.

HYPOTHESIS_PROFILE=full runs more than 100,000 steps.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np
import pytest
from fakes.schedules import BLOCK_SIZE, EOS, LabelledCache, check_plan, new_scheduler, new_sequence
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gpu_node.engine.discipline import FirstComeFirstServed
from penstock.gpu_node.engine.rows import Step
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import FAILED_TOKEN, StepPlan

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
picks = st.integers(0, 1000)


class Whim(FirstComeFirstServed):
    """In any order: who presses, whom the others may pass and who gives way is as a test says."""

    def __init__(self) -> None:
        self.pressed: tuple[int, int] | None = None
        self.pick = 0

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Turned by some places, and past who does not fit."""
        seqs = list(waiting)
        at = self.pick % len(seqs) if seqs else 0
        for seq in seqs[at:] + seqs[:at]:
            start(seq)

    def pressing(self, waiting: Iterable[Sequence], running: list[Sequence]) -> tuple[Sequence, list[Sequence]] | None:
        """Once, whoever was pressed."""
        seqs, pressed = list(waiting), self.pressed
        self.pressed = None
        if pressed is None or not seqs:
            return None
        return seqs[pressed[0] % len(seqs)], running[pressed[1] % (len(running) + 1) :]

    def victim(self, running: list[Sequence]) -> Sequence:
        """Anybody."""
        return running[self.pick % len(running)]


class EngineMachine(RuleBasedStateMachine):
    """Any order of arrivals, removals, steps, failures and preemptions; what comes while a step runs too."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.cache = LabelledCache()
        self.texts: dict[Sequence, list[int]] = {}
        self.flight: tuple[Step, StepPlan] | None = None
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
    ) -> None:
        self.budget = budget
        self.scheduler, self.memory = new_scheduler(
            num_blocks,
            num_host_blocks,
            max_num_seqs=6,
            budget=budget,
            preemption=preemption,
            eviction=eviction,
            enable_prefix_caching=caching,
            discipline=None if in_order else self.whim,
        )
        self.room = (num_blocks + num_host_blocks) * BLOCK_SIZE

    @rule(
        num_prompt=st.sampled_from((1, 3, 4, 5, 8, 11, 16, 20, 29)),
        num_output=st.integers(1, 12),
        first_token=st.integers(0, 1),
        n=st.sampled_from((1, 1, 2, 4, 7)),
        salt=st.sampled_from((None, None, None, "a")),
        cut=st.integers(0, 2),
    )
    def add(self, num_prompt: int, num_output: int, first_token: int, n: int, salt: str | None, cut: int) -> None:
        """With `cut`, a request that another node began: some choices have tokens already."""
        num_prompt = min(num_prompt, self.room - 1)
        num_output = min(num_output, self.room - num_prompt)
        name, self.num_added = str(self.num_added), self.num_added + 1
        seqs = [
            new_sequence(name, num_prompt, num_output, choice=i, first_token=first_token, salt=salt) for i in range(n)
        ]
        for i, seq in enumerate(seqs):
            logged = [1000 + i % 2] * min(cut * i, num_output - 1)
            seq.token_ids = np.array([*seq.token_ids, *logged], dtype=np.int32)
            self.texts[seq] = seq.token_ids.tolist()
        self.scheduler.add(*seqs)

    @precondition(lambda self: self.texts)
    @rule(pick=picks, whole=st.booleans())
    def remove(self, pick: int, whole: bool) -> None:
        name = list(self.texts)[pick % len(self.texts)]
        for seq in [seq for seq in self.texts if seq is name or (whole and seq.request_id == name.request_id)]:
            del self.texts[seq]
            self.scheduler.remove(seq)

    @rule(newcomer=picks, first_victim=st.integers(0, 3), pick=picks)
    def preempt(self, newcomer: int, first_victim: int, pick: int) -> None:
        self.whim.pressed, self.whim.pick = (newcomer, first_victim), pick

    @precondition(lambda self: self.flight is None)
    @rule()
    def launch(self) -> None:
        swaps_before, swapped = self.scheduler.num_swaps, len(self.scheduler.queues.swapped)
        step = self.scheduler.schedule()
        assert (step is None) == (not self.texts)
        if step is None:
            return
        plan = check_plan(self.scheduler, step, self.budget)
        self.flight = step, plan
        swaps = self.scheduler.num_swaps - swaps_before
        self.seen["swap"] += swaps
        self.seen["resume"] += len(self.scheduler.queues.swapped) < swapped + swaps
        on_device = [tuple(map(self.memory.is_on_device, pair)) for pair in plan.copies.tolist()]
        self.seen["out"] += (True, False) in on_device
        self.seen["in"] += (False, True) in on_device
        self.seen["fork"] += (True, True) in on_device
        self.seen["shared"] += any(self.memory.ref_count(block) > 1 for seq in step.seqs for block in seq.blocks)
        self.seen["in place"] += not all(self.memory.is_on_device(block) for seq in step.seqs for block in seq.blocks)

    @precondition(lambda self: self.flight is not None)
    @rule(data=st.data(), fault=st.sampled_from((*[None] * 6, "failure", "no memory")))
    def land(self, data: st.DataObject, fault: str | None) -> None:
        assert self.flight is not None
        (step, plan), self.flight = self.flight, None
        if fault is not None:
            for_memory = fault == "no memory"
            self.cache.fail(step, plan, for_memory=for_memory)
            guilty = self.scheduler.roll_back(step, for_memory=for_memory)
            if guilty is not None:
                del self.texts[guilty]
            self.seen[fault] += 1
            assert for_memory or not self.scheduler.running
            assert len(self.scheduler.running) <= self.scheduler.max_step_tokens
            return
        one = st.sampled_from((1000, 1001, 1000, 1001, 1000, 1001, 1000, 1001, EOS, FAILED_TOKEN))
        self._commit(step, plan, data.draw(st.lists(one, min_size=len(step.sampled), max_size=len(step.sampled))))

    def _commit(self, step: Step, plan: StepPlan, tokens: list[int]) -> None:
        self.cache.run(self.scheduler, step, plan)
        landed = self.scheduler.commit(step, np.array(tokens, dtype=np.int32))
        assert landed.seqs == [step.seqs[i] for i in step.sampled] and landed.token_ids == tokens
        for seq, token in zip(landed.seqs, tokens, strict=True):
            if seq in self.texts:
                self.texts[seq].append(token)
                if token in (EOS, FAILED_TOKEN) or len(self.texts[seq]) == seq.max_num_tokens:
                    del self.texts[seq]
        assert all(self.memory.ref_count(block) == 0 for block in landed.broken_blocks)
        self.cache.spoil(set(landed.broken_blocks))

    @invariant()
    def adds_up(self) -> None:
        if self.num_added == 0:
            return
        self.scheduler.check_integrity()
        heads = [*self.scheduler.running, *self.scheduler.queues]
        known = [one for seq in heads for one in (seq, *seq.forks)]
        assert len(known) == len(self.texts) and set(known) == set(self.texts)
        for seq, tokens in self.texts.items():
            assert self.scheduler.tokens_of(seq).tolist() == tokens
        assert 0 <= self.scheduler.num_tokens_unused <= self.memory.num_held * BLOCK_SIZE

    def teardown(self) -> None:
        """Everybody gets to the end, and nothing stays behind."""
        if self.num_added == 0:
            return
        for _ in range(2000):
            if self.flight is not None:
                (step, plan), self.flight = self.flight, None
                self._commit(step, plan, [1000] * len(step.sampled))
            self.launch()
            if self.flight is None:
                break
        assert not self.texts and self.memory.num_held == 0


@pytest.mark.timeout(3600 if FULL else 120)
def test_any_load_is_served_in_full_and_every_sequence_reads_its_own() -> None:
    examples, steps = (2500, 50) if FULL else (150, 40)
    stateful.run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert set(EngineMachine.seen) == {
        *("swap", "resume", "out", "in", "fork", "shared", "in place", "failure", "no memory")
    } and all(EngineMachine.seen.values())
