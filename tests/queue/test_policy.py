"""Each policy's order, its longest wait, the jobs that may pass others, and its choice of victims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.priority import Priority
from penstock.queue.policy import MAX_PASSED, PolicyConfig, PolicyName, choose, preemption_order, victims_of
from penstock.queue.policy_state import PolicyState, VirtualTimes

AGING_MS = 1000
POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "sjf", "fair", "round_robin")


@dataclass(frozen=True)
class Work:
    """One in a queue, or one that runs."""

    job_id: str
    level: int = 1
    submitted_ms: int = 0
    tenant: str = "a"
    cost: int = 10
    urgency: int = 0
    num_done: int = 0

    @property
    def remaining_cost(self) -> int:
        return self.cost - self.num_done

    @property
    def charge(self) -> float:
        return float(self.cost)


def anything(work: Work, urgency: int) -> bool:
    return True


def smaller_than(size: int) -> Callable[[Work, int], bool]:
    return lambda work, urgency: work.cost < size


def chosen(
    waiting: list[Work],
    name: PolicyName,
    fits: Callable[[Work, int], bool] = anything,
    *,
    now_ms: int = 0,
    bypass_ms: int = 0,
    standing: PolicyState | None = None,
) -> str:
    standing = standing or PolicyState()
    for work in sorted(waiting, key=lambda work: work.submitted_ms):
        standing.virtual_times[work.level].enter(work.tenant)
    return "".join(w.job_id for w in choose(waiting, PolicyConfig(name, AGING_MS, bypass_ms), standing, now_ms, fits))


MIXED = [
    Work("A", 2, 0, "x", 10),
    Work("B", 1, 1, "x", 30),
    Work("C", 1, 2, "x", 20),
    Work("D", 1, 3, "y", 40),
    Work("E", 0, 4, "y", 50),
]


@pytest.mark.parametrize(
    ("name", "order"),
    [("fcfs", "ABCDE"), ("priority", "EBCDA"), ("sjf", "ECBDA"), ("fair", "EBDCA"), ("round_robin", "EBDCA")],
)
def test_each_policy_has_its_order(name: PolicyName, order: str) -> None:
    assert chosen(MIXED, name) == chosen(MIXED[::-1], name) == order


def test_heads_rise_by_a_class_per_aging_time_and_are_asked_as_what_they_count_as() -> None:
    asked: dict[str, int] = {}

    def note(work: Work, urgency: int) -> bool:
        asked[work.job_id] = urgency
        return True

    assert chosen(MIXED, "priority", note, now_ms=2 * AGING_MS - 1) == "EBACD"
    assert asked == {"E": 0, "B": 0, "A": 1, "C": 1, "D": 1}
    assert chosen(MIXED, "fcfs", note, now_ms=9 * AGING_MS) == "ABCDE"
    assert set(asked.values()) == {Priority.BATCH}, "fcfs knows no classes"


def test_only_the_head_of_an_old_backlog_ages() -> None:
    old = [Work(f"{n}", 2, n) for n in range(9)]
    fresh = [Work("X", 0, 10**6), Work("Y", 0, 10**6)]
    served_ms = 10**6
    standing = PolicyState()
    assert chosen(old + fresh, "priority", now_ms=served_ms, standing=standing)[:3] == "0XY"
    standing.head_served_ms = [0, 0, served_ms]
    assert chosen(old + fresh, "priority", now_ms=served_ms + 2 * AGING_MS - 1, standing=standing)[:3] == "XY0"
    standing.head_served_ms = [served_ms + 2 * AGING_MS, 0, served_ms]
    assert chosen(old + fresh, "priority", now_ms=served_ms + 2 * AGING_MS, standing=standing)[:3] == "0XY"


@pytest.mark.parametrize("name", ["priority", "sjf", "fair", "round_robin"])
@given(
    priority=st.integers(0, 2),
    num_before=st.integers(0, 3),
    turnover_ms=st.integers(50, AGING_MS // 3),
    others=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=5),
)
def test_no_job_waits_longer_than_the_formula_says(
    name: PolicyName, priority: int, num_before: int, turnover_ms: int, others: list[tuple[int, int, str]]
) -> None:
    """One place, taken for `turnover_ms` at a time; all others always have one job waiting, cheap and new."""
    policy, standing = PolicyConfig(name, AGING_MS, 0), PolicyState()
    older = [Work(f"old{n}", priority, n - 9, "z", 100) for n in range(num_before + 1)]
    waiting, mine, now_ms = list(older), older[-1], 0
    while mine in waiting:
        for number, (p, cost, tenant) in enumerate(others):
            # Under fair, other tenants of its class are among those that its class serves before it.
            p = p if name not in ("fair", "round_robin") or p != priority else (p + 1) % 3
            if not any(work.job_id.startswith(f"{number}@") for work in waiting):
                waiting.append(Work(f"{number}@{now_ms}", p, now_ms, tenant, cost))
        for work in waiting:
            standing.virtual_times[work.level].enter(work.tenant)
        places = [1]

        def fits(work: Work, urgency: int, places: list[int] = places) -> bool:
            return bool(places) and bool(places.pop())

        for work in choose(waiting, policy, standing, now_ms, fits):
            waiting.remove(work)
        now_ms += turnover_ms
        assert (
            now_ms - mine.submitted_ms <= longest_wait_ms(policy, priority, num_before, turnover_ms) + 9 + turnover_ms
        )


def longest_wait_ms(policy: PolicyConfig, priority: int, num_before: int, turnover_ms: int) -> int:
    """Return the longest wait of a job of this class with `num_before` jobs before it, as PROTOCOL.md states it."""
    rise = priority if policy.name == "priority" else max(priority, 1)
    return (num_before + 1) * (rise * policy.aging_ms + 3 * turnover_ms)


def test_aged_head_of_a_less_urgent_class_goes_before_a_new_job() -> None:
    waiting = [Work("A", 2, 0), Work("B", 0, 2 * AGING_MS)]
    assert chosen(waiting, "priority", now_ms=2 * AGING_MS) == "AB"
    assert chosen(waiting, "priority", now_ms=2 * AGING_MS - 1) == "BA"


def test_job_that_does_not_fit_is_overtaken_until_it_is_old_enough() -> None:
    waiting = [Work("A", cost=100, submitted_ms=0), Work("B", submitted_ms=5), Work("C", submitted_ms=6)]
    for name in POLICIES:
        if name == "sjf":
            continue
        assert chosen(waiting, name, smaller_than(50), now_ms=99, bypass_ms=100) == "BC"
        assert chosen(waiting, name, smaller_than(50), now_ms=100, bypass_ms=100) == ""
    assert chosen(waiting, "sjf", smaller_than(50), now_ms=100, bypass_ms=100) == "BC", "they came before it"


def test_scan_ends_after_a_number_of_jobs_that_do_not_fit() -> None:
    large = [Work(f"{n:02}", submitted_ms=n, cost=100) for n in range(MAX_PASSED)]
    small = Work("S", submitted_ms=99)
    assert chosen([*large[1:], small], "fcfs", smaller_than(50), bypass_ms=10**6) == "S"
    assert chosen([*large, small], "fcfs", smaller_than(50), bypass_ms=10**6) == ""


def test_less_urgent_jobs_are_preempted_newest_first_and_never_equal_ones() -> None:
    running = [Work("A", urgency=2), Work("B", urgency=0), Work("C", urgency=1), Work("D", urgency=2)]
    assert [w.job_id for w in preemption_order(running)] == ["D", "A", "C", "B"]
    assert [w.job_id for w in victims_of(0, running)] == ["D", "A", "C"]
    assert [w.job_id for w in victims_of(1, running)] == ["D", "A"]
    assert victims_of(2, running) == []


charges = st.integers(1, 20).map(lambda n: n * 1e6)
steps = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from("abcd"), charges),
    st.tuples(st.just("leave"), st.sampled_from("abcd"), charges),
    st.tuples(st.just("start"), st.just(""), charges),
)


@given(st.lists(steps, max_size=80))
def test_waiting_tenants_never_differ_by_more_than_one_job(story: list[tuple[str, str, float]]) -> None:
    """While two tenants wait, what they were given differs by at most one job of each."""
    virtual_times = VirtualTimes()
    given_since: dict[tuple[str, str], float] = {}
    for what, tenant, charge in story:
        if what == "enter":
            virtual_times.enter(tenant)
        elif what == "leave" and tenant in virtual_times.times:
            virtual_times.leave(tenant)
            given_since = {pair: lead for pair, lead in given_since.items() if tenant not in pair}
        elif what == "start" and virtual_times.times:
            first = min(virtual_times.times, key=lambda name: (virtual_times.times[name], name))
            virtual_times.start(first, charge)
            for other in virtual_times.times:
                if other != first:
                    given_since[first, other] = given_since.get((first, other), 0.0) + charge
                    given_since[other, first] = given_since.get((other, first), 0.0) - charge
    assert all(lead <= 40e6 + len(story) for lead in given_since.values())


def test_no_tenant_gains_by_leaving_or_idling() -> None:
    virtual_times = VirtualTimes()
    virtual_times.enter("a")
    virtual_times.enter("b")
    virtual_times.start("a", 30)
    virtual_times.leave("a")
    virtual_times.start("b", 10)
    virtual_times.enter("a")
    assert virtual_times.times == {"a": 30, "b": 11}, "what it owes is not forgiven"
    for _ in range(5):
        virtual_times.start("b", 10)
    virtual_times.enter("c")
    assert virtual_times.times == {"a": 30, "b": 61, "c": 51}, (
        "it was away all the time and starts where the last one started"
    )


def test_new_tenants_are_served_in_order_of_arrival() -> None:
    waiting = [Work("A", submitted_ms=2, tenant="x"), Work("B", submitted_ms=3, tenant="b")]
    assert chosen(waiting, "fair") == "AB"


def test_correction_applies_to_tenants_with_and_without_queued_work() -> None:
    virtual_times = VirtualTimes()
    for tenant in "ab":
        virtual_times.enter(tenant)
        virtual_times.start(tenant, 10)
    virtual_times.correct("a", 5)
    virtual_times.leave("b")
    virtual_times.correct("b", 7)
    assert (virtual_times.times, virtual_times.debts) == ({"a": 15}, {"b": 18})
    virtual_times.correct("b", -16)
    virtual_times.correct("nobody", 3)
    virtual_times.correct("nothing", -3)
    assert virtual_times.debts == {"nobody": virtual_times.now + 3}


def test_shortest_first_counts_the_remaining_output_of_a_job() -> None:
    waiting = [Work("A", submitted_ms=0, cost=50), Work("B", submitted_ms=1, cost=90, num_done=45)]
    assert chosen(waiting, "sjf") == "BA"
    assert chosen(waiting, "priority") == "AB"


def test_among_equally_urgent_running_jobs_the_longest_is_preempted_first() -> None:
    running = [Work("A", urgency=1, cost=30), Work("B", urgency=1), Work("C", urgency=2), Work("D", urgency=1)]
    assert [work.job_id for work in preemption_order(running)] == ["C", "D", "B", "A"]
    left = [work.job_id for work in preemption_order(running, lambda work: work.remaining_cost)]
    assert left == ["C", "A", "D", "B"]
    assert victims_of(1, running, lambda work: work.remaining_cost) == running[2:3]


def test_round_robin_counts_jobs_and_neither_their_cost_nor_what_they_used() -> None:
    costly = [Work(f"a{i}", 1, i, "a", 1000) for i in range(4)]
    cheap = [Work(f"b{i}", 1, i + 4, "b", 1) for i in range(4)]
    assert chosen(costly + cheap, "round_robin") == "a0b0a1b1a2b2a3b3"
    assert chosen(costly + cheap, "fair") == "a0b0b1b2b3a1a2a3"


def test_a_tenant_that_comes_between_waits_for_one_turn_of_the_others() -> None:
    state = PolicyState()
    waiting = [Work(f"{tenant}{i}", 1, 0, tenant) for tenant in "abc" for i in range(9)]

    def run(num_jobs: int) -> str:
        places = [1] * num_jobs
        for work in waiting:
            state.virtual_times[1].enter(work.tenant)
        policy = PolicyConfig("round_robin", AGING_MS, 0)
        started = choose(waiting, policy, state, 1, lambda work, _: bool(places) and bool(places.pop()))
        for work in started:
            waiting.remove(work)
        return "".join(work.tenant for work in started)

    assert run(5) == "abcab"
    waiting += [Work(f"d{i}", 1, 1, "d") for i in range(9)]
    assert run(8) == "dcabdcab"
