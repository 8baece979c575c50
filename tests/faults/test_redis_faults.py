"""Redis is killed, loses data, is full, hangs, refuses calls, loses answers: every stream equals the reference.

Unless a test names another level, jobs have the durability `memory`: an accepted job survives the death of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.queue.harness import FakeNode, new_job
from fakes.waiting import until
from faults.tools.proxy import CUT_REPLY, LOST_CALL, LOST_REPLY, Fault, FaultProxy, Rule
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.road import POOL, QUICK, SCRIPTS, STEP_S, all_ended, new_works, read, served, under_way, walk
from faults.tools.work import PROMPT, check_logs, check_settled, new_work
from redis.asyncio import Redis

from penstock.contract.errors import BusyError, NotOnDiskError
from penstock.contract.job import Durability
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect
from penstock.queue.broker.producer import ProducerBroker, Submission


@asynccontextmanager
async def proxied(server: RedisProcess) -> AsyncIterator[tuple[FaultProxy, Redis]]:
    """Yield a proxy before a server, and a direct connection to the server."""
    async with aclosing(connect(server.url)) as direct, FaultProxy(server.address) as proxy:
        yield proxy, direct


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis") as server:
        yield server


def once_each(fault: Fault) -> tuple[Rule, set[str]]:
    """Return a rule that applies a fault to the first call of every script, and the set of those scripts."""
    met: set[str] = set()

    def rule(name: str, count: int) -> Fault | None:
        if name not in SCRIPTS or name in met:
            return None
        met.add(name)
        return fault

    return rule, met


ERRORS = (
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-READONLY You can't write against a read only replica.\r\n",
    b"-NOSCRIPT No matching script. Please use EVAL.\r\n",
    b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
    b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.\r\n",
)
FAULTS = {
    "call lost": LOST_CALL,
    "reply lost": LOST_REPLY,
    "reply cut": CUT_REPLY,
    **{error[1:].split()[0].decode(): Fault(is_sent=False, answer=error) for error in ERRORS},
}

QUICK_FAULTS = ("reply lost", "READONLY", "NOSCRIPT")


def slow(value: object) -> object:
    """Mark as slow: only `make check-full` runs it."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("fault", [*QUICK_FAULTS, *(slow(fault) for fault in FAULTS if fault not in QUICK_FAULTS)])
async def test_one_fault_in_each_script_loses_no_job(server: RedisProcess, fault: str) -> None:
    async with proxied(server) as (proxy, direct):
        proxy.rule, met = once_each(FAULTS[fault])
        await walk(direct, proxy.url)
        assert met == set(SCRIPTS)


class Death:
    """Kill Redis before or after one call in the proxy is served, and start it again."""

    def __init__(self, server: RedisProcess, script: str, when: str) -> None:
        self._server, self._script = server, script
        self.fault = (
            Fault(before=self._die, is_sent=False, share=0.0) if when == "before" else Fault(after=self._die, share=0.0)
        )
        self.restart: asyncio.Task[object] | None = None

    def rule(self, name: str, count: int) -> Fault | None:
        """Apply the fault to the script's first call."""
        return self.fault if name == self._script and self.restart is None else None

    async def _die(self) -> None:
        self._server.kill()
        self.restart = asyncio.create_task(asyncio.to_thread(self._server.start))


QUICK_DEATHS = (("before", "emit"), ("after", "finish"), ("after", "submit"))
DEATHS = tuple((when, script) for when in ("before", "after") for script in SCRIPTS)


async def kill_redis_at(server: RedisProcess, when: str, script: str) -> None:
    async with proxied(server) as (proxy, direct):
        death = Death(server, script, when)
        proxy.rule = death.rule
        await walk(direct, proxy.url)
        assert death.restart is not None and death.restart.done()


@pytest.mark.parametrize(("when", "script"), QUICK_DEATHS)
async def test_redis_may_be_killed_at_any_call(server: RedisProcess, when: str, script: str) -> None:
    await kill_redis_at(server, when, script)


