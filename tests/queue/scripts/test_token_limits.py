"""Token rates: what a job reserves, and that the tokens of any minute stay within limit, burst and one job."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.queue.harness import POOL, SLOT_MS, FakeNode, P, Queue, ids_of, new_job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.output import Outcome, Usage
from penstock.contract.tasks import Tokenize
from penstock.contract.tenant import Terms
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Emission, Taken
from penstock.queue.broker.producer import Submission
from penstock.queue.job_cost import RateTokens, rate_tokens

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
TOLERANCE_MS = 2_000  # a slow machine
MINUTE_MS = 60_000


async def refusal(queue: Queue, terms: Terms) -> BusyError:
    with pytest.raises(BusyError) as caught:
        await queue.producer.submit(Submission(new_job(tenant="acme"), 1, terms=terms))
    return caught.value


async def ask(queue: Queue, terms: Terms, num_prompt: int, max_tokens: int | None, **fields: object) -> str:
    params = SamplingParams(max_tokens=max_tokens)
    job = new_job(tenant="acme", prompt=None, prompt_token_ids=(5,) * num_prompt, params=params, **fields)
    return (await queue.producer.submit(Submission(job, 10, terms=terms, rate_tokens=rate_tokens(job)))).job_id


async def test_long_outputs_are_reserved_before_any_of_them_is_known(queue: Queue) -> None:
    """A key with 1,000 tokens a minute had 115 jobs of 7,000 tokens accepted."""
    await queue.node()
    terms, num_accepted = Terms(tokens_per_minute=1000), 0
    for _ in range(115):
        try:
            await ask(queue, terms, 100, 7000)
            num_accepted += 1
        except BusyError as error:
            assert "1000 tokens per minute" in error.message
    assert num_accepted == 1, "a job above the burst is accepted when nothing is owed"


async def test_a_reservation_follows_the_tenants_own_outputs(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=60_000, burst_s=1)
    await ask(queue, terms, 10, 100)
    (taken,) = (await node.take()).jobs
    last = Emission(taken.job_id, taken.lease, 0, ())
    assert await node.broker.finish(last, Outcome("succeeded"), b"r", usage=Usage(10, 40)) == "OK"
    job_id = await ask(queue, terms, 10, 7000)
    assert (await queue.record(job_id))["charged"] == "50"
    await queue.pass_time("acme", 1000)
    job_id = await ask(queue, terms, 10, 20)
    assert (await queue.record(job_id))["charged"] == "30", "the caller's limit is smaller"
    job = new_job(tenant="other", prompt_token_ids=(5,) * 10, prompt=None, params=SamplingParams())
    await queue.producer.submit(Submission(job, 10, terms=terms, rate_tokens=rate_tokens(job)))
    assert (await queue.record(job.id))["charged"] == "266", "another tenant's outputs tell nothing"


async def test_a_limit_above_the_context_reserves_no_more_than_the_context(queue: Queue) -> None:
    await queue.node()
    job_id = await ask(queue, Terms(tokens_per_minute=60_000, burst_s=1), 10, 32_000, max_total_tokens=200)
    assert (await queue.record(job_id))["charged"] == "210"


async def test_delayed_jobs_reserve_their_tokens_when_they_are_due(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=60, burst_s=1)
    late = [await ask(queue, terms, 50, 50, not_before_ms=60_000) for _ in range(5)]
    assert await queue.keys("rate:*") == set()
    now_ms = await queue.now_ms()
    for job_id in late:
        await queue.delay(job_id, now_ms - 10)
    assert len((await node.take()).jobs) == 1, "the others wait for the tenant's rate"
    found: Any = await queue.redis.zrange(f"{P}:delayed:1:acme", 0, -1, withscores=True)
    due_ms = sorted(score for _, score in found)
    assert len(due_ms) == 4
    assert due_ms[0] - now_ms == pytest.approx(100_000, abs=TOLERANCE_MS)
    assert due_ms[3] - due_ms[0] == pytest.approx(300_000, abs=TOLERANCE_MS), "one after the other"
    assert await queue.submit(tenant="other") in [job.job_id for job in (await node.take()).jobs]
    assert [f for f in await audit(AdminBroker(queue.redis), POOL) if f.key.startswith("delayed")] == []


async def test_tasks_count_their_prompts(queue: Queue) -> None:
    await queue.node()
    terms = Terms(tokens_per_minute=60, burst_s=1)
    job = new_job(tenant="acme", prompt="x" * 150, task=Tokenize())
    await queue.producer.submit(Submission(job, 1, terms=terms, rate_tokens=rate_tokens(job)))
    assert (await refusal(queue, terms)).retry_after_ms > 1000


async def end(node: FakeNode, taken: Taken, num_prompt: int, num_output: int) -> None:
    """End a job with these tokens used."""
    last, usage = Emission(taken.job_id, taken.lease, 0, ()), Usage(num_prompt, num_output)
    assert await node.broker.finish(last, Outcome("succeeded"), b"r", usage=usage) == "OK"


async def learn_short_outputs(queue: Queue, node: FakeNode, terms: Terms) -> None:
    """Let the tenant's outputs be known as one token long, as a dozen of them makes them."""
    for _ in range(12):
        await ask(queue, terms, 1, 1)
        (taken,) = (await node.take()).jobs
        await end(node, taken, 1, 1)
    await queue.pass_time("acme", 14 * SLOT_MS)


