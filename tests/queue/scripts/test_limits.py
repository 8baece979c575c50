"""submit's limits: of a pool, of a tenant, of Redis's memory; and the refusals' texts."""

from __future__ import annotations

import random

import pytest
from fakes.queue.harness import POOL, P, Queue, new_job

from penstock.contract.errors import BusyError
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.pool import NodePressure
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.producer import Submission
from penstock.queue.job_cost import estimate_output_bytes
from penstock.queue.wire import encode_record

TOLERANCE_MS = 2_000  # a slow machine


async def submit(queue: Queue, terms: Terms, *, cost: int = 100, tenant: str = "acme", **fields: object) -> str:
    return (await queue.producer.submit(Submission(new_job(tenant=tenant, **fields), cost, terms=terms))).job_id


async def refusal(queue: Queue, terms: Terms, *, cost: int = 100, **fields: object) -> BusyError:
    with pytest.raises(BusyError) as caught:
        await submit(queue, terms, cost=cost, **fields)
    return caught.value


async def drain(queue: Queue, *cost_per_s: float) -> None:
    for number, rate in enumerate(cost_per_s):
        record = encode_record(NodePressure(f"n{number}", drain_cost_per_s=rate))
        await queue.redis.hset(keys.pressure(POOL), f"n{number}", record)


