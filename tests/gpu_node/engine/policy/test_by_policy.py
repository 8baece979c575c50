"""Policies inside the engine: the order of starts, the choice of victims, and fair shares of KV per tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
from fakes.engine_runs import check_idle, tokens_of
from fakes.policy_bench import AGING_MS, Bench
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import RequestError
from penstock.contract.job import Priority, SamplingParams
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.policy.by_policy import MAX_SHARE_PREEMPTIONS
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.sequence import Sequence
from penstock.queue.policy import PolicyName

PREEMPTIVE = ("priority", "sjf", "fair", "round_robin")
MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize(
    ("name", "order"), [("priority", "CEABD"), ("sjf", "ECDBA"), ("fair", "CEADB"), ("round_robin", "CEADB")]
)
def test_waiting_sequences_start_in_the_policys_order(name: PolicyName, order: str) -> None:
    bench = Bench(name, max_num_seqs=1)
    bench.add("A", 20, 4)
    bench.add("B", 12, 4)
    bench.add("C", 8, 4, level=Priority.INTERACTIVE)
    bench.add("D", 8, 4, tenant="other")
    bench.add("E", 4, 4, level=Priority.INTERACTIVE, tenant="other")
    assert bench.run() == order


@pytest.mark.parametrize("name", PREEMPTIVE)
def test_new_urgent_sequence_preempts_less_urgent_ones_at_once(name: PolicyName) -> None:
    bench = Bench(name, num_blocks=8)
    older, newer = bench.add("B", 12, 8, level=Priority.BATCH), bench.add("C", 12, 8, level=Priority.BATCH)
    bench.step()
    assert bench.scheduler.running == [older, newer]
    urgent = bench.add("X", 12, 8, level=Priority.INTERACTIVE)
    bench.step()
    assert bench.scheduler.running == [older, urgent], "the newest of them goes"
    equal = bench.add("Y", 12, 8, level=Priority.INTERACTIVE, tenant="other")
    bench.step()
    assert bench.scheduler.running == [urgent, equal]
    bench.add("Z", 12, 8, level=Priority.INTERACTIVE)
    bench.step()
    assert bench.scheduler.running == [urgent, equal], "equals wait"
    assert bench.scheduler.num_preemptions == 2
    bench.run()


def test_no_sequence_is_preempted_unless_the_urgent_one_then_fits() -> None:
    bench = Bench("priority", num_blocks=8)
    bench.add("A", 16, 4, level=Priority.INTERACTIVE)
    batch = bench.add("B", 4, 4, level=Priority.BATCH)
    bench.step()
    bench.add("X", 20, 4, level=Priority.INTERACTIVE)
    bench.step()
    assert batch in bench.scheduler.running
    assert bench.scheduler.num_preemptions == 0
    bench.run()


def test_fcfs_never_preempts_for_a_waiting_sequence() -> None:
    bench = Bench("fcfs", num_blocks=8)
    batch = [bench.add(name, 12, 4, level=Priority.BATCH) for name in "AB"]
    bench.step()
    bench.add("X", 12, 4, level=Priority.INTERACTIVE)
    bench.step()
    assert bench.scheduler.running == batch


def test_small_sequence_overtakes_one_that_does_not_fit_until_that_is_old() -> None:
    for bypass_ms, order in ((0, "ABC"), (1000, "ACB")):
        bench = Bench("priority", num_blocks=8, bypass_ms=bypass_ms)
        bench.add("A", 16, 12)
        bench.step()
        bench.add("B", 24, 4)
        bench.add("C", 4, 2)
        assert bench.run() == order


def test_tenants_get_equal_shares_of_the_cache_however_many_wait() -> None:
    """Fifty of one tenant and ten of another: while both wait, none is ahead by more than a few sequences' worth."""
    bench = Bench("fair", num_blocks=24, max_num_seqs=4)
    greedy = [bench.add(f"a{i}", tenant="greedy") for i in range(50)]
    modest = [bench.add(f"b{i}", 8, 16, tenant="modest") for i in range(10)]
    while any(seq.row < 0 and seq.kv_token_ms == 0 for seq in modest):
        bench.step()
    used = [sum(seq.kv_token_ms for seq in seqs) for seqs in (greedy, modest)]
    assert 0.7 < used[0] / used[1] < 1.4
    bench.run()
    num_before_last = bench.starts.index("b9")
    assert num_before_last < 40, "a backlog of fifty does not stand before it"


