"""Nodes are killed and start again on their host. A living node is never declared dead."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.work import PROMPT, Work, check_settled, holder, new_work
from redis.asyncio import Redis

from penstock.gpu_node.service import seats
from penstock.gpu_node.service.seats import take_seats
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import AsyncClient
from penstock.queue import keys

POOL = "again"
SILENT_S = 2.5
"""A predecessor's silence before it is declared dead, at the lease that nodes have by default."""
LESS_THAN_A_LEASE_S = 10.0


def node(url: str, **settings: Any) -> NodeProcess:
    """A node with the lease that nodes have by default, 15 s."""
    return NodeProcess(url, name="same", pool=POOL, step_s=0.02, **settings)


@asynccontextmanager
async def stream_of(url: str, num_tokens: int) -> AsyncIterator[tuple[Work, Any]]:
    """Return a job and its chunks."""
    work = new_work(POOL, num_tokens)
    async with AsyncClient(url) as client:
        job = await client.submit(PROMPT, **work.options)
        async with aclosing(job.chunks()) as chunks:
            yield work, chunks


async def read(work: Work, chunks: Any, until: int) -> None:
    while work.num_seen < until:
        work.see_chunk(await anext(chunks))


async def count(redis: Redis, event: str) -> int:
    return int(await cast(Any, redis.hget(keys.counts(POOL), event)) or 0)


async def test_a_restarted_node_continues_its_own_job(redis_url: str, redis: Redis) -> None:
    with node(redis_url) as first:
        async with stream_of(redis_url, 150) as (work, chunks):
            await read(work, chunks, 20)
            first.kill()
            killed_s, seen = time.monotonic(), work.num_seen
            # In the time that Docker or the kubelet needs, and with a model that takes a while to load.
            await asyncio.sleep(0.5)
            with node(redis_url):
                await read(work, chunks, seen + 20)
                assert time.monotonic() - killed_s < LESS_THAN_A_LEASE_S
                await work.read(chunks)
                work.check()
                await check_settled(redis, POOL)
    assert await count(redis, "nodes_lost") == 1


@pytest.mark.slow
async def test_takeover_does_not_wait_until_a_restarted_node_has_loaded_its_model(redis_url: str, redis: Redis) -> None:
    with node(redis_url) as first, NodeProcess(redis_url, name="other", pool=POOL, step_s=0.02) as other:
        async with stream_of(redis_url, 150) as (work, chunks):
            await read(work, chunks, 20)
            by_name = {"same": first, "other": other}
            name = await holder(redis, work.id)
            by_name[name].kill()
            killed_s, seen = time.monotonic(), work.num_seen
            # It looks for its predecessors and never gets to serving.
            environment = {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_NODE_NAME": name, "PENSTOCK_NODE_POOL": POOL}
            loading = await asyncio.to_thread(
                subprocess.Popen, [sys.executable, "-c", LOADING], env=os.environ | environment
            )
            await read(work, chunks, seen + 1)
            assert time.monotonic() - killed_s < LESS_THAN_A_LEASE_S
            loading.kill()
            loading.wait()
            await work.read(chunks)
            work.check()


LOADING = """
import asyncio
from penstock.runtime.settings import RedisSettings
from penstock.gpu_node.service.seats import declare_dead_before_loading, take_seats
from penstock.gpu_node.settings import NodeSettings

async def main():
    settings = NodeSettings.load(model="any", redis_url=RedisSettings.load().redis_url)
    await declare_dead_before_loading(settings, take_seats(settings))
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_two_live_nodes_of_one_name_do_not_declare_each_other_dead(redis_url: str, redis: Redis) -> None:
    with node(redis_url) as first, node(redis_url) as second:
        async with stream_of(redis_url, 150) as (work, chunks):
            await asyncio.wait_for(work.read(chunks), 30)
        work.check()
        assert first.is_running and second.is_running
    assert await count(redis, "nodes_lost") == 0
    assert await count(redis, "fenced") == 0


@pytest.mark.slow
async def test_a_paused_node_is_not_taken_for_dead_before_its_lease(redis_url: str, redis: Redis) -> None:
    with node(redis_url) as first:
        async with stream_of(redis_url, 150) as (work, chunks):
            await read(work, chunks, 20)
            first.signal(signal.SIGSTOP)
            with node(redis_url):
                await asyncio.sleep(SILENT_S + 2)
                first.signal(signal.SIGCONT)
                await work.read(chunks)
            work.check()
    assert await count(redis, "nodes_lost") == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="another network needs root")
@pytest.mark.parametrize("shares_cache", [True, False])
async def test_a_node_of_the_same_name_in_another_container_is_not_taken_for_dead(
    redis_url: str, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares_cache: bool
) -> None:
    with node(redis_url) as first:
        async with stream_of(redis_url, 150) as (work, chunks):
            await read(work, chunks, 20)
            first.signal(signal.SIGSTOP)
            # A network namespace of its own, as each container and each pod has one.
            monkeypatch.setattr(sys, "executable", str(in_own_network(tmp_path)))
            if not shares_cache:
                monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
            with node(redis_url):
                await asyncio.sleep(SILENT_S + 2)
                first.signal(signal.SIGCONT)
                await work.read(chunks)
            work.check()
    assert await count(redis, "nodes_lost") == 0


def in_own_network(folder: Path) -> Path:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec unshare --net {sys.executable} "$@"\n')
    script.chmod(0o700)
    return script


def settings(**given: Any) -> NodeSettings:
    return NodeSettings.load(model="any", redis_url="unix://x", name="same", **given)


def test_seat_file_of_another_host_is_another_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may share the cache folder over a network whose locks reach only one of them."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(seats, "_NETWORK", tmp_path / "none")
    names = []
    for boot_id in ("here", "here", "there", "there", "here"):
        (tmp_path / "boot_id").write_text(f"{boot_id}\n")
        monkeypatch.setattr(seats, "_BOOT_ID", tmp_path / "boot_id")
        taken = take_seats(settings())
        (name,) = taken.names
        names.append(name)
        taken.release()
    first, again, other, other_again, back = names
    assert first == again and other == other_again
    assert len({first, other, back}) == 3


def test_a_node_for_another_pool_or_redis_has_seats_of_its_own() -> None:
    taken = [take_seats(settings(pool=pool)) for pool in ("a", "a", "b")]
    names = [name for one in taken for name in one.names]
    assert len(names) == len(set(names)) == 6
    for one in taken:
        one.release()


def test_a_cache_folder_that_cannot_be_written_costs_only_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "/proc/nothing")
    taken = take_seats(settings(pool="c"))
    assert len(taken.names) == 1
    taken.release()
