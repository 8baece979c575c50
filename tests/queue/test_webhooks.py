"""The untold ends of the jobs of a pool, and the deliveries that come of them: bounded, leased and told once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, TENANT, FakeNode, P, Queue
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, UnavailableError
from penstock.contract.output import Outcome
from penstock.contract.webhook import EVENT_TYPES, MAX_ENDPOINTS, WebhookEndpoint, WebhookSecrets, new_secret
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.webhooks import deliveries
from penstock.queue.webhooks.deliveries import DeliveryQueue, EndpointStore, TakenDelivery, WebhookEvent

LEASE_MS = 60_000


def endpoint_of(number: int, tenant: str = TENANT, **fields: Any) -> WebhookEndpoint:
    known = {"name": "a test", "url": "https://hook.example/", "event_types": EVENT_TYPES}
    return WebhookEndpoint.model_validate({"id": f"we_{number:016x}", "tenant": tenant, **known, **fields})


async def create(redis: Redis, number: int = 1, **fields: Any) -> WebhookEndpoint:
    endpoint = endpoint_of(number, **fields)
    await EndpointStore(redis).create(endpoint, WebhookSecrets(secret=new_secret()))
    return endpoint


def event(number: int, *endpoints: WebhookEndpoint, tenant: str = TENANT) -> WebhookEvent:
    return WebhookEvent("job.failed", f"{POOL}.job-{number}", tenant, 1, tuple(one.id for one in endpoints))


async def record(redis: Redis, count: int, *endpoints: WebhookEndpoint) -> None:
    for number in range(count):
        await DeliveryQueue(redis).record(event(number, *endpoints))


async def take(redis: Redis, most: int = 64, of_endpoint: int = 64, lease_ms: int = LEASE_MS) -> list[TakenDelivery]:
    return await DeliveryQueue(redis).take(most, of_endpoint, lease_ms)


async def pass_ms(redis: Redis, endpoint: WebhookEndpoint, ms: int) -> None:
    """Let this time pass for the deliveries of an endpoint."""
    await redis.zincrby(f"{keys.WEBHOOKS}:next", -ms, endpoint.id)
    for name in (keys.webhook_list("due", endpoint.id), keys.webhook_list("leased", endpoint.id)):
        for one in cast(list[bytes], await redis.zrange(name, 0, -1)):
            await redis.zincrby(name, -ms, one)


async def test_every_end_of_a_job_is_noted_in_the_step_that_ends_it(queue: Queue) -> None:
    endpoint, node = await create(queue.redis), await queue.node(max_losses=1)
    named: dict[str, Any] = {"webhooks": (endpoint.id,)}
    await queue.running(node)
    succeeded = await queue.running(node, **named)
    for _ in range(2):
        assert await node.finish(succeeded, 0, 1) == "OK"
    cancelled = await queue.submit(**named)
    await queue.producer.cancel(cancelled, TENANT)
    failed = await queue.running(node, **named)
    await node.finish(failed, 0, 1, outcome=Outcome("failed", "model_error"))
    expired = await queue.submit(deadline_ms=1000, **named)
    await queue.redis.zadd(f"{P}:deadlines", {expired: 1})
    await queue.change(expired, deadline=1)
    await queue.sweep()
    dead = await queue.running(node, **named)
    await queue.kill(node)

    assert await queue.redis.hgetall(f"{P}:untold_sizes") == {TENANT.encode(): b"5"}
    assert await DeliveryQueue(queue.redis).collect([POOL, "another"]) == 5
    assert not await queue.redis.exists(f"{P}:untold_sizes")
    assert await DeliveryQueue(queue.redis).collect([POOL]) == 0
    taken = await take(queue.redis)
    assert {one.object_id: one.type for one in taken} == {
        succeeded.job_id: "job.succeeded",
        cancelled: "job.cancelled",
        failed.job_id: "job.failed",
        expired: "job.expired",
        dead.job_id: "job.dead",
    }
    assert len({one.event_id for one in taken}) == 5
    assert await queue.redis.hgetall(f"{keys.WEBHOOKS}:pending") == {TENANT.encode(): b"5"}


async def test_job_that_names_no_endpoint_costs_no_command(queue: Queue) -> None:
    endpoint, node = await create(queue.redis), await queue.node()

    async def calls_of(**fields: Any) -> dict[str, int]:
        await queue.redis.config_resetstat()
        taken = await queue.running(node, **fields)
        await node.finish(taken, 0, 1)
        stats = await queue.redis.info("commandstats")
        return {name: one["calls"] for name, one in stats.items()}

    await calls_of()
    plain, named = await calls_of(), await calls_of(webhooks=(endpoint.id,))
    assert not await queue.redis.exists(f"{P}:job:x")
    more = {name: number - plain.get(name, 0) for name, number in named.items() if number != plain.get(name, 0)}
    assert more == {"cmdstat_xadd": 1, "cmdstat_hincrby": 1, "cmdstat_hget": 1}


async def test_death_between_recording_and_removing_an_end_delivers_it_once(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, node = await create(queue.redis), await queue.node()
    taken = await queue.running(node, webhooks=(endpoint.id,))
    await node.finish(taken, 0, 1)
    original = scripts.call

    async def dying(redis: Redis, name: str, *arguments: Any) -> Any:
        if name == "untold":
            raise UnavailableError("killed", code="killed")
        return await original(redis, name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(scripts, "call", dying)
        with pytest.raises(UnavailableError):
            await DeliveryQueue(queue.redis).collect([POOL])
    (first,) = await take(queue.redis)
    assert await DeliveryQueue(queue.redis).end_attempt(first, "delivered", "status 200")
    assert await DeliveryQueue(queue.redis).collect([POOL]) == 1
    assert await take(queue.redis) == []
    assert not await queue.redis.exists(f"{keys.WEBHOOKS}:pending")


async def test_full_or_damaged_list_of_untold_ends_keeps_no_job_from_ending(queue: Queue) -> None:
    endpoint, node = await create(queue.redis), await queue.node()
    await queue.redis.hset(f"{P}:untold_sizes", mapping={TENANT: 100_000})
    await end(queue, node, endpoint)
    assert not await queue.redis.exists(f"{P}:untold")
    assert await queue.redis.hget(f"{P}:counts", "webhooks_dropped") == b"1"
    await end(queue, node, endpoint, tenant="another")
    assert await queue.redis.xlen(f"{P}:untold") == 1
    for key in (f"{P}:untold", f"{P}:untold_sizes"):
        await queue.redis.delete(key)
        await queue.redis.set(key, "damaged")
        await end(queue, node, endpoint)
    assert await DeliveryQueue(queue.redis).collect([POOL]) == 0


async def end(queue: Queue, node: FakeNode, endpoint: WebhookEndpoint, **fields: Any) -> None:
    taken = await queue.running(node, webhooks=(endpoint.id,), **fields)
    assert await node.finish(taken, 0, 1) == "OK"
    assert (await queue.record(taken.job_id))["state"] == "succeeded"


async def test_event_goes_to_subscribed_endpoints_of_its_tenant(redis: Redis) -> None:
    mine = await create(redis, 1)
    other = await create(redis, 2, event_types=("batch.completed",))
    foreign = await create(redis, 3, tenant="rival")
    await record(redis, 1, mine, other, foreign, endpoint_of(9))
    assert [one.endpoint for one in await take(redis)] == [mine]


async def test_endpoint_has_few_deliveries_at_a_time_and_hinders_no_other(redis: Redis) -> None:
    slow, quick = await create(redis, 1), await create(redis, 2)
    await record(redis, 12, slow)
    await DeliveryQueue(redis).record(event(99, quick))
    first = await take(redis, of_endpoint=4)
    assert [one.endpoint.id for one in first].count(slow.id) == 4
    assert [one.endpoint.id for one in first].count(quick.id) == 1
    assert await take(redis, of_endpoint=4) == []
    assert await DeliveryQueue(redis).end_attempt(first[0], "delivered", "status 200")
    assert [one.endpoint.id for one in await take(redis, of_endpoint=4)] == [slow.id]


async def test_tenant_whose_receivers_hang_leaves_deliveries_to_others(redis: Redis) -> None:
    hanging = [await create(redis, number, tenant="hanging") for number in range(MAX_ENDPOINTS)]
    for at, endpoint in enumerate(hanging):
        for number in range(4):
            await DeliveryQueue(redis).record(event(10 * at + number, endpoint, tenant="hanging"))
    await record(redis, 1, await create(redis, MAX_ENDPOINTS))
    await asyncio.sleep(0.005)
    # Of a process that makes as many as it may for that tenant. One call looks at 64 endpoints.
    queue = DeliveryQueue(redis)
    found = list[str]()
    for _ in range(2):
        more = await queue.take(32, 2, LEASE_MS, most_of_tenant=32, num_of_tenant={"hanging": 32})
        found += [one.endpoint.tenant for one in more]
    assert found == [TENANT]
    assert len(await queue.take(64, 2, LEASE_MS, most_of_tenant=32)) == 32


async def test_delivery_of_a_dead_process_is_made_by_another_one(redis: Redis) -> None:
    endpoint = await create(redis)
    await record(redis, 1, endpoint)
    (dead,) = await take(redis)
    assert await take(redis) == []
    await pass_ms(redis, endpoint, LEASE_MS)
    (other,) = await take(redis)
    assert (other.event_id, other.attempts) == (dead.event_id, 2)
    queue = DeliveryQueue(redis)
    assert not await queue.end_attempt(dead, "dead", "too late")
    assert await queue.end_attempt(other, "retry", "status 500", LEASE_MS)
    assert not await queue.end_attempt(other, "dead", "a second end")
    assert await take(redis) == []
    await pass_ms(redis, endpoint, LEASE_MS)
    (again,) = await take(redis)
    assert await queue.end_attempt(again, "delivered", "status 200")
    shown = await queue.get(endpoint.id, again.event_id)
    assert (shown.state, shown.attempts, shown.answer, shown.next_ms) == ("delivered", 3, "status 200", 0)
    assert (await queue.stats()).counts == {"delivered": 1, "retried": 1}


async def test_pending_deliveries_of_a_tenant_are_bounded(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MAX_PENDING_OF_TENANT", 2)
    mine, foreign = await create(redis, 1), await create(redis, 2, tenant="rival")
    await record(redis, 3, mine)
    await DeliveryQueue(redis).record(event(0, foreign, tenant="rival"))
    assert len(await take(redis)) == 3
    (dead,) = (await DeliveryQueue(redis).page(mine.id, "dead", None, 10)).deliveries
    assert dead.answer == "the tenant has too many pending deliveries"
    assert await DeliveryQueue(redis).again(mine.id, [dead.event_id]) == 1
    assert [one.event_id for one in await take(redis)] == [dead.event_id]


async def test_pages_of_deliveries(redis: Redis) -> None:
    endpoint, queue = await create(redis), DeliveryQueue(redis)
    await record(redis, 5, endpoint)
    for taken in await take(redis):
        await queue.end_attempt(taken, "dead", "status 500")
    seen, after = list[str](), None
    while True:
        page = await queue.page(endpoint.id, "dead", after, 2)
        seen += [one.event_id for one in page.deliveries]
        if (after := page.next_after) is None:
            break
    assert len(seen) == len(set(seen)) == 5


async def test_deliveries_of_a_deleted_endpoint_are_dropped(redis: Redis) -> None:
    endpoint, store = await create(redis), EndpointStore(redis)
    await record(redis, 3, endpoint)
    (first, second, _) = await take(redis)
    await DeliveryQueue(redis).end_attempt(first, "dead", "status 500")
    await store.delete(endpoint.id, TENANT)
    assert not await DeliveryQueue(redis).end_attempt(second, "delivered", "status 200")
    left = [key async for key in redis.scan_iter("penstock:webhook*")]
    assert {key.decode().rpartition(":")[2] for key in left} == {"counts"}
    assert not await DeliveryQueue(redis).has_endpoints()


async def test_ends_of_one_tenant_are_dropped(queue: Queue) -> None:
    endpoint, node = await create(queue.redis), await queue.node()
    for number in range(deliveries.UNTOLD_PAGE + 2):
        await end(queue, node, endpoint, tenant=("zeta", TENANT)[number % 2])
    await DeliveryQueue(queue.redis).drop_ends("zeta", POOL)
    left = deliveries.UNTOLD_PAGE // 2 + 1
    assert await queue.redis.hgetall(f"{P}:untold_sizes") == {TENANT.encode(): str(left).encode()}
    assert await queue.redis.xlen(f"{P}:untold") == left


async def test_a_tenant_has_few_endpoints(redis: Redis) -> None:
    for number in range(MAX_ENDPOINTS):
        await create(redis, number)
    with pytest.raises(ConflictError, match="limit"):
        await create(redis, MAX_ENDPOINTS)
    assert await redis.hlen(keys.WEBHOOK_SECRETS) == MAX_ENDPOINTS
    await create(redis, MAX_ENDPOINTS, tenant="rival")
    assert len(await EndpointStore(redis).of(TENANT)) == MAX_ENDPOINTS