@pytest.mark.slow
@pytest.mark.parametrize("fsync", ["everysec", "always"])
@pytest.mark.parametrize(("when", "script"), DEATHS)
async def test_redis_may_be_killed_at_every_call(tmp_path: Path, when: str, script: str, fsync: str) -> None:
    with RedisProcess(tmp_path / "redis", appendfsync=fsync) as server:
        await kill_redis_at(server, when, script)


@pytest.mark.parametrize("call", ["submit", "confirmation"])
@pytest.mark.parametrize("fault", [*QUICK_FAULTS, *(slow(fault) for fault in FAULTS if fault not in QUICK_FAULTS)])
async def test_one_fault_of_a_submission_that_waits_for_the_disk_loses_no_job(
    tmp_path: Path, fault: str, call: str
) -> None:
    """The level is `fsync`: neither the fault of the script nor that of its confirmation answers too early."""
    names = ("submit",) if call == "submit" else ("waitaof", "config")
    met: list[str] = []

    def rule(name: str, count: int) -> Fault | None:
        if met or name not in names:
            return None
        met.append(name)
        return FAULTS[fault]

    with RedisProcess(tmp_path / "redis", appendfsync="always") as server:
        async with (
            proxied(server) as (proxy, direct),
            served(proxy.url),
            AsyncClient(proxy.url, settings=QUICK) as client,
        ):
            first, work = (new_work(POOL, 20, durability="fsync") for _ in range(2))
            await first.read((await client.submit(PROMPT, **first.options)).chunks())
            proxy.rule = rule
            if call == "confirmation" and fault == "NOSCRIPT":
                # No server answers WAITAOF so. It says nothing of the disk.
                with pytest.raises(NotOnDiskError):
                    await client.submit(PROMPT, **work.options)
            await work.read((await client.submit(PROMPT, **work.options)).chunks())
            work.check()
            assert met
            await check_logs(direct, [first, work])


@pytest.mark.parametrize("durability", ["memory", "fsync"])
async def test_an_accepted_job_survives_the_kill_of_redis_right_after_its_answer(
    tmp_path: Path, durability: Durability
) -> None:
    """Both levels hold here: the kernel has what Redis wrote. Only the end of the machine tells them apart.

    So tests/queue/broker/test_durable_calls.py holds the fsync instead: `fsync` waits for it, `memory` does not.
    """
    with RedisProcess(tmp_path / "redis", appendfsync="always" if durability == "fsync" else "everysec") as server:
        redis = connect(server.url)
        node, broker = FakeNode(redis, "n1", "r1"), ProducerBroker(redis)
        await node.join()
        jobs = [new_job(durability=durability) for _ in range(20)]
        await asyncio.gather(*(broker.submit(Submission(job, 10, durability=durability)) for job in jobs))
        # While an fsync runs, Redis holds back what it writes to the file, for up to 2 s.
        await until(lambda: redis.info("persistence"), lambda seen: not int(seen["aof_buffer_length"]), within_s=30)
        server.kill()
        await asyncio.to_thread(server.start)
        assert {(await broker.status(job.id, "default")).state for job in jobs} == {"queued"}
        await broker.close()
        await redis.aclose()


Trouble = Callable[[RedisProcess, FaultProxy], Awaitable[None]]


async def is_restarted(server: RedisProcess, proxy: FaultProxy) -> None:
    server.stop()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(server.start)


async def is_held_up_for_longer_than_a_lease(server: RedisProcess, proxy: FaultProxy) -> None:
    server.pause()
    await asyncio.sleep(4.5)
    server.resume()


async def is_cut_off_again_and_again(server: RedisProcess, proxy: FaultProxy) -> None:
    for _ in range(8):
        proxy.cut()
        await asyncio.sleep(0.15)


async def is_slow(server: RedisProcess, proxy: FaultProxy) -> None:
    proxy.delay_s = 0.1
    await asyncio.sleep(1.5)
    proxy.delay_s = 0.0


