"""A node's user of Redis that is confined to pool `a` attacks pool `b`, and stray keys meet all pools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.acl_users import all_rules, confined, serving, url_of
from fakes.queue.harness import CONFIG, FakeNode
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from penstock.contract.errors import NotFoundError
from penstock.contract.job_actions import JobFilter
from penstock.contract.output import Chunk
from penstock.contract.pool import PoolRecord
from penstock.producer.client import AsyncClient
from penstock.producer.client.pool_choice import choose_pool
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.connection import connect
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.node import NodeBroker
from penstock.queue.broker.pools import MAX_POOLS, MAX_SCANNED
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.wire import encode_chunk

VICTIM = PoolRecord("b", "acme/b", aliases=("fast",), max_model_len=2048)
CLAIM = PoolRecord("a", "acme/b", aliases=("b", "fast", "own"), max_model_len=2048, adapters={"sql": "0" * 32})
NUM_JUNK = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with serving(tmp_path_factory.mktemp("keys", numbered=True), all_rules() + confined("node", "a", "node-a")) as at:
        yield at


@pytest.fixture
async def users(server: Path) -> AsyncIterator[dict[str, Redis]]:
    made = {user: connect(url_of(server, user)) for user in ("admin", "gateway", "node", "node-a")}
    for key in [key async for key in made["admin"].scan_iter("penstock:*", count=10_000)]:
        await made["admin"].delete(key)
    yield made
    for one in made.values():
        await one.aclose()


async def joined(redis: Redis, record: PoolRecord) -> NodeBroker:
    broker = NodeBroker(redis, record.pool, f"node-of-{record.pool}", "r1")
    await broker.join(CONFIG, record)
    return broker


async def test_a_confined_node_cannot_claim_names_of_another_pool(users: dict[str, Redis]) -> None:
    await joined(users["node"], VICTIM)
    attacker, gateway = await joined(users["node-a"], CLAIM), ProducerBroker(users["gateway"])
    assert list(await gateway.pools()) == ["b"]

    await AdminBroker(users["admin"]).allow("a", ["own"])
    await attacker.announce(CLAIM)
    pools = (await gateway.pools()).values()
    for name in ("b", "acme/b", "fast"):
        assert {choose_pool(pools, name).pool for _ in range(50)} == {"b"}
    assert {choose_pool(pools, name).pool for name in ("a", "own")} == {"a"}
    with pytest.raises(NotFoundError):
        choose_pool(pools, "sql")

    # A record under its own key that names another pool is no record of that pool.
    await attacker.announce(replace(CLAIM, pool="b"))
    assert list(await gateway.pools()) == ["b"]

    # With the operator's consent, both pools serve one model.
    await attacker.announce(CLAIM)
    await AdminBroker(users["admin"]).allow("a", ["fast", "own"])
    pools = (await gateway.pools()).values()
    assert {choose_pool(pools, "fast").pool for _ in range(100)} == {"a", "b"}


async def test_unconfined_pools_share_a_name_without_an_operator(users: dict[str, Redis]) -> None:
    for record in (VICTIM, replace(CLAIM, aliases=("fast",))):
        await joined(users["node"], record)
    pools = (await ProducerBroker(users["gateway"]).pools()).values()
    assert {choose_pool(pools, "fast").pool for _ in range(100)} == {"a", "b"}


@pytest.mark.parametrize("key", [keys.POOLS, keys.record("b"), keys.API_KEYS])
async def test_a_confined_node_writes_no_shared_key(users: dict[str, Redis], key: str) -> None:
    for command in (("HSET", key, "x", "y"), ("SET", key, "x"), ("DEL", key), ("HGETALL", key)):
        with pytest.raises(ResponseError) as caught:
            await cast(Any, users["node-a"]).execute_command(*command)
        assert isinstance(caught.value, NoPermissionError)


async def test_a_confined_node_neither_hears_nor_speaks_on_inboxes_of_another_pool(
    server: Path, users: dict[str, Redis]
) -> None:
    await joined(users["node"], VICTIM)
    await joined(users["node-a"], replace(CLAIM, aliases=()))
    await AdminBroker(users["admin"]).allow("a", [])
    victim = FakeNode(users["node"], "node-of-b", "r1")
    victim.broker = NodeBroker(users["node"], "b", "node-of-b", "r1")
    async with AsyncClient(url_of(server, "gateway")) as client:
        assert await users["admin"].pubsub_channels("penstock:{*}:inbox:*") == []
        job = await client.submit("hello", model="b", queue_without_node=True)
        own = await client.submit("hello", model="a", queue_without_node=True)
        process = client.servers.directory.inbox.name
        listed = await users["admin"].pubsub_channels("penstock:{*}:inbox:*")
        assert sorted(listed) == [keys.inbox_channel(pool, process).encode() for pool in ("a", "b")]
        forged = encode_chunk(Chunk(job.id, 0, 0, 0, (1,), "forged"))
        for channel in (keys.inbox_channel("b", process), keys.echo_channel(process)):
            for command in (("PUBLISH", channel, forged), ("SUBSCRIBE", channel)):
                with pytest.raises(NoPermissionError):
                    await cast(Any, users["node-a"]).execute_command(*command)
        with pytest.raises(NoPermissionError):
            await cast(Any, users["node-a"]).execute_command("PSUBSCRIBE", "penstock:*")
        # Through its own pool's channel, chunks of another pool's job are refused.
        assert await users["node-a"].publish(keys.inbox_channel("a", process), forged) == 1
        await client.servers.directory.inbox.receive_published()
        assert (client.stats.bad_messages, client.stats.chunks) == (1, 0)
        allowed = encode_chunk(Chunk(own.id, 0, 0, 0, (1,), "ours"))
        assert await users["node-a"].publish(keys.inbox_channel("a", process), allowed) == 1
        await client.servers.directory.inbox.receive_published()
        assert (client.stats.bad_messages, client.stats.chunks) == (1, 1)


async def test_a_hundred_thousand_stray_names_stall_nothing_and_are_removed(users: dict[str, Redis]) -> None:
    node, gateway = await joined(users["node"], VICTIM), ProducerBroker(users["gateway"])
    assert list(await gateway.pools()) == ["b"]
    write = "for at = 0, ARGV[1] - 1 do redis.call('HSET', KEYS[1], 'stray-' .. at, '\\255') end"
    await cast(Any, users["admin"]).eval(write, 1, keys.POOLS, NUM_JUNK)
    lists = JobLists(users["gateway"])
    for read in (gateway.pools, lambda: lists.page(JobFilter()), AdminBroker(users["admin"]).pools):
        begun_s = time.process_time()
        found: Any = await read()
        assert time.process_time() - begun_s < 2
        assert not isinstance(found, (list, dict)) or len(found) <= MAX_POOLS
    assert list(await gateway.pools()) == ["b"]

    # A gateway that starts now goes through the whole list in some reads.
    late = ProducerBroker(users["gateway"])
    reads = [list(await late.pools()) for _ in range(NUM_JUNK // MAX_SCANNED + 2)]
    assert reads[-1] == ["b"]

    while await users["admin"].hlen(keys.POOLS) > MAX_POOLS:
        await node.announce(VICTIM)
    assert list(await ProducerBroker(users["gateway"]).pools()) == ["b"]


@pytest.mark.parametrize("junk", [b"", b"\xff", b"\x80", b"\x81\xa1v\x01"])
async def test_a_damaged_entry_or_record_hides_no_other_pool_and_is_mended_by_its_node(
    users: dict[str, Redis], junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await joined(users["node"], VICTIM)
    mended, gateway = await joined(users["node"], CLAIM), ProducerBroker(users["gateway"])
    await users["admin"].set(keys.record("a"), junk)
    for _ in range(3):
        assert list(await gateway.pools()) == ["b"]
    assert caplog.text.count("unreadable pool record") == 1
    await mended.announce(CLAIM)
    assert sorted(await gateway.pools()) == ["a", "b"]
    await users["admin"].hset(keys.POOLS, "a", junk)
    for _ in range(3):
        assert (await gateway.pools())["a"].aliases == ()
    assert caplog.text.count("unreadable pool entry") == 1
    await mended.announce(CLAIM)
    assert (await gateway.pools())["a"].aliases == CLAIM.aliases


@pytest.mark.parametrize("key", [keys.POOLS, keys.record("b")])
async def test_a_key_of_a_wrong_type_is_mended_by_its_node(users: dict[str, Redis], key: str) -> None:
    node, gateway = await joined(users["node"], VICTIM), ProducerBroker(users["gateway"])
    await users["admin"].delete(key)
    await users["admin"].rpush(key, "stray")
    await gateway.pools()
    await node.announce(VICTIM)
    assert list(await gateway.pools()) == ["b"]


async def test_the_operator_mends_what_no_node_owns(users: dict[str, Redis]) -> None:
    node = await joined(users["node"], CLAIM)
    await node.leave()
    await users["admin"].hset(keys.POOLS, mapping={"a": b"\xff", "gone": b"\xff", "not a name": b"\xff"})
    done = await AdminBroker(users["admin"]).repair()
    assert len(done) == 2
    assert await users["admin"].hkeys(keys.POOLS) == [b"a"]
    assert (await ProducerBroker(users["gateway"]).pools())["a"].aliases == ()
    assert await AdminBroker(users["admin"]).repair() == []
    await users["admin"].set(keys.record("a"), b"\xff")
    assert len(await AdminBroker(users["admin"]).repair()) == 1
    assert await AdminBroker(users["admin"]).repair() == []
