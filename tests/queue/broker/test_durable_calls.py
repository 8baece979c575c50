"""Submissions with the durability `fsync`: answered once Redis says that its disk has the job, or refused.

Which command confirms it depends on the server of these tests: WAITAOF since Redis 8.0 (PENSTOCK_REDIS_SERVER or PATH
name such a server). On older servers, and on Valkey, whose WAITAOF answers too early, it is `appendfsync always`.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.queue.harness import FakeNode, new_job
from faults.tools.redis_process import RedisProcess

from penstock.contract.durability import FSYNC
from penstock.contract.errors import BusyError, NotOnDiskError, UnavailableError, UnsupportedDurabilityError
from penstock.contract.job import JobDef
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.queue import keys
from penstock.queue.broker import durable_calls
from penstock.queue.broker.connection import Patience, connect
from penstock.queue.broker.durable_calls import MAX_ROUNDS, DurableCalls
from penstock.queue.broker.producer import ProducerBroker, Submission, Submitted
from penstock.runtime.embedded_redis import ServerVersion, find_redis_server

QUICK_S = 0.4
"""The time-out of a confirmation in these tests."""


class Durable:
    """A broker and a server with an append-only file."""

    def __init__(self, server: RedisProcess) -> None:
        self.server = server
        self.redis = connect(server.url)
        self.patience = Patience(10.0)
        self.patience.is_open = True
        self.broker = ProducerBroker(self.redis, self.patience)

    async def submit(self, job: JobDef | None = None, *, terms: Terms = UNLIMITED) -> Submitted:
        return await self.broker.submit(Submission(job or new_job(), 10, terms=terms, durability=FSYNC))

    async def set(self, **settings: str) -> None:
        for name, value in settings.items():
            await self.redis.config_set(name, value)

    async def num_jobs(self) -> int:
        return len(await self.redis.keys(keys.job("*").replace("{}", "{*}")))


@pytest.fixture
async def durable(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start a server with these settings, and join a node to it."""
    async with AsyncExitStack() as opened:

        async def start(**settings: Any) -> Durable:
            server = opened.enter_context(RedisProcess(tmp_path / "redis", **settings))
            one = Durable(server)
            opened.push_async_callback(one.redis.aclose)
            opened.push_async_callback(one.broker.close)
            node = FakeNode(one.redis, "n1", "r1")
            await node.join()
            await node.heartbeat([])
            return one

        yield start


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB as the folder of the server."""
    folder = tmp_path / "redis"
    folder.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder))
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a small disk: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def confirms_by_waitaof() -> bool:
    version = ServerVersion.of(find_redis_server())
    return version.server == "redis" and version.major >= 8


@pytest.fixture
def has_waitaof() -> None:
    """Skip a test of WAITAOF where the server does not know it, or answers it too early."""
    if not confirms_by_waitaof():
        pytest.skip("no WAITAOF that can be believed: this is no Redis 8.0 or later")


@pytest.fixture
def lacks_waitaof() -> None:
    """Skip a test of other servers."""
    if confirms_by_waitaof():
        pytest.skip("the WAITAOF of this Redis can be believed")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time-out of a confirmation."""
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", QUICK_S)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what waits for a confirmation wait for as long as a test lasts."""
    monkeypatch.setattr(durable_calls, "CONFIRM_TIMEOUT_S", 60.0)


