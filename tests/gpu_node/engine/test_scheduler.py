"""The scheduler without a model: budgets, order, preemption, and blocks that always add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.blocks import BlockPool
from penstock.gpu_node.engine.ends import EndRule
from penstock.gpu_node.engine.rows import Step
from penstock.gpu_node.engine.scheduler import Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import FAILED_TOKEN, StepPlan

BLOCK_SIZE = 4
EOS = 999


def _sequence(name: str, num_prompt: int, num_output: int, *, first_token: int = 0) -> Sequence:
    return Sequence(
        request_id=name,
        choice=0,
        params=SamplingParams(),
        seed=0,
        token_ids=np.arange(first_token, first_token + num_prompt, dtype=np.int32),
        num_prompt_tokens=num_prompt,
        end_rule=EndRule(frozenset((EOS,)), 0, num_output),
    )


def _scheduler(num_blocks: int, *, max_num_seqs: int = 8, budget: int = 16) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks + 1)
    scheduler = Scheduler(
        pool,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=num_blocks * BLOCK_SIZE,
    )
    return scheduler, pool


def _finish_step(scheduler: Scheduler, step: Step, token: int = 1000) -> list[str]:
    """Give each sampling sequence a token; the names of those that are done."""
    landed = scheduler.commit(step, np.full(len(step.sampled), token, dtype=np.int32))
    return [seq.request_id for seq in landed.seqs if seq.row < 0]


def _counts(step: Step) -> list[int]:
    counts: list[int] = (step.ends - step.starts).tolist()
    return counts


def _check_plan(scheduler: Scheduler, step: Step, budget: int) -> StepPlan:
    plan = scheduler.plan(step)
    counts = np.diff(plan.query_starts)
    assert counts.min() >= 1 and counts.sum() == len(plan.token_ids) <= budget
    assert step.seqs == scheduler.running[: len(step.seqs)]
    for i, seq in enumerate(step.seqs):
        tokens, computed = slice(*plan.query_starts[i : i + 2]), range(step.starts[i], step.ends[i])
        assert plan.positions[tokens].tolist() == list(computed)
        assert plan.token_ids[tokens].tolist() == scheduler.tokens_of(seq)[computed.start : computed.stop].tolist()
        assert plan.context_lens[i] == computed.stop <= len(seq.blocks) * BLOCK_SIZE
        assert plan.block_tables[i, : len(seq.blocks)].tolist() == seq.blocks
        assert (i in plan.sample_seqs) == (computed.stop == len(scheduler.tokens_of(seq)))
    sampled = [step.seqs[i] for i in plan.sample_seqs]
    assert plan.sampling.position.tolist() == [len(scheduler.tokens_of(seq)) - seq.num_prompt_tokens for seq in sampled]
    rows = [seq.row for seq in scheduler.running]
    assert len(set(rows)) == len(rows)
    return plan


class _Cache:
    """What a KV cache would hold: behind which tokens each slot was computed, GARBAGE where that failed."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], object] = {}

    def store(self, scheduler: Scheduler, step: Step, plan: StepPlan) -> None:
        for i, seq in enumerate(step.seqs):
            for at in range(step.starts[i], step.ends[i]):
                self._slots[self._slot(plan, i, at)] = tuple(scheduler.tokens_of(seq)[: at + 1].tolist())

    def spoil(self, blocks: list[int]) -> None:
        self._slots |= {(block, offset): "GARBAGE" for block in blocks for offset in range(BLOCK_SIZE)}

    def check(self, scheduler: Scheduler, step: Step, plan: StepPlan) -> None:
        for i, seq in enumerate(step.seqs):
            tokens = tuple(scheduler.tokens_of(seq).tolist())
            for at in range(step.ends[i]):
                assert self._slots[self._slot(plan, i, at)] == tokens[: at + 1]

    def _slot(self, plan: StepPlan, i: int, at: int) -> tuple[int, int]:
        return int(plan.block_tables[i, at // BLOCK_SIZE]), at % BLOCK_SIZE


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, removals, steps and failures; what comes between a step's launch and its landing too."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = _Cache()
        self.texts: dict[Sequence, list[int]] = {}
        self.flight: tuple[Step, StepPlan] | None = None
        self.num_added = 0

    @initialize(num_blocks=st.integers(6, 16), budget=st.integers(4, 20))
    def start(self, num_blocks: int, budget: int) -> None:
        self.budget = budget
        self.scheduler, self.pool = _scheduler(num_blocks, max_num_seqs=4, budget=budget)

    @rule(num_prompt=st.integers(1, 20), num_output=st.integers(1, 12), first_token=st.integers(0, 1))
    def add(self, num_prompt: int, num_output: int, first_token: int) -> None:
        room = self.pool.num_total * BLOCK_SIZE - num_prompt
        seq = _sequence(str(self.num_added), num_prompt, min(num_output, room), first_token=first_token)
        self.num_added += 1
        self.texts[seq] = seq.token_ids.tolist()
        self.scheduler.add(seq)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(list(self.texts)))
        del self.texts[seq]
        self.scheduler.remove(seq)

    @precondition(lambda self: self.flight is None)
    @rule()
    def launch(self) -> None:
        step = self.scheduler.schedule()
        assert (step is None) == (not self.texts)
        if step is not None:
            plan = _check_plan(self.scheduler, step, self.budget)
            self.cache.store(self.scheduler, step, plan)
            self.cache.check(self.scheduler, step, plan)
            self.flight = step, plan

    @precondition(lambda self: self.flight is not None)
    @rule(data=st.data(), fails=st.integers(0, 5).map(lambda n: n == 0))
    def land(self, data: st.DataObject, fails: bool) -> None:
        assert self.flight is not None
        (step, plan), self.flight = self.flight, None
        if fails:
            touched = [plan.block_tables[i, : -(-end // BLOCK_SIZE)] for i, end in enumerate(step.ends)]
            starts = step.starts // BLOCK_SIZE
            self.cache.spoil([b for row, start in zip(touched, starts, strict=True) for b in row[start:].tolist()])
            self.scheduler.roll_back(step)
            assert not self.scheduler.running
            return
        one = st.sampled_from((1000, 1001, 1000, 1001, 1000, 1001, EOS, FAILED_TOKEN))
        tokens = data.draw(st.lists(one, min_size=len(step.sampled), max_size=len(step.sampled)))
        landed = self.scheduler.commit(step, np.array(tokens, dtype=np.int32))
        assert landed.seqs == [step.seqs[i] for i in step.sampled] and landed.token_ids == tokens
        for seq, token in zip(landed.seqs, tokens, strict=True):
            self._take(seq, token)
        assert all(self.pool.ref_count(block) == 0 for block in landed.broken_blocks)
        self.cache.spoil(landed.broken_blocks)

    def _take(self, seq: Sequence, token: int) -> None:
        if seq not in self.texts:
            return
        self.texts[seq].append(token)
        full = len(self.texts[seq]) == seq.max_num_tokens
        if token in (EOS, FAILED_TOKEN) or full:
            del self.texts[seq]

    @invariant()
    def adds_up(self) -> None:
        if self.num_added == 0:
            return
        self.pool.check_integrity()
        assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.texts)
        for seq, tokens in self.texts.items():
            assert self.scheduler.tokens_of(seq).tolist() == tokens

    def teardown(self) -> None:
        if self.num_added == 0:
            return
        for _ in range(2000):
            if self.flight is not None:
                step, _ = self.flight
                self.flight = None
                for seq in self.scheduler.commit(step, np.full(len(step.sampled), 1000, dtype=np.int32)).seqs:
                    self._take(seq, 1000)
            self.launch()
            if self.flight is None:
                break
        assert not self.texts and self.pool.num_free == self.pool.num_total


TestAnyLoadIsServedInFull = SchedulerMachine.TestCase
TestAnyLoadIsServedInFull.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_prompts_are_cut_to_the_budget_and_decoding_goes_on_beside_them() -> None:
    scheduler, _ = _scheduler(20, budget=8)
    scheduler.add(_sequence("a", 3, 5))
    scheduler.add(_sequence("b", 17, 5, first_token=100))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        seen.append([(seq.request_id, count) for seq, count in zip(step.seqs, _counts(step), strict=True)])
        _finish_step(scheduler, step)
    assert seen == [[("a", 3), ("b", 5)], [("a", 1), ("b", 7)], [("a", 1), ("b", 5)], [("a", 1), ("b", 1)]]


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler, _ = _scheduler(6, budget=64)
    for name, num_prompt in (("a", 12), ("b", 16), ("c", 2)):
        scheduler.add(_sequence(name, num_prompt, 2, first_token=100 * ord(name)))
    step = scheduler.schedule()
    assert step is not None and [seq.request_id for seq in step.seqs] == ["a"]


def test_the_one_admitted_last_is_preempted_and_comes_back_first() -> None:
    scheduler, pool = _scheduler(5, budget=64)
    scheduler.add(_sequence("a", 8, 12))
    scheduler.add(_sequence("b", 4, 8, first_token=100))
    scheduler.add(_sequence("c", 8, 1, first_token=200))
    finished: list[str] = []
    while scheduler.num_preemptions == 0:
        step = scheduler.schedule()
        assert step is not None
        finished += _finish_step(scheduler, step)
    assert [seq.request_id for seq in scheduler.running] == ["a"]
    assert [seq.request_id for seq in scheduler.waiting] == ["b", "c"]
    while (step := scheduler.schedule()) is not None:
        finished += _finish_step(scheduler, step)
    assert finished == ["a", "b", "c"]
    assert pool.num_free == pool.num_total


def test_two_prompts_of_one_step_share_their_blocks() -> None:
    scheduler, _ = _scheduler(20, budget=64)
    scheduler.add(_sequence("a", 11, 1))
    scheduler.add(_sequence("b", 11, 1))
    step = scheduler.schedule()
    assert step is not None and _counts(step) == [11, 3]
    first, second = step.seqs
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert second.cached_tokens == 8 and scheduler.prefix_hit_tokens == 8


def test_the_last_token_of_a_known_prompt_is_computed_again() -> None:
    scheduler, _ = _scheduler(20, budget=64)
    for name in ("a", "b"):
        scheduler.add(_sequence(name, 8, 1))
        step = scheduler.schedule()
        assert step is not None
        _finish_step(scheduler, step)
    assert step.seqs[0].cached_tokens == 4


def test_after_a_failed_step_nothing_it_named_is_believed() -> None:
    scheduler, pool = _scheduler(20, budget=64)
    scheduler.add(_sequence("a", 11, 1))
    scheduler.add(_sequence("b", 11, 1))
    step = scheduler.schedule()
    assert step is not None
    scheduler.roll_back(step)
    assert pool.num_free == pool.num_total and pool.num_cached == 0
    again = scheduler.schedule()
    assert again is not None and [seq.request_id for seq in again.seqs] == ["a", "b"] and _counts(again) == [11, 3]


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_no_more_sequences_run_than_there_are_rows(max_num_seqs: int) -> None:
    scheduler, _ = _scheduler(40, max_num_seqs=max_num_seqs, budget=64)
    for i in range(5):
        scheduler.add(_sequence(str(i), 2, 2, first_token=100 * i))
    step = scheduler.schedule()
    assert step is not None and len(step.seqs) == max_num_seqs


def test_who_is_removed_while_its_step_runs_is_not_removed_again_by_what_the_step_gives() -> None:
    scheduler, pool = _scheduler(20, max_num_seqs=3, budget=64)
    seqs = [_sequence(name, 8, 1, first_token=100 * i) for i, name in enumerate("abc")]
    for seq in seqs:
        scheduler.add(seq)
    step = scheduler.schedule()
    assert step is not None
    scheduler.remove(seqs[0])
    scheduler.remove(seqs[2])
    blocks = seqs[2].blocks
    landed = scheduler.commit(step, np.array([EOS, EOS, FAILED_TOKEN], dtype=np.int32))
    assert landed.broken_blocks == blocks and pool.match(seqs[2].block_hashes) == []
    assert pool.num_free == pool.num_total and not scheduler.running
    assert len(pool.match(seqs[0].block_hashes)) == 2
