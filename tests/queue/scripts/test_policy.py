"""take chooses what policy.py chooses: many jobs, tenants, ages and capacities, by each policy, in a real Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis as sync_redis
from fakes.queue.check import check_policy, check_sets, dump
from fakes.queue.harness import FakeNode, P, Queue, chunks_of, new_job
from fakes.queue.model import KV_TOTAL, SHARE_WINDOW_MS, SLOTS_TOTAL, ModelJob, ModelNode, QueueModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.errors import ConfigError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.priority import NUM_LEVELS, class_of_level, is_background
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Taken
from penstock.queue.policy import PolicyConfig, PolicyName

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
AGING_MS = 1_000_000_000
"""So long that no run moves a job from one age to another."""
POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "sjf", "fair", "round_robin")

priorities = st.sampled_from(Priority)
submits = st.tuples(
    st.just("submit"),
    st.sampled_from("aabc"),
    st.sampled_from(range(NUM_LEVELS)),
    st.sampled_from((5, 20, 40, 40, 90, 400)),
    st.integers(1, 3),
)
takes = st.tuples(
    st.just("take"),
    st.lists(st.sampled_from((0, 30, 100, 300, 1000)), min_size=NUM_LEVELS, max_size=NUM_LEVELS).map(
        lambda room: sorted(room)[::-1]
    ),
    st.lists(st.integers(0, 9), min_size=NUM_LEVELS, max_size=NUM_LEVELS).map(lambda slots: sorted(slots)[::-1]),
    st.sampled_from((1.0, 0.1, 3.0)),
    st.booleans(),
)
ends = st.tuples(
    st.sampled_from(("finish", "give_back", "give_back", "give_back", "cancel")),
    st.integers(0, 99),
    st.integers(0, 2000),
)
waits = st.tuples(st.just("wait"), priorities, st.integers(1, 4))
events = st.one_of(submits, submits, submits, takes, takes, ends, ends, waits)


class Pool:
    """A pool of one node, and its model."""

    def __init__(self, url: str, policy: PolicyConfig) -> None:
        self.runner = asyncio.Runner()
        self.url, self.policy = url, policy
        self.sync = sync_redis.Redis.from_url(url)
        self.sync.flushall()
        self.client = connect(url)
        self.queue = Queue(self.client)
        self.node = FakeNode(self.client, "n0", "r")
        fields = {"policy": policy.name, "aging_ms": policy.aging_ms, "bypass_ms": policy.bypass_ms, "avoid_ms": 0}
        fields["share_window_ms"] = policy.share_window_ms
        self.runner.run(self.node.join(**fields))
        self.model = QueueModel(policy, self.runner.run(self.queue.now_ms()))
        self.model.nodes["n0"] = ModelNode("n0", "r")
        self.taken: list[tuple[ModelJob, Taken]] = []

    def close(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()
        self.sync.close()

    def submit(self, tenant: str, level: int, cost: int, n: int) -> None:
        """Each job is a third of an aging time younger than the one before, the first one four of them old."""
        kind = {"background": is_background(level), "needs_reader": False}
        job = new_job(tenant=tenant, priority=class_of_level(level), params=SamplingParams(n=n), **kind)
        self.runner.run(self.queue.submit(job, cost=cost))
        known = ModelJob(job.id, tenant, level, n, cost, needs_reader=False, has_deadline=False)
        known.submitted_ms = self.model.now_ms - 4 * AGING_MS + (len(self.model.jobs) - 1) * AGING_MS // 3 - 10**7
        self.sync.hset(f"{P}:job:{job.id}", "submitted", known.submitted_ms)
        self.sync.zadd(f"{P}:waiting:{level}", {job.id: known.submitted_ms})
        self.model.submit(known)

    def take(self, room: list[int], slots: list[int], hold_ms: float, due: bool = False) -> None:
        sizes: Any = (tuple(room), tuple(slots))
        call = self.node.take(*sizes, kv_total=KV_TOTAL, slots_total=SLOTS_TOTAL, hold_ms=hold_ms, background_due=due)
        answer = self.runner.run(call)
        expected = self.model.take(self.model.nodes["n0"], room, slots, hold_ms, background_due=due)
        assert [(t.job_id, t.urgency) for t in answer.jobs] == [(job.job_id, job.urgency) for job in expected]
        for job, taken in zip(expected, answer.jobs, strict=True):
            job.lease = taken.lease
            self.taken.append((job, taken))

    def end(self, how: str, pick: int, figure: int) -> None:
        if how == "cancel" and self.model.jobs:
            job = list(self.model.jobs.values())[pick % len(self.model.jobs)]
            self.runner.run(self.queue.producer.cancel(job.job_id, job.tenant))
            self.model.cancel(job)
        elif self.taken:
            job, taken = self.taken.pop(pick % len(self.taken))
            node = self.model.nodes["n0"]
            if how == "finish":
                assert self.runner.run(self.node.finish(taken, 0, kv_token_ms=figure)) == "OK"
                self.model.finish(job, node, taken.lease, 0, [], figure)
            else:
                cost = 1 + figure % 200
                assert self.runner.run(self.node.give_back(taken, cost)) == "OK"
                self.model.give_back(job, node, taken.lease, cost)
                job.avoids = ""

    def wait(self, priority: Priority, risen: int) -> None:
        """The class was last served so long ago that its head rises by as much, if it is old enough."""
        served_ms = self.model.now_ms - risen * AGING_MS - AGING_MS // 2
        self.model.standing.head_served_ms[priority] = served_ms
        self.sync.hset(f"{P}:head_served", str(int(priority)), served_ms)

    def do(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("submit", *fields):
                self.submit(*fields)
            case ("take", *fields):
                self.take(*fields)
            case ("wait", *fields):
                self.wait(*fields)
            case _:
                self.end(*event)


@pytest.fixture
def new_pool(redis_url: str) -> Iterator[Any]:
    """Create pools with a given policy."""
    pools: list[Pool] = []

    def make(name: PolicyName, bypass_ms: int = 0) -> Pool:
        pools.append(Pool(redis_url, PolicyConfig(name, AGING_MS, bypass_ms, SHARE_WINDOW_MS)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.timeout(900 if FULL else 120)
@pytest.mark.parametrize("name", POLICIES)
def test_take_orders_as_policy_does(redis_url: str, name: PolicyName) -> None:
    @settings(max_examples=2000 if FULL else 25, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from((0, 2 * AGING_MS, 10**6 * AGING_MS)), st.lists(events, min_size=10, max_size=50))
    def run(bypass_ms: int, story: list[tuple[Any, ...]]) -> None:
        pool = Pool(redis_url, PolicyConfig(name, AGING_MS, bypass_ms, SHARE_WINDOW_MS))
        try:
            for event in story:
                pool.do(event)
            found, _ = dump(pool.sync)
            check_policy(found, pool.model)
            check_sets(found, pool.model)
        finally:
            pool.close()

    run()


def started(pool: Pool) -> ModelJob:
    """Return the one job that a node with one free slot starts."""
    before = len(pool.taken)
    pool.take([1000] * NUM_LEVELS, [1] * NUM_LEVELS, 1.0)
    assert len(pool.taken) == before + 1
    return pool.taken[-1][0]


@pytest.mark.parametrize("num_queued", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_new_tenant_beside_a_long_backlog_starts_after_two_ends_at_the_latest(new_pool: Any, num_queued: int) -> None:
    pool = new_pool("fair")
    for _ in range(num_queued):
        pool.submit("a", Priority.STANDARD, 40, 1)
    for _ in range(4):
        started(pool)
    for _ in range(3):
        pool.submit("b", Priority.STANDARD, 40, 1)
        tenants = set()
        for _ in range(2):
            pool.end("finish", 0, 40)
            tenants.add(started(pool).tenant)
        assert "b" in tenants


def test_tenant_with_a_backlog_and_intermittent_tenant_share_evenly(new_pool: Any) -> None:
    """The latter never has a backlog; it neither gains nor loses by that."""
    pool = new_pool("fair")
    for _ in range(130):
        pool.submit("a", Priority.STANDARD, 40, 1)
    shares = {"a": 0, "b": 0}
    for turn in range(120):
        if turn % 2:
            pool.submit("b", Priority.STANDARD, 40, 1)
        shares[started(pool).tenant] += 1
        pool.end("finish", 0, 40)
    assert shares == {"a": 60, "b": 60}


def test_tenant_is_charged_what_its_job_actually_used(new_pool: Any) -> None:
    """b's jobs last four times as long as predicted, so it gets a fourth of the starts."""
    pool = new_pool("fair")
    for tenant in "ab" * 60:
        pool.submit(tenant, Priority.STANDARD, 40, 1)
    starts = []
    for _ in range(50):
        starts.append(started(pool).tenant)
        pool.end("finish", 0, 160 if starts[-1] == "b" else 40)
    assert starts.count("b") == 10