def test_aged_sequence_starts_in_a_more_urgent_class_and_is_not_preempted() -> None:
    bench = Bench("priority", num_blocks=8)
    aged = bench.add("A", 20, 8, level=Priority.BATCH)
    bench.now_ms += 3 * AGING_MS
    bench.step()
    bench.add("X", 20, 8, level=Priority.INTERACTIVE)
    bench.step()
    assert bench.scheduler.running == [aged]
    bench.run()


def test_without_free_blocks_the_newest_least_urgent_sequence_is_preempted() -> None:
    bench = Bench("priority", num_blocks=12)
    bench.add("B", 12, 12, level=Priority.BATCH)
    bench.add("C", 12, 12, level=Priority.BATCH)
    bench.step()
    urgent = bench.add("X", 12, 12, level=Priority.INTERACTIVE)
    bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["B", "C", "X"]
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == ["B", "X"]
    while urgent.row >= 0:
        bench.step()
    bench.run()


def test_shortest_first_learns_which_tenants_have_short_outputs() -> None:
    bench = Bench("sjf", num_blocks=40, max_num_seqs=2)
    for tenant, num_output in (("brief", 3), ("wordy", 30)):
        for i in range(9):
            seq = bench.add(f"{tenant}{i}", 8, 40, tenant=tenant)
            bench.order.ended(seq, num_output)
            bench.scheduler.remove(seq)
    for name, tenant in (("A", "wordy"), ("B", "brief"), ("C", "wordy"), ("D", "brief")):
        bench.add(name, 8, 40, tenant=tenant)
    assert bench.run() == "BDAC"


def learn(bench: Bench, lengths: dict[str, int]) -> None:
    """Let nine outputs of each tenant end with this number of tokens."""
    for tenant, num_output in lengths.items():
        for i in range(9):
            seq = bench.add(f"{tenant}{i}", 8, 40, tenant=tenant)
            bench.order.ended(seq, num_output)
            bench.scheduler.remove(seq)


@pytest.mark.parametrize(("name", "left"), [("priority", "wordy"), ("sjf", "brief")])
def test_shortest_first_preempts_the_sequence_that_will_run_the_longest(name: PolicyName, left: str) -> None:
    bench = Bench(name, num_blocks=7)
    learn(bench, {"brief": 8, "wordy": 30})
    bench.add("wordy", 8, 40, tenant="wordy")
    bench.add("brief", 8, 40, tenant="brief")
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    assert [seq.request_id for seq in bench.scheduler.running] == [left]


def test_shortest_first_resumes_by_what_is_left() -> None:
    """A has most of its output when an urgent request preempts it; B would need fewer tokens in all."""
    bench = Bench("sjf", num_blocks=12, max_num_seqs=1)
    learn(bench, {"a": 30, "b": 20})
    preempted = bench.add("A", 8, 40, tenant="a", level=Priority.BATCH)
    for _ in range(25):
        bench.step()
    bench.add("B", 8, 40, tenant="b", level=Priority.BATCH)
    bench.add("X", 8, 2, level=Priority.INTERACTIVE)
    bench.step()
    assert preempted.row < 0
    assert 1 <= preempted.remaining_tokens <= 6
    bench.starts.clear()
    assert bench.run() == "AB"


def test_charge_of_a_start_follows_the_measured_use_of_others() -> None:
    """One long sequence of a; short ones of both tenants beside it. At first it is charged a hundred times too much."""
    bench = Bench("fair", num_blocks=200, max_num_seqs=2)
    for i in range(150):
        bench.add(f"warm{i}", 8, 4)
    bench.run()
    bench.starts.clear()
    bench.add("long", 8, 250, tenant="a")
    bench.step()
    for i in range(60):
        bench.add(f"a{i}", 8, 4, tenant="a")
        bench.add(f"b{i}", 8, 4, tenant="b")
    while "a0" not in bench.starts:
        bench.step()
    assert 5 < len(bench.starts) < 40


num_choices = st.sampled_from((1, 1, 1, 2, 4))
requests = st.tuples(
    st.integers(1, 26), st.integers(1, 20), num_choices, st.sampled_from(Priority), st.sampled_from("ab")
)