@asynccontextmanager
async def still_waiting(*calls: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Start calls, and yield their tasks while they wait."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in tasks)
    yield tasks


# What a server can promise.


async def test_with_appendfsync_always_a_job_and_its_repetition_are_accepted(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="always")
    job = new_job()
    assert not (await one.submit(job)).existed
    assert (await one.submit(job)).existed
    await one.redis.script_flush()
    assert not (await one.submit()).existed


async def test_without_an_append_only_file_it_is_refused_and_nothing_is_queued(durable: Callable[..., Any]) -> None:
    one = await durable(appendonly="no")
    with pytest.raises(UnsupportedDurabilityError, match=r"with appendonly no.*set `appendonly yes`") as caught:
        await one.submit()
    assert (caught.value.param, caught.value.status) == ("durability", 400)
    assert await one.num_jobs() == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"appendfsync": "everysec"}, r"(Redis|Valkey) \d[\d.]+ with appendonly yes, appendfsync everysec; .*8\.0"),
        (
            {"appendfsync": "always", "no-appendfsync-on-rewrite": "yes"},
            "no-appendfsync-on-rewrite yes; .*and `no-appendfsync-on-rewrite no`",
        ),
    ],
)
@pytest.mark.usefixtures("lacks_waitaof")
async def test_before_redis_8_and_on_valkey_every_other_setting_is_refused(
    durable: Callable[..., Any], settings: dict[str, str], said: str
) -> None:
    one = await durable(**settings)
    with pytest.raises(UnsupportedDurabilityError, match=said):
        await one.submit()
    assert await one.num_jobs() == 0


async def test_a_user_without_the_right_is_told_the_rule(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="always")
    taken = ("-waitaof", "-config") if confirms_by_waitaof() else ("-config",)
    await one.redis.execute_command("ACL", "SETUSER", "gate", "on", ">gate", "~*", "&*", "+@all", *taken)
    other = connect(one.server.url_of("gate"))
    rule = r"\+waitaof" if confirms_by_waitaof() else r"appendonly yes, appendfsync unknown; .*\+config\|get"
    broker = ProducerBroker(other)
    with pytest.raises(UnsupportedDurabilityError, match=rule):
        await broker.submit(Submission(new_job(), 10, durability=FSYNC))
    await broker.close()
    await other.aclose()


@pytest.mark.usefixtures("quick")
async def test_settings_that_change_under_an_open_connection_break_no_promise(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="always")
    await one.submit()
    await one.set(**({"appendonly": "no"} if confirms_by_waitaof() else {"appendfsync": "everysec"}))
    job = new_job()
    with pytest.raises(NotOnDiskError, match=f"job {job.id} is queued, but") as caught:
        await one.submit(job)
    assert caught.value.job_id == job.id
    with pytest.raises(UnsupportedDurabilityError):
        await one.submit(job)
    assert await one.num_jobs() == 2


# The wait. `appendfsync no` holds the fsync of Redis, and `everysec` lets it go on.


