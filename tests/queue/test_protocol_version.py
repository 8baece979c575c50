"""Pools of another protocol version: processes refuse them by name, and write nothing to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from fakes.other_version import OTHER, REFUSAL, join_as_other_version, make_pool_of_other_version
from fakes.queue.harness import CONFIG, POOL, RECORD, P, Queue, new_job

from penstock.contract.errors import ProtocolVersionError
from penstock.contract.pool import NodePressure
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.producer import Submission
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.tenants.deletion import TenantBroker

MODEL = "acme/other"
refused = pytest.raises(ProtocolVersionError, match=REFUSAL.format(pool=POOL))


def node_of(queue: Queue) -> NodeBroker:
    return NodeBroker(queue.redis, POOL, "n1", "r1")


async def send_heartbeat(queue: Queue) -> Any:
    return await node_of(queue).heartbeat(NodePressure("n1"), free=1, answered_call=0, held=None)


CALLS: dict[str, Callable[[Queue, str], Awaitable[Any]]] = {
    "join": lambda queue, _: node_of(queue).join(cast(Any, CONFIG), RECORD),
    "heartbeat": lambda queue, _: send_heartbeat(queue),
    "sweep": lambda queue, _: queue.run_sweep(),
    "submit": lambda queue, _: queue.producer.submit(Submission(new_job(), 1)),
    "attach": lambda queue, job_id: queue.producer.attach(job_id, "default", inbox="me"),
    "cancel": lambda queue, job_id: queue.producer.cancel(job_id, "default"),
    "status": lambda queue, job_id: queue.producer.status(job_id, "default"),
    "result": lambda queue, job_id: queue.producer.result(job_id, "default"),
    "forget": lambda queue, _: AdminBroker(queue.redis).forget(POOL),
    "erase": lambda queue, _: TenantBroker(queue.redis).data("default"),
    "audit": lambda queue, _: audit(AdminBroker(queue.redis), POOL, repair=True),
}


async def contents(queue: Queue) -> dict[str, bytes]:
    return {key.decode(): cast(bytes, await queue.redis.dump(key)) async for key in queue.redis.scan_iter("*")}


@pytest.mark.parametrize("call", CALLS)
async def test_another_version_is_refused_with_both_versions_and_left_unchanged(queue: Queue, call: str) -> None:
    job_id = await make_pool_of_other_version(queue.redis, POOL, MODEL)
    before = await contents(queue)
    with refused:
        await CALLS[call](queue, job_id)
    assert await contents(queue) == before


async def test_a_pool_of_another_version_is_listed_with_its_version_and_not_alive(queue: Queue) -> None:
    await make_pool_of_other_version(queue.redis, POOL, MODEL)
    (pool,) = (await queue.producer.pools()).values()
    assert (pool.model, pool.protocol_version, pool.is_alive) == (MODEL, OTHER, False)


@pytest.mark.parametrize("call", ["join", "heartbeat", "sweep", "submit"])
async def test_a_later_pool_is_refused_with_both_versions(queue: Queue, call: str) -> None:
    await queue.node()
    await cast(Any, queue.redis.hset(f"{P}:config", "version", 5))
    with pytest.raises(ProtocolVersionError, match="version 5, and this release has version 1"):
        await CALLS[call](queue, "")


async def test_a_node_writes_the_version_that_python_names(queue: Queue) -> None:
    await queue.node()
    assert await cast(Any, queue.redis.hget(f"{P}:config", "version")) == b"%d" % PROTOCOL_VERSION


async def test_a_pool_that_another_version_took_over_is_refused(queue: Queue) -> None:
    node = await queue.node()
    await node.broker.leave()
    await join_as_other_version(queue.redis, POOL)
    with refused:
        await queue.node("n2")


async def test_a_forgotten_pool_may_have_any_version(queue: Queue) -> None:
    node = await queue.node()
    await node.broker.leave()
    await AdminBroker(queue.redis).forget(POOL)
    assert not await cast(Any, queue.redis.exists(f"{P}:config"))