def test_jobs_lost_with_a_node_are_not_charged(new_pool: Any) -> None:
    pool = new_pool("fair")
    for tenant in "aaaabbbb":
        pool.submit(tenant, Priority.STANDARD, 40, 1)
    pool.take([1000] * NUM_LEVELS, [4] * NUM_LEVELS, 1.0)
    for _ in range(4):
        pool.end("give_back", 0, 39)
    assert pool.model.standing.virtual_times[1].times == {"a": 0.0, "b": 1.0}
    pool.take([1000] * NUM_LEVELS, [8] * NUM_LEVELS, 1.0)
    assert "".join(job.tenant for job, _ in pool.taken) == "abababab"


def test_a_node_of_another_policy_is_refused(new_pool: Any) -> None:
    pool = new_pool("fair")
    other = FakeNode(pool.client, "n1", "r")
    with pytest.raises(ConfigError, match="policy=fair, this node with sjf"):
        pool.runner.run(other.join(policy="sjf", aging_ms=AGING_MS, bypass_ms=0, avoid_ms=0))


def test_shortest_first_counts_what_the_log_of_a_requeued_job_already_has(new_pool: Any) -> None:
    pool = new_pool("sjf")
    pool.submit("a", Priority.STANDARD, 90, 1)
    job, taken = started(pool), pool.taken[0][1]
    assert pool.runner.run(pool.node.emit(taken, 0, 60)) == "OK"
    pool.model.emit(job, pool.model.nodes["n0"], taken.lease, 0, list(chunks_of(job.job_id, 0, 60)))
    pool.submit("a", Priority.STANDARD, 40, 1)
    pool.end("give_back", 0, 89)
    assert started(pool) is job