async def test_open_jobs_of_a_tenant_are_capped_and_others_are_not(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(max_open_jobs=2)
    for _ in range(2):
        await submit(queue, terms)
    error = await refusal(queue, terms)
    assert (error.code, error.message) == ("rate_limit_exceeded", "this tenant's limit of 2 open jobs is reached")
    await submit(queue, terms, tenant="other")

    # Running jobs are open too; ended ones are not.
    taken = (await node.take()).jobs
    await refusal(queue, terms)
    await node.finish(next(job for job in taken if job.tenant == "acme"), 0)
    await submit(queue, terms)


async def test_queued_cost_of_a_tenant_is_capped_and_freed_by_take(queue: Queue) -> None:
    node, terms = await queue.node(), Terms(max_queued_cost=250)
    await submit(queue, terms, cost=100)
    await submit(queue, terms, cost=150, priority=Priority.BATCH)
    error = await refusal(queue, terms, cost=1, priority=Priority.INTERACTIVE)
    assert "250 queued KV tokens" in error.message
    await submit(queue, terms, cost=250, tenant="other")

    taken = (await node.take()).jobs
    await submit(queue, terms, cost=250)
    await refusal(queue, terms, cost=1)

    # What comes back is queued again, above the cap if need be: it was accepted.
    await node.give_back(next(job for job in taken if job.tenant == "acme"), cost=80)
    assert await queue.redis.hget(keys.queued(POOL), "acme") == b"330"


async def test_job_above_a_tenants_cap_is_accepted_when_nothing_of_it_waits(queue: Queue) -> None:
    await queue.node()
    assert await submit(queue, Terms(max_queued_cost=50), cost=1000)


async def test_rate_allows_a_burst_and_then_says_when_to_retry(queue: Queue) -> None:
    await queue.node()
    terms = Terms(jobs_per_minute=2, burst_s=150)
    for _ in range(5):
        await submit(queue, terms)
    error = await refusal(queue, terms)
    assert error.code == "rate_limit_exceeded"
    assert "2 jobs per minute" in error.message
    assert error.retry_after_ms == pytest.approx(30_000, abs=TOLERANCE_MS)
    await submit(queue, terms, tenant="other")

    await queue.pass_time("acme", error.retry_after_ms)
    await submit(queue, terms)
    await refusal(queue, terms)


async def test_tokens_are_counted_by_cost_and_the_refused_cost_nothing(queue: Queue) -> None:
    await queue.node()
    terms = Terms(tokens_per_minute=6000, burst_s=10)
    await submit(queue, terms, cost=900)
    first = await refusal(queue, terms, cost=400)
    assert "6000 tokens per minute" in first.message
    assert first.retry_after_ms == pytest.approx(3000, abs=TOLERANCE_MS)
    again = await refusal(queue, terms, cost=400)
    assert again.retry_after_ms == pytest.approx(first.retry_after_ms, abs=TOLERANCE_MS)
    await submit(queue, terms, cost=50)


async def test_tenant_without_debt_may_send_more_than_a_burst(queue: Queue) -> None:
    await queue.node()
    terms = Terms(tokens_per_minute=60, burst_s=10)
    await submit(queue, terms, cost=50_000)
    error = await refusal(queue, terms, cost=1)
    assert error.retry_after_ms == 600_000


async def test_rate_of_a_quiet_tenant_is_forgotten(queue: Queue) -> None:
    await queue.node()
    await submit(queue, Terms(jobs_per_minute=6, tokens_per_minute=600), cost=10)
    life_ms = await queue.redis.pttl(f"{P}:rate:acme")
    assert life_ms == pytest.approx(10_000, abs=TOLERANCE_MS)


@pytest.mark.parametrize(("old", "new", "wait_ms"), [(60, 6000, 1900), (240, 60, 200_000), (60, 60, 200_000)])
async def test_debt_is_the_same_number_of_tokens_at_another_rate(
    queue: Queue, old: int, new: int, wait_ms: int
) -> None:
    await queue.node()
    await submit(queue, Terms(tokens_per_minute=old, burst_s=1), cost=200)
    error = await refusal(queue, Terms(tokens_per_minute=new, burst_s=1), cost=90)
    assert error.retry_after_ms == pytest.approx(wait_ms, abs=TOLERANCE_MS)


async def test_higher_rate_frees_a_tenant_in_debt(queue: Queue) -> None:
    await queue.node()
    await submit(queue, Terms(jobs_per_minute=1, tokens_per_minute=1), cost=1000)
    await refusal(queue, Terms(jobs_per_minute=1, tokens_per_minute=60_000), cost=1)
    await submit(queue, Terms(jobs_per_minute=600, tokens_per_minute=60_000), cost=1)
    await submit(queue, Terms(), cost=1)


async def test_debt_of_tokens_outlives_jobs_that_count_none(queue: Queue) -> None:
    await queue.node()
    await submit(queue, Terms(jobs_per_minute=6000, tokens_per_minute=60), cost=100)
    await submit(queue, Terms(jobs_per_minute=6000), cost=1)
    assert await queue.redis.pttl(f"{P}:rate:acme") == pytest.approx(100_000, abs=TOLERANCE_MS)


async def test_repeated_submit_is_answered_above_every_limit(queue: Queue) -> None:
    await queue.node()
    terms = Terms(max_open_jobs=1, jobs_per_minute=1, tokens_per_minute=1, burst_s=1)
    job = new_job(tenant="acme")
    await queue.producer.submit(Submission(job, 10, terms=terms))
    assert (await queue.producer.submit(Submission(job, 10, terms=terms))).existed


async def test_refusal_says_when_the_nodes_will_have_capacity(queue: Queue) -> None:
    await queue.node(max_queued_cost=1000)
    await drain(queue, 60.0, 40.0)
    await submit(queue, Terms(), cost=1000)

    waits = [(await refusal(queue, Terms(), cost=500, prompt=f"{number}")).retry_after_ms for number in range(4)]

    # 500 tokens at 100 a second take 5 s; a later refusal finds those before it.
    for number, wait_ms in enumerate(waits):
        exact_ms = 5000 * (number + 1)
        assert exact_ms * 0.8 - TOLERANCE_MS <= wait_ms <= exact_ms * 1.2 + 1


async def test_a_refused_body_counts_once_however_many_there_are(queue: Queue) -> None:
    await queue.node(max_queued_cost=1000)
    await drain(queue, 100.0)
    await submit(queue, Terms(), cost=1000)
    for _ in range(3):
        waits = [(await refusal(queue, Terms(), cost=5, prompt=f"{n}")).retry_after_ms for n in range(400)]
    # 2,000 tokens at 100 a second take 20 s, and the spread of retries is a fifth.
    assert max(waits) <= 25_000


async def test_refused_backlog_decays_as_the_nodes_work(queue: Queue) -> None:
    await queue.node(max_queued_cost=1000)
    await drain(queue, 100.0)
    await submit(queue, Terms(), cost=1000)
    await refusal(queue, Terms(), cost=3000)
    at = int(await queue.redis.hget(f"{P}:refused:acme", "at"))
    await queue.redis.hset(f"{P}:refused:acme", "at", at - 40_000)
    assert (await refusal(queue, Terms(), cost=100, prompt="other")).retry_after_ms <= 1200


async def test_batch_is_refused_at_80_percent_and_all_at_90(queue: Queue) -> None:
    await queue.node()
    await queue.redis.set("another", bytes(16 << 20))
    used = (await queue.redis.info("memory"))["used_memory"]
    for share, fine in ((0.95, ()), (0.85, (0, 1)), (0.5, (0, 1, 2))):
        await queue.redis.config_set("maxmemory", int(used / share))
        for priority in Priority:
            if priority in fine:
                await submit(queue, Terms(), priority=priority)
            else:
                error = await refusal(queue, Terms(), priority=priority)
                assert error.code == "redis_full"
                assert f"{80 if priority == Priority.BATCH else 90} %" in error.message


async def test_memory_that_open_jobs_may_still_need_is_kept_for_them(queue: Queue) -> None:
    node = await queue.node()
    used = (await queue.redis.info("memory"))["used_memory"]
    long = SamplingParams(max_tokens=20_000, n=4)
    await queue.redis.config_set("maxmemory", used + 16 * (1 << 20))
    output = estimate_output_bytes(new_job(params=long), 100)
    assert 8 * (1 << 20) < output < 10 * (1 << 20)

    await submit(queue, Terms(memory_percent=90), params=long)
    running = (await node.take()).jobs
    assert (await refusal(queue, Terms(memory_percent=90), params=long)).code == "redis_full"
    await submit(queue, Terms(memory_percent=90))

    for taken in (*running, *(await node.take()).jobs):
        await node.finish(taken, 0)
    assert await queue.redis.exists(f"{P}:reserved") == 0
    await submit(queue, Terms(memory_percent=90), params=long)


async def test_idempotency_key_of_an_open_job_never_ends(queue: Queue) -> None:
    node = await queue.node(idem_ttl_ms=5000)
    job_id = await queue.submit(new_job(idempotency_key="k"))
    (name,) = await queue.keys("idem:*")
    assert await queue.redis.pttl(f"{P}:{name}") == -1
    await node.finish(await node.take_one(), 0)
    assert 0 < await queue.redis.pttl(f"{P}:{name}") <= 5000
    assert await queue.submit(new_job(idempotency_key="k")) == job_id


def check_windows(used: list[tuple[int, int]], burst: int) -> None:
    """Assert that no window has more than the burst and a tenth per ms. `used`: time in ms and amount."""
    for first, (since_ms, _) in enumerate(used):
        for last_ms, _ in used[first:]:
            inside = sum(amount for at_ms, amount in used if since_ms <= at_ms <= last_ms)
            slack_ms = TOLERANCE_MS  # of real time that passes in the test
            assert inside <= burst + (last_ms - since_ms + slack_ms) / 10


async def test_no_window_exceeds_rate_and_burst_and_the_reported_wait_suffices(queue: Queue) -> None:
    await queue.node()
    terms, chance = Terms(tokens_per_minute=6000, burst_s=2), random.Random(5)
    accepted: list[tuple[int, int]] = []
    now_ms = 0
    for _ in range(80):
        amount = chance.randint(1, 200)
        try:
            await submit(queue, terms, cost=amount)
        except BusyError as error:
            # Waits below a second are told as a second, which lets more in than is due.
            waited_ms = error.retry_after_ms
        else:
            accepted.append((now_ms, amount))
            waited_ms = chance.randint(0, 1500)
        await queue.pass_time("acme", waited_ms)
        now_ms += waited_ms
    assert len(accepted) > 40
    check_windows(accepted, 200)


async def test_a_refusal_by_the_pools_limit_says_what_waits_and_for_how_long(queue: Queue) -> None:
    await queue.node(max_queued_cost=500)
    await drain(queue, 10, 40)
    for priority, count in ((Priority.INTERACTIVE, 1), (Priority.STANDARD, 2), (Priority.BATCH, 1)):
        await queue.submit_many(count, priority=priority, tenant="acme")
    error = await refusal(queue, Terms(), cost=200)
    assert error.message == "the pool's limit of 500 queued KV tokens is reached"
    assert (error.num_waiting_ahead, error.estimated_wait_ms) == (3, 1000 * (300 + 200) / 50)


async def test_a_refusal_for_a_rate_counts_the_queue_but_estimates_no_wait(queue: Queue) -> None:
    await queue.node()
    terms = Terms(jobs_per_minute=1, burst_s=1)
    await submit(queue, terms)
    error = await refusal(queue, terms)
    assert (error.num_waiting_ahead, error.estimated_wait_ms) == (1, None)