@pytest.mark.usefixtures("has_waitaof", "patient")
async def test_the_answer_comes_with_the_fsync_and_that_of_memory_before_it(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    async with still_waiting(one.submit()) as (task,):
        assert await one.num_jobs() == 1
        async with asyncio.timeout(30):
            await one.broker.submit(Submission(new_job(), 10))
        await one.set(appendfsync="everysec")
    assert (await task).state == "queued"


@pytest.mark.usefixtures("has_waitaof")
async def test_each_of_two_submissions_in_a_second_has_an_fsync_of_its_own(durable: Callable[..., Any]) -> None:
    """Redis 7.4 and Valkey 8 answer the second WAITAOF at once, although `everysec` has not synced since."""
    one = await durable(appendfsync="everysec")
    await one.submit()
    await one.submit()
    started_s = time.monotonic()
    await one.submit()
    assert time.monotonic() - started_s > 0.5


@pytest.mark.usefixtures("has_waitaof")
async def test_a_repetition_waits_for_the_first_ones_write(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    job = new_job(idempotency_key="k")
    await one.broker.submit(Submission(job, 10))
    again = job.model_copy(update={"id": new_job().id})
    async with still_waiting(one.submit(job), one.submit(again)) as tasks:
        await one.set(appendfsync="everysec")
    answers = [await task for task in tasks]
    assert [(answer.job_id, answer.existed) for answer in answers] == [(job.id, True)] * 2


@pytest.mark.usefixtures("has_waitaof", "quick")
async def test_a_disk_that_does_not_confirm_is_told_with_the_jobs_id(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    job = new_job()
    for _ in range(2):
        started_s = time.monotonic()
        with pytest.raises(NotOnDiskError, match=f"job {job.id} is queued, but .*same id or idempotency key") as caught:
            await one.submit(job)
        assert time.monotonic() - started_s >= QUICK_S
        assert (caught.value.job_id, caught.value.code, caught.value.status) == (job.id, "not_on_disk", 503)
    assert await one.num_jobs() == 1
    await one.set(appendfsync="always")
    assert (await one.submit(job)).existed


@pytest.mark.usefixtures("has_waitaof", "quick")
async def test_a_full_disk_confirms_nothing_until_there_is_room(small_disk: Path, durable: Callable[..., Any]) -> None:
    one, job, filler = await durable(appendfsync="everysec"), new_job(prompt="x" * 5000), small_disk / "filler"
    await one.broker.submit(Submission(new_job(), 10))
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(NotOnDiskError):
        await one.submit(job)
    filler.unlink()
    for _ in range(20):
        with contextlib.suppress(NotOnDiskError):
            assert (await one.submit(job)).existed
            return
    raise AssertionError("the disk has space, and confirms nothing")


@pytest.mark.usefixtures("has_waitaof")
async def test_a_lost_connection_repeats_the_submission_and_waits_again(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    job = new_job()
    async with still_waiting(one.submit(job)) as (task,):
        blocked = [client["id"] for client in await one.redis.client_list() if "waitaof" in str(client["cmd"])]
        assert len(blocked) == 1
        await one.redis.client_kill_filter(_id=blocked[0])
        await asyncio.sleep(0.3)
        assert not task.done()
        await one.set(appendfsync="everysec")
    assert (await task).job_id == job.id
    assert await one.num_jobs() == 1


@pytest.mark.usefixtures("has_waitaof")
async def test_a_server_that_becomes_a_replica_confirms_nothing(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    async with still_waiting(one.submit()) as (task,):
        await one.redis.replicaof("127.0.0.1", "1")
        await asyncio.sleep(0.3)
        assert not task.done()
        await one.redis.replicaof("NO", "ONE")
        await one.set(appendfsync="everysec")
    assert (await task).state == "queued"


@pytest.mark.usefixtures("has_waitaof", "patient")
async def test_calls_share_rounds_and_a_refusal_waits_for_no_disk(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    before = (await one.redis.info("clients"))["connected_clients"]
    async with still_waiting(*(one.submit() for _ in range(3 * MAX_ROUNDS))) as tasks:
        clients = (await one.redis.info("clients"))["connected_clients"]
        assert clients == before + 1, "calls of one moment share a round"
        with pytest.raises(BusyError):
            async with asyncio.timeout(30):
                await one.submit(terms=Terms(max_open_jobs=1))
        later = [asyncio.create_task(one.submit()) for _ in range(5)]
        await asyncio.sleep(0.3)
        assert (await one.redis.info("clients"))["connected_clients"] <= before + 4
        await one.set(appendfsync="everysec")
    assert {(await task).state for task in [*tasks, *later]} == {"queued"}


async def test_checks_of_one_moment_share_one_connection(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="always")
    calls = DurableCalls(one.redis, one.patience, FSYNC)
    before = (await one.redis.info("clients"))["connected_clients"]
    await asyncio.gather(*(calls.check() for _ in range(20)))
    assert (await one.redis.info("clients"))["connected_clients"] == before + 1
    leaver, stayer = asyncio.create_task(calls.check()), asyncio.create_task(calls.check())
    await asyncio.sleep(0)
    leaver.cancel()
    await stayer
    await calls.close()
    with pytest.raises(UnavailableError, match="the client was closed"):
        await calls.check()


@pytest.mark.usefixtures("has_waitaof")
async def test_closing_ends_the_wait(durable: Callable[..., Any]) -> None:
    one = await durable(appendfsync="no")
    async with still_waiting(one.submit()) as (task,):
        await one.broker.close()
    with pytest.raises(UnavailableError, match="the client was closed"):
        await task
    with pytest.raises(UnavailableError, match="the client was closed"):
        await one.submit()