@pytest.mark.parametrize(("windows_ago", "left"), [(0, 25), (1, 25), (2, 100)])
async def test_a_refund_lowers_the_use_of_the_window_of_its_charge(queue: Queue, windows_ago: int, left: int) -> None:
    """A refund for an older window than the last one is dropped: that window no longer counts."""
    node = await queue.node(share_window_ms=10**10)
    await queue.submit(new_job(tenant="acme"), cost=100)
    taken = await node.take_one()
    (name,) = await queue.keys("recent_use:*")
    window = int(name.rpartition(":")[2]) - windows_ago
    await queue.redis.rename(f"{P}:{name}", f"{P}:recent_use:{window}")
    await queue.change(taken.job_id, window=window)
    assert await node.finish(taken, 0, kv_token_ms=25) == "OK"
    uses = {key: await queue.redis.hgetall(f"{P}:{key}") for key in await queue.keys("recent_use:*")}
    assert uses == {f"recent_use:{window}": {b"acme": b"%d" % left}}


def _note_use(pool: Pool, tenants: str) -> None:
    """Run jobs of these tenants. Jobs submitted after 12 others are too young to rise."""
    for tenant in tenants:
        pool.submit(tenant, Priority.STANDARD, 10, 1)
        started(pool)
        pool.end("finish", 0, 10)


def test_an_interactive_job_of_a_tenant_above_its_share_does_not_go_first(new_pool: Any) -> None:
    pool = new_pool("fair")
    _note_use(pool, "a" * 12)
    pool.submit("a", Priority.INTERACTIVE, 10, 1)
    pool.submit("b", Priority.STANDARD, 10, 1)
    assert started(pool).tenant == "b"


def test_an_interactive_job_above_the_share_of_absent_tenants_counts_as_standard(new_pool: Any) -> None:
    pool = new_pool("fair")
    _note_use(pool, "b" + "a" * 12)
    pool.submit("a", Priority.INTERACTIVE, 10, 1)
    started(pool)
    assert pool.taken[-1][1].urgency == Priority.STANDARD


@pytest.mark.parametrize("num_tenants", [1, 10, 100])
async def test_round_robin_gives_tenants_equal_turns_within_one_job(queue: Queue, num_tenants: int) -> None:
    """Whatever their jobs cost, and whatever these used when they end."""
    node = await queue.node(policy="round_robin")
    names = [f"t{number:03}" for number in range(num_tenants)]
    num_each = max(3, 12 // num_tenants)
    for number in range(num_each):
        for at, name in enumerate(names):
            job = new_job(tenant=name, needs_reader=False)
            await queue.submit(job, cost=1 + (at * 37 + number * 11) % 400)
    turns = dict.fromkeys(names, 0)
    while sum(turns.values()) < num_each * num_tenants:
        room = [400 * 7] * NUM_LEVELS, [7] * NUM_LEVELS
        answer = await node.take(*map(tuple, room), kv_total=KV_TOTAL, slots_total=SLOTS_TOTAL, hold_ms=1.0)
        assert answer.jobs
        for taken in answer.jobs:
            turns[taken.tenant] += 1
            assert max(turns.values()) - min(turns.values()) <= 1
        for taken in answer.jobs[::2]:
            assert await node.finish(taken, 0, kv_token_ms=len(taken.job_id) * 10**9) == "OK"
    assert set(turns.values()) == {num_each}