@pytest.mark.parametrize("name", PREEMPTIVE)
@given(
    num_host_blocks=st.sampled_from((0, 4, 20)),
    bypass_ms=st.sampled_from((0, 50, AGING_MS)),
    aging_ms=st.sampled_from((30, AGING_MS)),
    story=st.lists(st.one_of(requests, st.integers(0, 9), st.none()), max_size=30),
)
def test_every_sequence_ends_under_any_arrivals_and_aborts(
    name: PolicyName, num_host_blocks: int, bypass_ms: int, aging_ms: int, story: list[Any]
) -> None:
    """Requests, aborts (a number) and steps (None) in any order; pools hold little more than one of them."""
    bench = Bench(name, bypass_ms=bypass_ms, aging_ms=aging_ms, num_host_blocks=num_host_blocks, preemption="auto")
    live: list[Sequence] = []
    for event in story:
        if event is None:
            bench.step()
        elif isinstance(event, int):
            waiting = [one for seq in bench.scheduler.queues for one in (seq, *seq.forks)]
            live = [seq for seq in live if seq.row >= 0 or seq in waiting]
            if live:
                bench.scheduler.remove(live.pop(event % len(live)))
        else:
            num_prompt, num_output, n, priority, tenant = event
            live += bench.add_choices(n, f"{len(live)}", num_prompt, num_output, level=priority, tenant=tenant)
    for _ in range(2000):
        if not bench.scheduler.running and not bench.scheduler.queues:
            break
        bench.step()
    assert not bench.scheduler.running and not bench.scheduler.queues
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("name", get_args(PolicyName))
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_interactive_request_is_served_at_once_and_no_tokens_change(
    make_engine: MakeEngine, name: PolicyName, preemption: str
) -> None:
    settings = {"num_kv_blocks": 24, "num_swap_blocks": 48, "max_num_seqs": 8, "preemption": preemption}
    engine = make_engine(runner="native", dtype="bfloat16", scheduling_policy=name, **settings)
    batch = {str(i): list(range(10 + i, 40 + i)) for i in range(12)}
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    outputs: list[StepOutput] = []
    for request_id, prompt in batch.items():
        engine.add(EngineRequest(request_id, prompt, params, seed=int(request_id), level=Priority.BATCH, tenant="bulk"))
    while engine.stats().kv_blocks_free > 2:
        outputs += engine.step()
    engine.add(EngineRequest("X", list(range(100, 140)), params, seed=99, level=Priority.INTERACTIVE))
    num_steps = 0
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
        num_steps += not tokens_of(outputs, "X")
    assert (num_steps <= 3) is (name != "fcfs")
    check_idle(engine)
    for request_id, prompt in {**batch, "X": list(range(100, 140))}.items():
        engine.add(EngineRequest("alone", prompt, params, seed=99 if request_id == "X" else int(request_id)))
        alone: list[StepOutput] = []
        while engine.has_work():
            alone += engine.step()
        assert tokens_of(outputs, request_id) == tokens_of(alone, "alone")


def test_outputs_report_their_kv_token_milliseconds(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True), seed=1))
    held = []
    while engine.has_work():
        held += [output.kv_token_ms for output in engine.step()]
    assert held == sorted(held)
    assert held[-1] > 0


def test_a_class_that_does_not_exist_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError, match="level is 6") as refused:
        make_engine().add(EngineRequest("a", [5], SamplingParams(), seed=1, level=6))
    assert refused.value.param == "level"


# Shares of the device ---------------------------------------------------------------------------


def test_tenant_below_its_share_starts_at_once_beside_a_flood_of_sequences() -> None:
    bench = Bench("fair", num_blocks=64, max_num_seqs=4)
    flood = [bench.add(f"F{i}", 4, 40, tenant="flood") for i in range(8)]
    bench.step()
    assert len(bench.scheduler.running) == 4
    victim = bench.add("V", 4, 8, tenant="victim")
    bench.step()
    assert victim in bench.scheduler.running, "a slot was made free"
    assert bench.scheduler.num_preemptions == 1
    second = bench.add("W", 4, 8, tenant="victim")
    bench.step()
    assert second in bench.scheduler.running, "two of four slots are its share"
    third = bench.add("X", 4, 8, tenant="victim")
    bench.step()
    assert third not in bench.scheduler.running, "above its share it waits"
    bench.run()
    assert all(len(seq.token_ids) == 44 for seq in flood)


