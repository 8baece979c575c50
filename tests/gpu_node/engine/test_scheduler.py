"""The scheduler without a model: budgets, order, preemption, and blocks that always add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.blocks import BlockPool
from penstock.gpu_node.engine.scheduler import Scheduler, Step
from penstock.gpu_node.engine.sequence import NO_TOKENS, Sequence

BLOCK_SIZE = 4


def _sequence(name: str, num_prompt: int, num_output: int, *, first_token: int = 0) -> Sequence:
    return Sequence(
        request_id=name,
        choice=0,
        params=SamplingParams(),
        seed=0,
        token_ids=np.arange(first_token, first_token + num_prompt, dtype=np.int32),
        num_prompt_tokens=num_prompt,
        num_tokens=num_prompt,
        max_num_tokens=num_prompt + num_output,
        end_ids=NO_TOKENS,
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
    """Append a token to each sampling sequence; the names of those that are done."""
    done = []
    for seq in scheduler.commit(step):
        seq.append(token)
        if seq.num_tokens == seq.max_num_tokens:
            scheduler.remove(seq)
            done.append(seq.request_id)
    return done


def _check_plan(scheduler: Scheduler, step: Step, budget: int) -> None:
    plan = step.plan
    counts = np.diff(plan.query_starts)
    assert counts.tolist() == step.counts and counts.min() >= 1 and counts.sum() == len(plan.token_ids) <= budget
    for i, seq in enumerate(step.seqs):
        tokens = slice(plan.query_starts[i], plan.query_starts[i + 1])
        computed = range(seq.num_computed, seq.num_computed + step.counts[i])
        assert plan.positions[tokens].tolist() == list(computed)
        assert plan.token_ids[tokens].tolist() == seq.token_ids[computed.start : computed.stop].tolist()
        assert plan.context_lens[i] == computed.stop <= len(seq.blocks) * BLOCK_SIZE
        assert plan.block_tables[i, : len(seq.blocks)].tolist() == seq.blocks
        assert (i in plan.sample_seqs) == (computed.stop == seq.num_tokens)
    rows = [seq.row for seq in scheduler.running]
    assert len(set(rows)) == len(rows)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_load_is_served_in_full_and_gives_its_blocks_back(data: st.DataObject) -> None:
    budget = data.draw(st.integers(4, 20))
    scheduler, pool = _scheduler(data.draw(st.integers(6, 16)), max_num_seqs=4, budget=budget)
    limit = pool.num_total * BLOCK_SIZE
    waiting = data.draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 1)), max_size=8))
    alive = {}
    for i, (num_prompt, num_output, first_token) in enumerate(waiting):
        num_output = min(num_output, limit - num_prompt)
        alive[str(i)] = _sequence(str(i), num_prompt, num_output, first_token=first_token)
        scheduler.add(alive[str(i)])
    for _ in range(2000):
        if alive and data.draw(st.integers(0, 30)) == 0:
            name = data.draw(st.sampled_from(sorted(alive)))
            scheduler.remove(alive.pop(name))
        step = scheduler.plan()
        if step is None:
            break
        _check_plan(scheduler, step, budget)
        if data.draw(st.integers(0, 20)) == 0:
            scheduler.roll_back(step)
            continue
        for name in _finish_step(scheduler, step):
            del alive[name]
        pool.check_integrity()
    assert not alive and not scheduler.running and not scheduler.waiting
    assert pool.num_free == pool.num_total


def test_prompts_are_cut_to_the_budget_and_decoding_goes_on_beside_them() -> None:
    scheduler, _ = _scheduler(20, budget=8)
    scheduler.add(_sequence("a", 3, 5))
    scheduler.add(_sequence("b", 17, 5, first_token=100))
    seen = []
    for _ in range(4):
        step = scheduler.plan()
        assert step is not None
        seen.append([(seq.request_id, count) for seq, count in zip(step.seqs, step.counts, strict=True)])
        _finish_step(scheduler, step)
    assert seen == [[("a", 3), ("b", 5)], [("a", 1), ("b", 7)], [("a", 1), ("b", 5)], [("a", 1), ("b", 1)]]


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler, _ = _scheduler(6, budget=64)
    for name, num_prompt in (("a", 12), ("b", 16), ("c", 2)):
        scheduler.add(_sequence(name, num_prompt, 2, first_token=100 * ord(name)))
    step = scheduler.plan()
    assert step is not None and [seq.request_id for seq in step.seqs] == ["a"]


def test_the_one_admitted_last_is_preempted_and_comes_back_first() -> None:
    scheduler, pool = _scheduler(5, budget=64)
    scheduler.add(_sequence("a", 8, 12))
    scheduler.add(_sequence("b", 4, 8, first_token=100))
    scheduler.add(_sequence("c", 8, 1, first_token=200))
    finished: list[str] = []
    while scheduler.num_preemptions == 0:
        step = scheduler.plan()
        assert step is not None
        finished += _finish_step(scheduler, step)
    assert [seq.request_id for seq in scheduler.running] == ["a"]
    assert [seq.request_id for seq in scheduler.waiting] == ["b", "c"]
    while (step := scheduler.plan()) is not None:
        finished += _finish_step(scheduler, step)
    assert finished == ["a", "b", "c"]
    assert pool.num_free == pool.num_total


def test_two_prompts_of_one_step_share_their_blocks() -> None:
    scheduler, _ = _scheduler(20, budget=64)
    scheduler.add(_sequence("a", 11, 1))
    scheduler.add(_sequence("b", 11, 1))
    step = scheduler.plan()
    assert step is not None and step.counts == [11, 3]
    first, second = step.seqs
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert second.cached_tokens == 8 and scheduler.prefix_hit_tokens == 8


def test_the_last_token_of_a_known_prompt_is_computed_again() -> None:
    scheduler, _ = _scheduler(20, budget=64)
    for name in ("a", "b"):
        scheduler.add(_sequence(name, 8, 1))
        step = scheduler.plan()
        assert step is not None
        _finish_step(scheduler, step)
    assert step.seqs[0].cached_tokens == 4


def test_after_a_failed_step_nothing_it_named_is_believed() -> None:
    scheduler, pool = _scheduler(20, budget=64)
    scheduler.add(_sequence("a", 11, 1))
    scheduler.add(_sequence("b", 11, 1))
    step = scheduler.plan()
    assert step is not None
    scheduler.roll_back(step)
    assert pool.num_free == pool.num_total and pool.num_cached == 0
    again = scheduler.plan()
    assert again is not None and [seq.request_id for seq in again.seqs] == ["a", "b"] and again.counts == [11, 3]


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_no_more_sequences_run_than_there_are_rows(max_num_seqs: int) -> None:
    scheduler, _ = _scheduler(40, max_num_seqs=max_num_seqs, budget=64)
    for i in range(5):
        scheduler.add(_sequence(str(i), 2, 2, first_token=100 * i))
    step = scheduler.plan()
    assert step is not None and len(step.seqs) == max_num_seqs
