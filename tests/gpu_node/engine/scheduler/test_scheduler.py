"""The scheduler without a model: budgets, order, preemption, sharing."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.schedules import EOS, new_scheduler, new_sequence

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN


def _sequence(name: str, num_prompt: int, num_output: int, *, first_token: int = 0) -> Sequence:
    return new_sequence(name, num_prompt, num_output, first_token=first_token)


def _scheduler(num_blocks: int, *, max_num_seqs: int = 8, budget: int = 16) -> tuple[Scheduler, KvCacheManager]:
    return new_scheduler(num_blocks, max_num_seqs=max_num_seqs, budget=budget)


def _finish_step(scheduler: Scheduler, step: Step, token: int = 1000) -> list[str]:
    """Give each sampling sequence a token. Return the names of those that are done."""
    landed = scheduler.commit(step, np.full(len(step.sampled), token, dtype=np.int32))
    return [seq.request_id for seq in landed.seqs if seq.row < 0]


def _counts(step: Step) -> list[int]:
    counts: list[int] = (step.ends - step.starts).tolist()
    return counts


def test_prompts_are_cut_to_the_budget_and_to_less_beside_decoding_sequences() -> None:
    scheduler, _ = _scheduler(20, budget=8)
    scheduler.add(_sequence("a", 3, 5))
    scheduler.add(_sequence("b", 17, 5, first_token=100))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        assert step is not None
        seen.append([(seq.request_id, count) for seq, count in zip(step.seqs, _counts(step), strict=True)])
        _finish_step(scheduler, step)
    assert seen == [[("a", 3), ("b", 5)]] + 3 * [[("a", 1), ("b", 4)]]


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler, _ = _scheduler(6, budget=64)
    for name, num_prompt in (("a", 12), ("b", 16), ("c", 2)):
        scheduler.add(_sequence(name, num_prompt, 2, first_token=100 * ord(name)))
    step = scheduler.schedule()
    assert step is not None and [seq.request_id for seq in step.seqs] == ["a"]


def test_sequence_admitted_last_is_preempted_and_resumes_first() -> None:
    scheduler, memory = _scheduler(5, budget=64)
    scheduler.add(_sequence("a", 8, 12))
    scheduler.add(_sequence("b", 4, 8, first_token=100))
    scheduler.add(_sequence("c", 8, 1, first_token=200))
    finished: list[str] = []
    while scheduler.num_preemptions == 0:
        step = scheduler.schedule()
        assert step is not None
        finished += _finish_step(scheduler, step)
    assert [seq.request_id for seq in scheduler.running] == ["a"]
    assert [seq.request_id for seq in scheduler.queues.waiting] == ["b", "c"]
    while (step := scheduler.schedule()) is not None:
        finished += _finish_step(scheduler, step)
    assert finished == ["a", "b", "c"]
    assert memory.num_held == 0


def test_two_prompts_of_one_step_share_their_blocks() -> None:
    scheduler, _ = _scheduler(20, budget=64)
    scheduler.add(_sequence("a", 11, 1))
    scheduler.add(_sequence("b", 11, 1))
    step = scheduler.schedule()
    assert step is not None and _counts(step) == [11, 3]
    first, second = step.seqs
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert second.cached_tokens == 8 and scheduler.prefix_hits.hit_tokens == 8


def test_last_token_of_a_cached_prompt_is_computed_again() -> None:
    scheduler, _ = _scheduler(20, budget=64)
    for name in ("a", "b"):
        scheduler.add(_sequence(name, 8, 1))
        step = scheduler.schedule()
        assert step is not None
        _finish_step(scheduler, step)
    assert step.seqs[0].cached_tokens == 4


def test_blocks_that_a_failed_step_was_to_fill_are_uncached() -> None:
    scheduler, memory = _scheduler(20, budget=64)
    scheduler.add(_sequence("a", 11, 1))
    scheduler.add(_sequence("b", 11, 1))
    step = scheduler.schedule()
    assert step is not None
    scheduler.roll_back(step)
    assert memory.num_held == 0 and memory.device.num_cached == 0
    again = scheduler.schedule()
    assert again is not None and [seq.request_id for seq in again.seqs] == ["a"] and _counts(again) == [11]


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_no_more_sequences_run_than_there_are_rows(max_num_seqs: int) -> None:
    scheduler, _ = _scheduler(40, max_num_seqs=max_num_seqs, budget=64)
    for i in range(5):
        scheduler.add(_sequence(str(i), 2, 2, first_token=100 * i))
    step = scheduler.schedule()
    assert step is not None and len(step.seqs) == max_num_seqs


def test_sequence_removed_during_its_step_is_not_removed_again_by_its_token() -> None:
    scheduler, memory = _scheduler(20, max_num_seqs=3, budget=64)
    seqs = [_sequence(name, 8, 1, first_token=100 * i) for i, name in enumerate("abc")]
    for seq in seqs:
        scheduler.add(seq)
    step = scheduler.schedule()
    assert step is not None
    scheduler.remove(seqs[0])
    scheduler.remove(seqs[2])
    scheduler.commit(step, np.array([EOS, EOS, FAILED_TOKEN], dtype=np.int32))
    assert memory.match(seqs[2].block_hashes) == []
    assert memory.num_held == 0 and not scheduler.running
    assert len(memory.match(seqs[0].block_hashes)) == 2
