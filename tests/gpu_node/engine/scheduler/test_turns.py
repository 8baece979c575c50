"""Under `round_robin`, sequences get the tokens of a step that is too small for all in turns."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.cover import examples
from fakes.schedules import check_plan, new_scheduler, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_node.engine.policy.by_policy import ByPolicy
from penstock.gpu_node.engine.scheduler.budget import ends_within_budget
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.steps import Step
from penstock.queue.policy import PolicyConfig, PolicyName

AGING_MS = 10**12
BUDGET = 8


def _scheduler(policy: PolicyName = "round_robin", *, num_seqs: int = 8, budget: int = BUDGET) -> Scheduler:
    order = ByPolicy(PolicyConfig(policy, AGING_MS, 0), lambda: 0.0)
    return new_scheduler(4000, max_num_seqs=num_seqs, budget=budget, policy=order)[0]


def _add(scheduler: Scheduler, name: str, num_prompt: int, num_output: int = 4) -> None:
    seq = new_sequence(name, num_prompt, num_output, first_token=10_000 * ord(name[0]))
    seq.predicted_tokens = seq.remaining_tokens = num_output
    scheduler.add(seq)


def _commit(scheduler: Scheduler, step: Step) -> None:
    scheduler.commit(step, np.full(len(step.sampled), 7, np.int32))


def _steps(scheduler: Scheduler, num_steps: int, *, ahead: bool = False) -> list[dict[str, int]]:
    """Return the tokens that each sequence got, step by step."""
    seen: list[dict[str, int]] = []
    flight: Step | None = None
    while len(seen) < num_steps:
        step = flight or scheduler.schedule()
        if step is None:
            break
        check_plan(scheduler, step, BUDGET)
        counts = (step.ends - step.starts).tolist()
        seen.append({seq.request_id: count for seq, count in zip(step.seqs, counts, strict=True) if count})
        flight = scheduler.schedule_ahead() if ahead else None
        _commit(scheduler, step)
        scheduler.check_integrity()
    return seen


@pytest.mark.parametrize("ahead", [False, True])
def test_long_prompts_of_one_tenant_and_a_short_one_behind_them_have_their_turns(ahead: bool) -> None:
    scheduler = _scheduler()
    for name, num_prompt in (("a", 40), ("b", 40), ("c", 5)):
        _add(scheduler, name, num_prompt)
    seen = _steps(scheduler, 4, ahead=ahead)
    assert seen[:2] == [{"a": 8}, {"b": 8}]
    assert seen[2]["c"] == 5, "it goes before the rest of the prompts that came before it"
    first = [next(i for i, step in enumerate(_steps(one, 20)) if "c" in step) for one in (_filled("fcfs"), _filled())]
    assert first[0] > 2 * first[1]


def _filled(policy: PolicyName = "round_robin") -> Scheduler:
    scheduler = _scheduler(policy)
    for name, num_prompt in (("a", 40), ("b", 40), ("c", 5)):
        _add(scheduler, name, num_prompt)
    return scheduler


def test_sequences_that_decode_get_their_token_in_each_step_that_has_one_for_all() -> None:
    scheduler = _scheduler()
    for name in "ab":
        _add(scheduler, name, 3, 30)
    _steps(scheduler, 2)
    for name in "cd":
        _add(scheduler, name, 30)
    seen = _steps(scheduler, 6)
    assert all(step["a"] == step["b"] == 1 for step in seen)
    assert [next(iter(step.keys() - {"a", "b"})) for step in seen[:4]] == ["c", "d", "c", "d"]


def test_new_prompts_in_every_step_delay_no_long_one_for_ever() -> None:
    scheduler = _scheduler(num_seqs=64)
    _add(scheduler, "long", 64, 1)
    seen = []
    for number in range(60):
        _add(scheduler, f"{chr(200 + number)}", BUDGET, 1)
        seen += _steps(scheduler, 1)
    assert sum(step.get("long", 0) for step in seen) == 64


@settings(max_examples=examples(60), deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=2, max_size=10),
    late=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40)), max_size=4),
    num_seqs=st.integers(2, 12),
    budget=st.integers(2, 12),
    ahead=st.booleans(),
)
def test_whoever_lacks_tokens_waits_for_at_most_one_turn_of_each_other(
    prompts: list[tuple[int, int]], late: list[tuple[int, int]], num_seqs: int, budget: int, ahead: bool
) -> None:
    scheduler = _scheduler(num_seqs=num_seqs, budget=budget)
    for i, (num_prompt, num_output) in enumerate(prompts):
        _add(scheduler, chr(100 + i), num_prompt, num_output)
    waited: dict[str, int] = {}
    flight: Step | None = None
    for number in range(10_000):
        for at, num_prompt in late:
            if at == number:
                _add(scheduler, chr(300 + len(waited) + num_prompt), num_prompt, 2)
        step = flight or scheduler.schedule()
        if step is None:
            break
        assert step.num_tokens <= budget
        served = {seq for seq, end, start in zip(step.seqs, step.ends, step.starts, strict=True) if end > start}
        for seq in scheduler.running:
            waited[seq.request_id] = 0 if seq in served else waited.get(seq.request_id, 0) + 1
            assert waited[seq.request_id] <= 2 * num_seqs
        flight = scheduler.schedule_ahead() if ahead else None
        _commit(scheduler, step)
    else:
        pytest.fail("the load was not served")
    scheduler.check_integrity()


def test_a_sequence_that_lacks_nothing_does_not_shift_the_tokens_of_those_behind_it() -> None:
    """A beam that waits for the others of its search stands in front of a prompt that does not fit."""
    starts, wanted = np.array([5, 0, 0], np.int32), np.array([5, 9, 9], np.int32)
    assert ends_within_budget(4, starts, wanted).tolist() == [5, 4]
