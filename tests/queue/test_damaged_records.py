"""What damaged records of jobs and nodes do to the others: they hide themselves, and end no list and no script."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fakes.queue.harness import LEASE_MS, POOL, P, Queue, ids_of, new_job

from penstock.contract.errors import NotFoundError
from penstock.contract.job_actions import JobFilter
from penstock.queue import keys
from penstock.queue.broker.job_lists import DeadLetters, JobLists
from penstock.queue.broker.producer import Submission

DAMAGED = [{"priority": "x"}, {"past_leases": "junk"}, {"used": "1 x"}, {"submitted": b"\xff"}, {"tenant": ""}]


@pytest.mark.parametrize("fields", DAMAGED, ids=str)
async def test_a_damaged_job_hides_one_entry_of_a_list(queue: Queue, fields: dict[str, Any]) -> None:
    await queue.node()
    whole, damaged, other = [await queue.submit() for _ in range(3)]
    await cast(Any, queue.redis).hset(keys.job(damaged), mapping=fields)
    listed = {job.job_id for job in (await JobLists(queue.redis).page(JobFilter("default"))).jobs}
    assert {whole, other} <= listed
    await queue.redis.delete(keys.job(damaged))
    await queue.redis.set(keys.job(damaged), "junk")
    listed = {job.job_id for job in (await JobLists(queue.redis).page(JobFilter("default"))).jobs}
    assert listed == {whole, other}


async def test_a_damaged_dead_letter_hides_one_entry_of_a_list(queue: Queue) -> None:
    await queue.node("watcher")
    jobs = list[str]()
    for names in ("abc", "def"):
        jobs.append(await queue.submit())
        for name in names:
            node = await queue.node(name)
            await node.take_one()
            await queue.kill(node)
    dead = await DeadLetters(queue.redis).newest(POOL)
    assert {letter.job_id for letter in dead} == set(jobs)
    await queue.redis.hset(keys.job(jobs[0]), "cost", "junk")
    assert [letter.job_id for letter in await DeadLetters(queue.redis).newest(POOL)] == [jobs[1]]


@pytest.mark.parametrize("missing", ["cost", "submitted", "losses", "priority", "lease", "tenant", "bytes", "n"])
async def test_a_damaged_job_ends_neither_take_nor_sweep_for_others(queue: Queue, missing: str) -> None:
    node = await queue.node()
    damaged = await queue.running(node)
    waiting = await queue.submit()
    await queue.redis.hdel(keys.job(damaged.job_id), missing)
    await queue.kill(node)
    second = await queue.node("n2")
    await queue.redis.hdel(keys.job(damaged.job_id), missing)
    await second.heartbeat([])
    assert waiting in {taken.job_id for taken in (await second.take()).jobs}


async def test_a_damaged_pressure_record_ends_no_admission(queue: Queue) -> None:
    node = await queue.node()
    await node.heartbeat([])
    await queue.redis.hset(keys.pressure(POOL), "n1", b"\xff")
    assert (await queue.producer.pressure(POOL)).nodes == ()
    await node.heartbeat([])
    assert len((await queue.producer.pressure(POOL)).nodes) == 1
    await queue.producer.submit(Submission(new_job(), 1))


async def counts(queue: Queue) -> dict[str, int]:
    found = await cast(Any, queue.redis).hgetall(keys.counts(POOL))
    return {name.decode(): int(count) for name, count in found.items()}


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
@pytest.mark.parametrize("state", ["queued", "running", "delayed"])
@pytest.mark.parametrize("value", ["junk", None])
async def test_a_job_whose_record_is_lost_ends_failed(queue: Queue, state: str, policy: str, value: str | None) -> None:
    node, other = await queue.node(policy=policy), await queue.node("n2", policy=policy)
    lost = await queue.submit(tenant="a", not_before_ms=60_000 if state == "delayed" else None)
    if state == "running":
        assert (await node.take_one()).job_id == lost
    if state == "delayed":
        await queue.delay(lost, await queue.now_ms() - 1000)
    await queue.redis.delete(keys.job(lost))
    if value is not None:
        await queue.redis.set(keys.job(lost), value)
        with pytest.raises(NotFoundError):
            await queue.producer.status(lost, "a")
    waiting = await queue.submit(tenant="b")
    await queue.note_sweep(0)
    assert ids_of(await other.take()) == [waiting]
    await node.heartbeat([])
    status = await queue.producer.status(lost, "a")
    assert status.outcome is not None and (status.outcome.state, status.outcome.code) == ("failed", "internal_error")
    assert status.outcome.message == "its record in Redis was lost or damaged"
    assert (await counts(queue))["unknown_sums"] == 1
    assert not {lost} & (await queue.ids("open") | await queue.ids("waiting:1") | await queue.ids("running:n1"))


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf", "1e300", "1" + 30 * "0"])
@pytest.mark.parametrize("field", ["cost", "submitted", "losses", "deadline", "n", "level", "entry", "state", "weight"])
async def test_a_damaged_field_is_mended_and_its_job_runs(queue: Queue, field: str, value: str) -> None:
    node = await queue.node(policy="fair")
    deadline_ms = 60_000
    damaged, other = await queue.submit(tenant="a", deadline_ms=deadline_ms), await queue.submit(tenant="b")
    before = await queue.record(damaged)
    await queue.change(damaged, **{field: value})
    assert (await queue.producer.status(damaged, "a")).state == "queued"
    taken = {job.job_id: job for job in (await node.take()).jobs}
    assert taken.keys() == {damaged, other}
    assert 0 < taken[damaged].deadline_in_ms <= deadline_ms and taken[damaged].waited_ms < LEASE_MS
    assert {name: (await queue.record(damaged))[name] for name in ("level", "tenant", "submitted", "deadline")} == {
        name: before[name] for name in ("level", "tenant", "submitted", "deadline")
    }
    for job in taken.values():
        assert await node.finish(job, 0, 1, kv_token_ms=5) == "OK"
    later = await queue.submit(tenant="b")
    assert ids_of(await node.take()) == [later]
    assert (await counts(queue)).get("unknown_sums", 0) == (field == "cost")


async def test_an_ended_job_in_a_queue_is_not_taken_again(queue: Queue) -> None:
    node = await queue.node(policy="fair")
    ended = await queue.submit(tenant="a")
    await queue.change(ended, state="succeeded")
    waiting = await queue.submit(tenant="a")
    assert ids_of(await node.take()) == [waiting]
    assert await queue.ids("waiting:1") == set() and not await queue.keys("queue:*")


_JUNK = b"\xc1 junk"
_OF_THE_POOL: dict[str, tuple[Any, ...]] = {
    "a pause": ("HSET", f"{P}:paused", _JUNK, "1"),
    "the last take": ("SET", f"{P}:last_take:n1", _JUNK),
    "a member of the expiry": ("ZADD", f"{P}:expiry", 1, _JUNK),
    "a lane": ("ZADD", f"{P}:delayed", 1, _JUNK),
    "a sum": ("HSET", f"{P}:backlog", "1", "nan"),
    "an infinite sum": ("HSET", f"{P}:reserved", "a", "inf"),
    "a virtual time": ("ZADD", f"{P}:virtual_time:1", "inf", "a"),
    "a virtual clock": ("SET", f"{P}:virtual_clock:1", "nan"),
    "the lease": ("HSET", f"{P}:config", "lease_ms", "nan"),
    "a limit": ("HDEL", f"{P}:config", "max_losses"),
    "the policy": ("HSET", f"{P}:config", "policy", "x"),
    "the clock": ("HSET", f"{P}:config", "ahead_ms", "inf"),
}


@pytest.mark.parametrize("name", _OF_THE_POOL)
async def test_a_damaged_key_of_the_pool_stops_no_script(queue: Queue, name: str) -> None:
    node, other = await queue.node(policy="fair"), await queue.node("n2", policy="fair")
    running = await queue.running(node, tenant="c")
    waiting = [await queue.submit(tenant=tenant) for tenant in "ab"]
    await cast(Any, queue.redis).execute_command(*_OF_THE_POOL[name])
    node.call = 0
    taken = [*ids_of(await other.take()), *ids_of(await node.take())]
    assert set(taken) >= set(waiting) and len(taken) == len(set(taken))
    assert await node.emit(running, 0) == "OK"
    assert await node.finish(running, 1, kv_token_ms=5) == "OK"
    await node.heartbeat([])
    await other.heartbeat(taken)
    later = await queue.submit(tenant="d")
    assert (await queue.sweep())[0] == "OK"
    config = await cast(Any, queue.redis).hgetall(keys.config(POOL))
    assert (config[b"lease_ms"], config[b"max_losses"], config[b"policy"]) == (b"%d" % LEASE_MS, b"3", b"fair")
    tenants = await cast(Any, queue.redis).zrange(f"{P}:virtual_time:1", 0, -1, withscores=True)
    assert tenants and all(score < 1e24 for _, score in tenants)
    assert ids_of(await node.take()) == [later]


@pytest.mark.parametrize(
    ("field", "value"), [("lease_ms", "inf"), ("avoid_ms", ""), ("policy", "nan"), ("version", "x")]
)
async def test_a_damaged_config_is_written_again_by_a_heartbeat(queue: Queue, field: str, value: str) -> None:
    node, other = await queue.node(), await queue.node("n2")
    config = await cast(Any, queue.redis).hgetall(keys.config(POOL))
    await cast(Any, queue.redis).hset(keys.config(POOL), field, value)
    await other.take()
    await node.heartbeat([])
    assert await cast(Any, queue.redis).hgetall(keys.config(POOL)) == config


@pytest.mark.parametrize("reserved", ["junk", f"isolated {10**14}", "isolated " + 31 * "9"])
async def test_a_damaged_reservation_holds_no_job_back(queue: Queue, reserved: str) -> None:
    node = await queue.node()
    running = await queue.running(node)
    isolated = await queue.submit()
    await queue.change(isolated, losses=2)
    await cast(Any, queue.redis).hset(f"{P}:reservations", "n9", reserved)
    assert not (await node.take()).jobs
    assert (await cast(Any, queue.redis).hget(f"{P}:reservations", "n1")).startswith(b"isolated ")
    assert await node.finish(running, 0) == "OK"
    assert ids_of(await node.take()) == [isolated]