async def findings(queue: Queue) -> list[str]:
    return [str(found) for found in await audit(AdminBroker(queue.redis), POOL) if found.invariant == "I5"]


async def test_long_jobs_of_a_tenant_known_for_short_outputs_run_one_after_another(queue: Queue) -> None:
    """A key with 1,000 tokens a minute had 49 jobs of 7,000 tokens run at once."""
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    jobs = [await ask(queue, terms, 1, 7000) for _ in range(49)]
    assert ids_of(await node.take()) == jobs[:1]
    other = await queue.submit(tenant="other")
    assert ids_of(await node.take()) == [other], "others do not wait"
    assert await findings(queue) == []


async def test_the_next_job_starts_when_older_tokens_count_no_more(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    first, second = [await ask(queue, terms, 1, 7000) for _ in range(2)]
    taken = await node.take_one()
    assert taken.job_id == first
    await end(node, taken, 1, 7000)
    answer = await node.take()
    assert ids_of(answer) == []
    assert MINUTE_MS - TOLERANCE_MS < answer.again_in_ms <= MINUTE_MS + SLOT_MS
    await queue.pass_time("acme", 13 * SLOT_MS)
    assert ids_of(await node.take()) == [second]


async def test_the_end_of_a_job_that_used_little_starts_the_next_one_at_once(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    await node.heartbeat()
    jobs = [await ask(queue, terms, 1, 7000) for _ in range(3)]
    bell = await queue.listen(f"{P}:doorbell:{node.name}")
    for job_id in jobs:
        taken = await node.take_one()
        assert taken.job_id == job_id
        await bell.messages()
        await end(node, taken, 1, 1)
        assert len(await bell.messages()) == (job_id != jobs[-1]), "a node is told to take the next one"


async def test_short_jobs_run_beside_a_long_one(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1200)
    await learn_short_outputs(queue, node, terms)
    jobs = [await ask(queue, terms, 1, 7000), *[await ask(queue, terms, 1, 99) for _ in range(14)]]
    assert set(ids_of(await node.take())) == set(jobs), "14 x 100 tokens are limit and burst"
    later = await ask(queue, terms, 1, 99)
    assert ids_of(await node.take()) == []
    assert await queue.producer.cancel(later, "acme") == "cancelled"
    assert await queue.keys("awaiting:*") == set()
    assert await findings(queue) == []


async def test_a_younger_job_does_not_pass_one_that_waits(queue: Queue) -> None:
    """Else short jobs could keep a long one waiting for ever."""
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    first, *waiting = [await ask(queue, terms, 1, max_tokens) for max_tokens in (7000, 7000, 50)]
    assert ids_of(await node.take()) == [first]
    assert await queue.ids("awaiting:acme") == set(waiting)


async def test_a_tenants_urgent_job_passes_its_waiting_ones(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1200)
    await learn_short_outputs(queue, node, terms)
    await ask(queue, terms, 1, 7000)
    await ask(queue, terms, 1, 7000, priority=Priority.BATCH)
    urgent = await ask(queue, terms, 1, 99, priority=Priority.INTERACTIVE)
    await node.take()
    assert await queue.state(urgent) == "running"


async def test_a_job_that_waits_for_tokens_expires_and_is_canceled_like_any(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    await ask(queue, terms, 1, 7000)
    late = await ask(queue, terms, 1, 7000, deadline_ms=1)
    gone = await ask(queue, terms, 1, 7000)
    assert await queue.producer.cancel(gone, "acme") == "cancelled"
    await asyncio.sleep(0.002)
    await queue.sweep()
    assert await queue.state(late) == "expired"
    assert await queue.ids("open") == set(ids_of(await node.take()))
    assert await queue.keys("awaiting:*") == await queue.keys("deadlines") == set()


async def test_a_job_that_moves_to_another_node_counts_on(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    first, second = [await ask(queue, terms, 1, 7000) for _ in range(2)]
    other = await queue.node("n2")
    await node.give_back(await node.take_one())
    assert ids_of(await other.take()) == [first]
    await queue.kill(other)
    assert await queue.state(first) == "queued"
    assert ids_of(await (await queue.node("n3")).take()) == [first]
    assert await queue.state(second) == "queued"
    assert await findings(queue) == []


async def test_a_delayed_job_waits_for_tokens_when_its_time_has_come(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    later = await ask(queue, terms, 1, 7000, not_before_ms=60_000)
    first = await ask(queue, terms, 1, 7000)
    now_ms = await queue.now_ms()
    await queue.delay(later, now_ms)
    assert ids_of(await node.take()) == [first]
    assert await queue.ids("awaiting:acme") == {later}
    assert await findings(queue) == []


async def test_an_audit_mends_what_waits_and_counts(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(tokens_per_minute=1000)
    await learn_short_outputs(queue, node, terms)
    first, second = [await ask(queue, terms, 1, 7000) for _ in range(2)]
    await queue.redis.delete(f"{P}:may_use:acme", f"{P}:may_use")
    await queue.redis.zadd(f"{P}:may_use:acme", {second: 7001})
    assert len(await findings(queue)) == 3
    await audit(AdminBroker(queue.redis), POOL, repair=True)
    assert await findings(queue) == []
    assert await queue.ids("may_use:acme") == {first}
    assert await queue.redis.hgetall(f"{P}:may_use") == {b"acme": b"7001"}


# Any minute ---------------------------------------------------------------------------------------

LIMIT, BURST = 6000, 1000
events = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 300), st.sampled_from((None, 1, 50, 900, 7000)), st.integers(1, 2)),
        st.tuples(st.just("ask"), st.integers(1, 300), st.sampled_from((1, 7000)), st.just(1)),
        st.tuples(st.just("take"), st.integers(1, 8)),
        st.tuples(st.just("finish"), st.integers(0, 99), st.sampled_from((0.0, 0.5, 1.0, 1.0))),
        st.tuples(st.sampled_from(("give_back", "cancel")), st.integers(0, 99)),
        st.tuples(st.just("pass"), st.integers(1, 14)),
    ),
    min_size=20,
    max_size=60,
)


@dataclass
class Life:
    """A job of the story: the most that it may use, what it used, and from when to when it ran."""

    tokens: RateTokens
    num_prompt: int
    taken: Taken | None = None
    from_ms: int = 0
    to_ms: int = 0
    used: int = 0


class Story:
    """One tenant with a token rate; the time of its pool passes by leaps."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.redis = connect(url)
        self.queue = Queue(self.redis)
        self.node = self.runner.run(self.begin())
        self.leapt_ms = 0
        self.lives: dict[str, Life] = {}

    async def begin(self) -> FakeNode:
        await self.redis.flushall()
        return await self.queue.node(policy="fair")

    def close(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.close()

    async def now_ms(self) -> int:
        return await self.queue.now_ms() + self.leapt_ms

    def running(self) -> list[Life]:
        return [life for life in self.lives.values() if life.taken and not life.to_ms]

    async def ask(self, num_prompt: int, max_tokens: int | None, n: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        job = new_job(tenant="acme", prompt_token_ids=(5,) * num_prompt, params=params)
        tokens, terms = rate_tokens(job, max_model_len=4000), Terms(tokens_per_minute=LIMIT)
        try:
            await self.queue.producer.submit(Submission(job, 10, terms=terms, rate_tokens=tokens))
        except BusyError:
            return
        self.lives[job.id] = Life(tokens, num_prompt)

    async def take(self, slots: int) -> None:
        for taken in (await self.node.take(slots=slots)).jobs:
            life = self.lives[taken.job_id]
            life.taken, life.from_ms = taken, life.from_ms or await self.now_ms()

    async def finish(self, pick: int, share: float) -> None:
        if running := self.running():
            life = running[pick % len(running)]
            assert life.taken is not None
            num_output = round(share * (life.tokens.may_use - life.num_prompt))
            life.to_ms, life.used = await self.now_ms(), life.num_prompt + num_output
            await end(self.node, life.taken, life.num_prompt, num_output)

    async def give_back(self, pick: int) -> None:
        if running := self.running():
            life = running[pick % len(running)]
            assert life.taken is not None
            await self.node.give_back(life.taken)
            await self.queue.change(life.taken.job_id, avoid="")
            life.taken = None

    async def cancel(self, pick: int) -> None:
        if waiting := [job_id for job_id, life in self.lives.items() if not life.from_ms]:
            job_id = waiting[pick % len(waiting)]
            assert await self.queue.producer.cancel(job_id, "acme") == "cancelled"
            del self.lives[job_id]

    async def passes(self, num_slots: int) -> None:
        self.leapt_ms += num_slots * SLOT_MS
        await self.queue.pass_time("acme", num_slots * SLOT_MS)

    async def everything_ends(self) -> None:
        """No job waits for ever: with time, each one runs and ends."""
        for _ in range(20 * len(self.lives) + 1):
            await self.take(8)
            await self.finish(0, 1.0)
            await self.passes(1)
            if all(life.to_ms for life in self.lives.values()):
                return
        raise AssertionError(f"jobs still wait: {[job_id for job_id, life in self.lives.items() if not life.to_ms]}")

    def check_minutes(self) -> None:
        """Wherever in its life a job used its tokens, no minute has more than limit, burst and one job."""
        lives = self.lives.values()
        most = LIMIT + BURST + max((life.tokens.may_use for life in lives), default=0)
        for first in lives:
            until_ms = first.to_ms + MINUTE_MS
            inside = [life for life in lives if life.to_ms >= first.to_ms and life.from_ms <= until_ms]
            assert sum(life.used for life in inside) <= most, inside

    async def tell(self, story: list[tuple[Any, ...]]) -> None:
        deeds: dict[str, Any] = {"ask": self.ask, "take": self.take, "finish": self.finish, "give_back": self.give_back}
        deeds |= {"cancel": self.cancel, "pass": self.passes}
        for deed, *figures in story:
            await deeds[deed](*figures)
        await self.everything_ends()
        self.check_minutes()
        assert await findings(self.queue) == []
        assert await self.queue.keys("awaiting*") == await self.queue.keys("may_use*") == set()


@pytest.mark.timeout(900 if FULL else 120)
def test_no_minute_has_more_than_limit_and_burst_and_one_job(redis_url: str) -> None:
    """Jobs may use anything up to their own limits, short outputs before long ones, at any time of their lives."""

    @settings(max_examples=1000 if FULL else 25, suppress_health_check=list(HealthCheck), database=None, deadline=None)
    @given(events)
    def run(story: list[tuple[Any, ...]]) -> None:
        told = Story(redis_url)
        try:
            told.runner.run(told.tell(story))
        finally:
            told.close()

    run()
