"""Deleting a tenant leaves nothing of it in Redis, and all of the others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, Queue, new_job

from penstock.contract.errors import ConflictError
from penstock.contract.tenant import Terms
from penstock.contract.webhook import WebhookEndpoint, WebhookSecrets, new_endpoint_id, new_secret
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.producer import Submission
from penstock.queue.files.file_records import HeldFiles
from penstock.queue.tenants import deletion
from penstock.queue.tenants.deletion import Held, TenantBroker
from penstock.queue.tenants.key_store import KeyStore
from penstock.queue.webhooks.deliveries import EndpointStore
from tests.queue.scripts.test_stored_bytes import end, result_of

READERS = {
    "string": "get",
    "hash": "hgetall",
    "list": "lrange",
    "set": "smembers",
    "zset": "zrange",
    "stream": "xrange",
}


async def everything(queue: Queue) -> dict[str, str]:
    """Return all keys with their content as text."""
    found, redis = {}, cast(Any, queue.redis)
    async for key in redis.scan_iter("*"):
        kind = (await redis.type(key)).decode()
        bounds = (0, -1) if kind in ("list", "zset") else ()
        found[key.decode()] = repr(await getattr(redis, READERS[kind])(key, *bounds))
    return found


async def fill(queue: Queue, tenant: str, node_name: str) -> None:
    """Make jobs of a tenant in many states: two ended ones, one canceled and one scheduled. It gets an API key, too."""
    node = await queue.node(node_name)
    for number in range(2):
        fields = {"idempotency_key": f"key-{number}", "tags": ("night", "x"), "metadata": {"a": "b"}}
        job = new_job(tenant=tenant, prompt=f"of {tenant}", **fields)
        await queue.producer.submit(Submission(job, 10, terms=Terms(tokens_per_minute=10**6, account="k1")))
        taken = await node.take_one()
        await node.emit(taken, 0, 2)
        await end(node, taken, result_of(100_000 * number + 100))
    canceled = await queue.submit(tenant=tenant, tags=("x",))
    await queue.producer.cancel(canceled, tenant)
    await queue.submit(tenant=tenant, not_before_ms=3_600_000)
    await KeyStore(queue.redis).add(tenant, ["infer"], Terms())
    endpoint = WebhookEndpoint(
        id=new_endpoint_id(), tenant=tenant, name="n", url="https://a.example/", event_types=("job.succeeded",)
    )
    await EndpointStore(queue.redis).create(endpoint, WebhookSecrets(secret=new_secret()))


async def test_nothing_of_a_deleted_tenant_is_left_and_all_of_the_others(queue: Queue) -> None:
    await fill(queue, "rival", "n1")
    await fill(queue, "zeta", "n2")
    for tenant in ("rival", "zeta"):
        await queue.submit(tenant=tenant)
    of_rival = {key: text for key, text in (await everything(queue)).items() if "rival" in key}
    broker, deleted = TenantBroker(queue.redis), list[int]()
    held = await broker.data("zeta")
    assert held.num_keys == 1 and held.pools[POOL][:2] == Held(2, 3, 0)[:2]
    assert await broker.delete("zeta", deleted.append) == held
    assert sum(deleted) == 5
    left = await everything(queue)
    # Events name jobs by their ids.
    named = [key for key, text in left.items() if "zeta" in key + text and not key.endswith(":events")]
    assert named == []
    assert {key: left.get(key) for key in of_rival} == of_rival
    # The results of these tests are not what their logs say.
    found = await audit(AdminBroker(queue.redis), POOL)
    assert {finding.name for finding in found} <= {"result_differs"}
    assert await broker.data("zeta") == deletion.TenantData("zeta", 0, 0, 0, HeldFiles(0, 0, 0), {})


async def test_many_ended_jobs_are_deleted_in_parts(queue: Queue) -> None:
    node = await queue.node("n1")
    for _ in range(150):
        await queue.submit(tenant="zeta")
        await end(node, await node.take_one(), result_of(10))
    parts = list[int]()
    await TenantBroker(queue.redis).delete("zeta", parts.append)
    assert parts == [64, 64, 22]
    assert await audit(AdminBroker(queue.redis), POOL) == []


async def test_a_running_job_of_a_node_that_does_not_end_it_is_named(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "CANCEL_S", 0.3)
    node = await queue.node("n1")
    await queue.submit(tenant="zeta")
    taken = await node.take_one()
    broker = TenantBroker(queue.redis)
    with pytest.raises(ConflictError, match="1 jobs of tenant zeta in pool"):
        await broker.delete("zeta")
    deleting = asyncio.create_task(broker.delete("zeta"))
    await end(node, taken, result_of(10))
    await deleting
    assert (await broker.data("zeta")).pools == {}


async def test_the_keys_of_a_deleted_tenant_are_unknown(queue: Queue) -> None:
    store = KeyStore(queue.redis)
    await store.add("zeta", ["infer"], Terms())
    _, of_rival = await store.add("rival", ["infer"], Terms())
    await TenantBroker(queue.redis).delete("zeta")
    assert set(await store.all()) == {of_rival.key_id}
