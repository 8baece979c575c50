"""The audit names each disagreement, repairs it while processes run, and reports nothing if all keys agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from fakes.queue.harness import POOL, FakeNode, P, Queue, chunks_of, new_id, new_job
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, NotFoundError
from penstock.contract.job import Priority
from penstock.contract.output import Choice, Chunk, Outcome, TokenLogprobs, Usage
from penstock.contract.pool import NodePressure
from penstock.queue import keys, results, wire
from penstock.queue.broker.admin import AdminBroker, JobHistory, Sum
from penstock.queue.broker.audit import Finding, audit, findings_of
from penstock.queue.broker.node import Emission
from penstock.queue.wire import encode_chunk

DONE = Outcome("succeeded")
Damage = Callable[["Scene"], Awaitable[object]]


class Scene:
    """A pool with a job in each state: queued, given back, running, done."""

    def __init__(self, queue: Queue, node: FakeNode) -> None:
        self.queue, self.redis, self.node = queue, queue.redis, node
        self.queued = self.back = self.running = self.done = ""

    async def fill(self) -> Scene:
        taken = await self.queue.running(self.node, tenant="acme", priority=Priority.BATCH)
        await self.node.give_back(taken)
        self.back = taken.job_id
        ending = await self.queue.running(self.node)
        await finish(self.node, ending.job_id, ending.lease, 3)
        self.done = ending.job_id
        running = await self.queue.running(self.node, tenant="other")
        await self.node.emit(running, 0, 2)
        self.running = running.job_id
        self.queued = await self.queue.submit(tenant="acme", deadline_ms=60_000, cost=70)
        await self.node.heartbeat([self.running])
        return self


async def finish(node: FakeNode, job_id: str, lease: str, count: int) -> None:
    """End a job with a result that agrees with its log."""
    chunks = chunks_of(job_id, 0, count)
    text, tokens = "".join(f"t{i} " for i in range(count)), tuple(100 + i for i in range(count))
    cuts = [(0, 1, len(f"t{i} ")) for i in range(count)]
    result = results.encode_result((Choice(0, text, tokens, None),), Usage(1, count), cuts)
    assert await node.broker.finish(Emission(job_id, lease, 0, chunks), DONE, result) == "OK"


@pytest.fixture
async def scene(queue: Queue) -> Scene:
    return await Scene(queue, await queue.node()).fill()


@pytest.fixture
def broker(redis: Redis) -> AdminBroker:
    return AdminBroker(redis)


async def test_pool_in_order_has_no_findings_and_repair_changes_nothing(scene: Scene, broker: AdminBroker) -> None:
    assert await audit(broker, POOL) == []
    before = {name: await scene.redis.dump(f"{P}:{name}") for name in await scene.queue.keys()}
    assert await audit(broker, POOL, repair=True) == []
    after = {name: await scene.redis.dump(f"{P}:{name}") for name in await scene.queue.keys()}
    assert {**before, "audit": b""} == {**after, "audit": b""}


async def test_unknown_pool_is_not_found(broker: AdminBroker) -> None:
    with pytest.raises(NotFoundError):
        await audit(broker, "nowhere")


MENDED: dict[str, tuple[Damage, str, str]] = {
    "queued job is not in the index": (lambda s: s.redis.zrem(f"{P}:waiting:1", s.queued), "missing", "waiting:1"),
    "queued job is not in its stream": (lambda s: s.redis.delete(f"{P}:queue:1:acme"), "missing", "queue:1:acme"),
    "queued job is not among the due": (lambda s: s.redis.delete(f"{P}:deadlines"), "missing", "deadlines"),
    "returned job is not among those": (lambda s: s.redis.delete(f"{P}:requeued:2:acme"), "missing", "requeued:2:acme"),
    "running job is in no node's set": (lambda s: s.redis.delete(f"{P}:running:n1"), "missing", "running:n1"),
    "open job does not count as open": (lambda s: s.redis.srem(f"{P}:open", s.running), "missing", "open"),
    "open job is not its tenant's": (
        lambda s: s.redis.srem(f"{P}:tenant:acme:open", s.queued),
        "missing",
        "tenant:acme:open",
    ),
    "running job is queued": (lambda s: s.redis.zadd(f"{P}:waiting:1", {s.running: 5}), "stray", "waiting:1"),
    "running job stands in a stream": (
        lambda s: s.redis.xadd(f"{P}:queue:1:x", {"id": s.running}),
        "stray",
        "queue:1:x",
    ),
    "queued job stands there twice": (
        lambda s: s.redis.xadd(f"{P}:queue:1:acme", {"id": s.queued}),
        "stray",
        "queue:1:acme",
    ),
    "ended job counts as open": (lambda s: s.redis.sadd(f"{P}:open", s.done), "stray", "open"),
    "unknown job runs": (lambda s: s.redis.sadd(f"{P}:running:n1", new_id()), "stray", "running:n1"),
    "age is not the record's": (lambda s: s.redis.zadd(f"{P}:waiting:1", {s.queued: 5}), "wrong_score", "waiting:1"),
    "tenant has no turn": (lambda s: s.redis.zrem(f"{P}:virtual_time:1", "acme"), "missing", "virtual_time:1"),
    "tenant has a turn and no job": (
        lambda s: s.redis.zadd(f"{P}:virtual_time:0", {"acme": 1}),
        "stray",
        "virtual_time:0",
    ),
    "backlog is too large": (lambda s: s.redis.hincrby(f"{P}:backlog", "1", 30), "wrong_sum", "backlog"),
    "backlog is gone": (lambda s: s.redis.delete(f"{P}:backlog"), "wrong_sum", "backlog"),
    "tenant's queued cost is wrong": (lambda s: s.redis.hincrby(f"{P}:queued", "acme", 3), "wrong_sum", "queued"),
    "reserved bytes are wrong": (lambda s: s.redis.hincrby(f"{P}:reserved", "acme", 7), "wrong_sum", "reserved"),
    "key of an open job goes away": (lambda s: s.redis.set(f"{P}:idem:acme:x", s.queued, 9), "would_vanish", "idem"),
    "key of an ended job stays": (lambda s: s.redis.set(f"{P}:idem:acme:x", s.done), "lives_for_ever", "idem"),
    "open job's record goes away": (lambda s: s.redis.pexpire(keys.job(s.queued), 60_000), "would_vanish", "job"),
    "ended job's log stays": (lambda s: s.redis.persist(keys.log(s.done)), "lives_for_ever", "log"),
    "request of no job stays": (lambda s: s.redis.set(keys.request(new_id()), "x"), "lives_for_ever", "request"),
    "request of an open job is lost": (lambda s: s.redis.delete(keys.request(s.queued)), "no_request", "request"),
    "running job's node is unknown": (lambda s: s.redis.zrem(f"{P}:nodes", "n1"), "stranded", "running:n1"),
    "bell of no node is rung": (lambda s: s.redis.zadd(f"{P}:free", {"ghost": 10**9}), "stray", "free"),
    "pressure of no node": (lambda s: s.redis.hset(f"{P}:pressure", "ghost", pressure("ghost")), "stray", "pressure"),
}


def pressure(node: str, **fields: int) -> bytes:
    return wire.encode_record(NodePressure(node, **fields))


@pytest.mark.parametrize("damage", MENDED)
async def test_damage_is_named_and_repaired(scene: Scene, broker: AdminBroker, damage: str) -> None:
    harm, name, key = MENDED[damage]
    await harm(scene)

    found = await audit(broker, POOL)
    assert (name, key) in {(f.name, f.key if ":" in key or f.key == key else f.key.partition(":")[0]) for f in found}
    assert await audit(broker, POOL) == found

    assert await audit(broker, POOL, repair=True)
    assert await audit(broker, POOL) == []


REPORTED: dict[str, tuple[Damage, str]] = {
    "log says nothing of the end": (lambda s: s.redis.rpop(keys.log(s.done)), "no_terminal_chunk"),
    "log says that an open job ended": (
        lambda s: s.redis.rpush(
            keys.log(s.running), b"\x84\xa1v\x01\xa1j\xa1x\xa1i\x02\xa1e\x81\xa5state\xa9succeeded"
        ),
        "end_of_open_job",
    ),
    "record counts other chunks": (lambda s: s.redis.hset(keys.job(s.done), "chunks", "9"), "wrong_count"),
    "done without a result": (lambda s: s.redis.delete(keys.result(s.done)), "no_result"),
    "token twice": (lambda s: s.redis.rpush(keys.log(s.running), *chunks_of(s.running, 1, 1)), "not_contiguous"),
    "chunk of another job": (lambda s: s.redis.rpush(keys.log(s.running), *chunks_of(s.queued, 2, 1)), "wrong_job"),
    "log is no log": (lambda s: s.redis.rpush(keys.log(s.running), b"\xc1"), "unreadable"),
    "result says something else": (
        lambda s: s.redis.set(keys.result(s.done), results.encode_result((), Usage(1, 1), []), keepttl=True),
        "result_differs",
    ),
    "node lost without losses": (lambda s: s.queue.change(s.done, code="node_lost"), "not_lost"),
    "idle node holds blocks": (
        lambda s: s.redis.hset(f"{P}:pressure", "n1", pressure("n1", kv_blocks_total=9, kv_blocks_free=8)),
        "blocks_held",
    ),
}


@pytest.mark.parametrize("damage", REPORTED)
async def test_faults_in_logs_and_nodes_are_reported_and_not_repaired(
    scene: Scene, broker: AdminBroker, damage: str
) -> None:
    harm, name = REPORTED[damage]
    await harm(scene)
    for repair in (False, True):
        found = await audit(broker, POOL, repair=repair)
        assert name in {finding.name for finding in found}


async def test_repaired_jobs_run_to_their_end(scene: Scene, broker: AdminBroker) -> None:
    for index in (
        "waiting:1",
        "waiting:2",
        "requeued:2:acme",
        "queue:1:acme",
        "running:n1",
        "open",
        "backlog",
        "virtual_time:1",
        "nodes",
    ):
        await scene.redis.delete(f"{P}:{index}")
    await audit(broker, POOL, repair=True)

    late = await scene.queue.node("n2")
    taken = {job.job_id: job for job in (await late.take()).jobs}

    assert set(taken) == {scene.queued, scene.back, scene.running}
    assert await late.emit(taken[scene.running], 2) == "OK"


async def test_job_without_a_request_ends_with_a_terminal_record(scene: Scene, broker: AdminBroker) -> None:
    await scene.redis.delete(keys.request(scene.queued))
    await audit(broker, POOL, repair=True)
    status = await scene.queue.producer.status(scene.queued, "acme")
    assert status.outcome is not None
    assert (status.outcome.state, status.outcome.code) == ("failed", "internal_error")


async def test_only_one_audit_repairs_at_a_time(scene: Scene, broker: AdminBroker) -> None:
    await broker.check(POOL, repairer="one")
    with pytest.raises(BusyError):
        await broker.check(POOL, repairer="two")
    await broker.check(POOL, sums=(), repairer="one")
    await broker.check(POOL, sums=(), repairer="two")
    assert await audit(broker, POOL) == []


async def test_audits_beside_busy_nodes_find_and_change_nothing(queue: Queue, broker: AdminBroker) -> None:
    nodes = [await queue.node(f"n{number}", avoid_ms=0) for number in range(2)]
    busy, returned = True, set[str]()

    async def submit() -> None:
        for number in range(150):
            await queue.submit(tenant=f"t{number % 3}", priority=Priority(number % 3), cost=10 + number)

    async def work(node: FakeNode) -> None:
        while busy or (await node.take(slots=0)).depth != (0,) * 6:
            for place, taken in enumerate((await node.take(slots=4)).jobs):
                if place % 3 == 0 and taken.job_id not in returned:
                    returned.add(taken.job_id)
                    assert await node.give_back(taken, cost=5 + place) == "OK"
                else:
                    await node.emit(taken, 0)
                    await finish(node, taken.job_id, taken.lease, 1)

    async def look() -> list[Finding]:
        found = []
        while busy:
            found += await audit(broker, POOL, repair=True)
        return found

    async def produce() -> None:
        nonlocal busy
        await submit()
        busy = False

    found, *_ = await asyncio.gather(look(), produce(), *map(work, nodes))
    assert found == []
    assert await audit(broker, POOL) == []
    assert returned
    assert await queue.ids("open") == set()


async def test_jobs_of_equal_size_that_move_between_reads_are_no_finding(queue: Queue, broker: AdminBroker) -> None:
    node = await queue.node()
    running = [await queue.running(node, tenant="acme") for _ in range(3)]

    class MovingBroker(AdminBroker):
        """A pool in which one running job is given back after each read of the sums."""

        async def _sums(self, pool: str) -> tuple[Counter[Sum], list[str], list[str], list[str], list[str]]:
            sums = await super()._sums(pool)
            assert await node.give_back(running.pop()) == "OK"
            return sums

    assert await audit(MovingBroker(queue.redis), POOL, repair=True) == []
    assert len(running) == 1
    assert await audit(broker, POOL) == []


def test_log_of_two_choices_is_in_order_each_by_itself() -> None:
    job = new_job()
    said = [
        Chunk(job.id, 0, 0, 0, (1, 2), "a"),
        Chunk(job.id, 1, 1, 0, (3,), "b", "stop"),
        Chunk(job.id, 2, 0, 2, (4,), "", "length", Usage(1, 4)),
    ]
    log = [encode_chunk(chunk) for chunk in said]
    assert findings_of(JobHistory(job.id, None, tuple(log), None)) == []
    late = encode_chunk(Chunk(job.id, 3, 1, 1, (5,)))
    assert [f.name for f in findings_of(JobHistory(job.id, None, (*log, late), None))] == ["behind_the_end"]


def test_logprobs_of_a_result_agree_with_the_log() -> None:
    job, prompt, said = new_job(), TokenLogprobs((5, 6), (-0.5, -1.0), (b"p", b"q")), (-0.25, -2.0)
    likely = TokenLogprobs((1, 2), said, (b"a", b"b"))
    log = [
        encode_chunk(Chunk(job.id, 0, prompt_logprobs=(prompt,))),
        encode_chunk(Chunk(job.id, 1, 0, 0, (1,), "a", "stop", Usage(1, 1), logprobs=(likely,))),
    ]

    def found(told: TokenLogprobs, of_prompt: tuple[TokenLogprobs, ...]) -> list[str]:
        choice = Choice(0, "a", (1,), "stop", (told,))
        result = results.encode_result((choice,), Usage(1, 1), [(0, 0, 0), (0, 1, 1)], of_prompt)
        return [f.detail for f in findings_of(JobHistory(job.id, Outcome("succeeded"), tuple(log), result))]

    assert found(likely, (prompt,)) == []
    assert found(TokenLogprobs((1, 2), (-0.25, -3.0), (b"a", b"b")), (prompt,)) == ["choice 0 differs"]
    assert found(likely, ()) == ["the prompt's log-probabilities differ"]


async def test_swept_and_expired_jobs_leave_nothing_to_find(queue: Queue, broker: AdminBroker) -> None:
    node = await queue.node()
    await queue.running(node)
    await queue.submit(deadline_ms=1)
    await queue.kill(node)
    while await queue.ids("deadlines"):
        await queue.sweep()
    assert await audit(broker, POOL) == []