async def is_in_a_black_hole(server: RedisProcess, proxy: FaultProxy) -> None:
    proxy.set_black_hole(on=True)
    await asyncio.sleep(2)
    proxy.set_black_hole(on=False)


async def forgets_all_it_knew_of_scripts(server: RedisProcess, proxy: FaultProxy) -> None:
    with server.client() as client:
        client.script_flush()


FEWER_TOKENS = 60
"""Than any of 150-token jobs has at its end."""
QUICK_TROUBLES: tuple[Trouble, ...] = (is_restarted, is_cut_off_again_and_again)
SLOW_TROUBLES: tuple[Trouble, ...] = (
    *(is_held_up_for_longer_than_a_lease, is_slow, is_in_a_black_hole, forgets_all_it_knew_of_scripts),
)


@pytest.mark.parametrize("trouble", [*QUICK_TROUBLES, *map(slow, SLOW_TROUBLES)], ids=lambda it: it.__name__)
async def test_streams_stay_whole_during_an_outage_of_redis(server: RedisProcess, trouble: Trouble) -> None:
    async with proxied(server) as (proxy, direct):
        works = new_works(150)
        async with served(proxy.url), AsyncClient(proxy.url, settings=QUICK) as client:
            reading = await under_way(client, works, works[0])
            later = new_works(150)
            troubled = asyncio.create_task(trouble(server, proxy))
            reading += [asyncio.create_task(read(client, work)) for work in later]
            await asyncio.gather(troubled, *reading)
            await all_ended(direct, [*works, *later])
        await check_settled(direct, POOL)


async def test_streams_stay_whole_though_redis_is_set_back(server: RedisProcess) -> None:
    """Half of the jobs are unknown to Redis then. One that had ended, and been read, would stay unknown."""
    engine = ReferenceEngine(step_s=STEP_S)
    engine.holds_at = FEWER_TOKENS
    async with proxied(server) as (proxy, direct):
        works, later = new_works(150), new_works(150)
        async with served(proxy.url, engine), AsyncClient(proxy.url, settings=QUICK) as client:
            reading = await under_way(client, works, works[0])
            log = server.copy_log()
            reading += await under_way(client, later, *later)
            server.kill()
            await asyncio.to_thread(server.restart_from, log)
            engine.holds_at = None
            await asyncio.gather(*reading)
            await all_ended(direct, [*works, *later])
        await check_settled(direct, POOL)


async def test_a_full_redis_refuses_new_jobs_and_serves_the_others(server: RedisProcess) -> None:
    async with proxied(server) as (proxy, direct):
        works = new_works(100)
        async with served(proxy.url), AsyncClient(proxy.url) as client:
            reading = await under_way(client, works, works[-1])
            await direct.config_set("maxmemory", 1)
            with pytest.raises(BusyError) as refused:
                await client.submit(PROMPT, **new_work(POOL, 10).options)
            assert refused.value.code == "redis_full"
            await asyncio.gather(*reading)
            await direct.config_set("maxmemory", 0)
            later = new_works(10)
            await asyncio.gather(*(read(client, work) for work in later))
            await all_ended(direct, [*works, *later])
        await check_settled(direct, POOL)


async def test_a_master_is_made_a_replica_and_keeps_its_clients(tmp_path: Path) -> None:
    first = RedisProcess(tmp_path / "first", port=free_port())
    with first, RedisProcess(tmp_path / "second", port=free_port(), replicaof=("127.0.0.1", first.port)) as second:
        async with proxied(first) as (proxy, _):
            works = new_works(150)
            async with served(proxy.url), AsyncClient(proxy.url, settings=QUICK) as client:
                reading = await under_way(client, works, works[0])
                promoted = connect(second.url)
                await until(lambda: promoted.info("replication"), lambda seen: seen["master_link_status"] == "up")
                with first.client() as demoting:
                    await promoted.replicaof("NO", "ONE")
                    demoting.replicaof("127.0.0.1", str(second.port))
                proxy.target = second.address
                await asyncio.gather(*reading)
                await all_ended(promoted, works)
            await check_settled(promoted, POOL)
            await promoted.aclose()