def test_large_n_is_no_way_around_the_share() -> None:
    bench = Bench("fair", num_blocks=64, max_num_seqs=8)
    bench.add_choices(4, "A", 4, 40, tenant="flood")
    bench.add_choices(4, "B", 4, 40, tenant="flood")
    for _ in range(3):
        bench.step()
    victim = bench.add("V", 4, 8, tenant="victim")
    bench.step()
    assert victim in bench.scheduler.running
    bench.run()


def test_kv_blocks_count_as_slots_do() -> None:
    bench = Bench("fair", num_blocks=12, max_num_seqs=8)
    bench.add("A", 20, 8, tenant="flood")
    bench.add("B", 20, 8, tenant="flood")
    bench.step()
    victim = bench.add("V", 8, 4, tenant="victim")
    bench.step()
    assert victim in bench.scheduler.running
    bench.run()


def test_batch_work_makes_others_wait_for_nothing() -> None:
    bench = Bench("fair", num_blocks=64, max_num_seqs=2)
    for name in "AB":
        bench.add(name, 4, 20, tenant="chats")
    bench.step()
    batch = bench.add("C", 4, 4, tenant="batch", level=Priority.BATCH)
    bench.step()
    assert batch not in bench.scheduler.running
    bench.run()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 24), st.integers(1, 20), st.integers(1, 4), st.integers(0, 3)),
        min_size=1,
        max_size=24,
    )
)
def test_no_sequence_is_preempted_for_shares_more_often_than_the_bound(
    asked: list[tuple[str, int, int, int, int]],
) -> None:
    """Each sequence ends with all its tokens, and no tenant starves."""
    bench = Bench("fair", num_blocks=40, max_num_seqs=6)
    seqs = []
    for number, (tenant, num_prompt, num_output, n, num_steps) in enumerate(asked):
        seqs += bench.add_choices(n, f"{tenant}{number}", num_prompt, num_output, tenant=tenant)
        for _ in range(num_steps):
            bench.step()
    for _ in range(5000):
        if not (bench.scheduler.running or bench.scheduler.queues):
            break
        bench.step()
    for seq in seqs:
        assert len(seq.token_ids) == seq.max_num_tokens
        assert seq.num_preemptions <= MAX_SHARE_PREEMPTIONS, "blocks suffice, so nothing else preempts"


@pytest.mark.parametrize("num_tenants", [1, 5])
def test_long_prompts_of_other_tenants_delay_a_short_prompt_by_few_steps(num_tenants: int) -> None:
    """64 tokens are computed per step, and 600 are before the short prompt."""
    bench = Bench("fair", num_blocks=400, max_num_seqs=16)
    flood = [bench.add(f"F{i}", 60, 4, tenant=f"flood-{i % num_tenants}") for i in range(10)]
    bench.step()
    victim = bench.add("V", 12, 4, tenant="victim")
    for _ in range(3):
        bench.step()
    assert len(victim.token_ids) > 12 or bench.scheduler.tokens_of(victim).size > 12
    bench.run()
    assert all(len(seq.token_ids) == seq.max_num_tokens for seq in (victim, *flood))


@pytest.mark.parametrize("num_tenants", [1, 10, 100])
def test_round_robin_gives_tenants_equal_turns_within_one_request(num_tenants: int) -> None:
    bench = Bench("round_robin", num_blocks=40, max_num_seqs=4)
    for number in range(3):
        for at in range(num_tenants):
            bench.add(f"{at}-{number}", 4 + at * 5 % 20, 1 + (at + number) % 6, tenant=f"t{at}")
    while bench.scheduler.running or bench.scheduler.queues:
        bench.step()
        turns = dict.fromkeys(range(num_tenants), 0)
        for name in dict.fromkeys(bench.starts):
            turns[int(name.partition("-")[0])] += 1
        assert max(turns.values()) - min(turns.values()) <= 1
    assert set(turns.values()) == {3}


def test_a_preempted_sequence_costs_its_tenant_one_turn_in_all() -> None:
    bench = Bench("round_robin", num_blocks=8, max_num_seqs=1)
    bench.add("A", 12, 8, tenant="a")
    bench.step()
    bench.add("X", 12, 2, level=Priority.INTERACTIVE, tenant="x")
    bench.add("B", 12, 2, tenant="b")
    bench.add("C", 12, 2, tenant="a")
    bench.add("D", 12, 2, tenant="b")
    assert bench.run() == "AXBCD" or bench.starts == ["A", "X", "A", "B", "C", "D"]
