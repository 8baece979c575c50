"""One fetch at a time, shared by all callers."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from penstock.contract.errors import UnavailableError
from penstock.contract.pool import NodePressure, PoolPressure
from penstock.producer.client.pools import RENEWED_S, CachedState, PoolAdmission


class Fetch:
    """Counts its calls; answers when the gate is open."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num_calls += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.num_calls


async def test_concurrent_callers_share_one_fetch() -> None:
    fetch = Fetch()
    copy = CachedState(fetch, ttl_s=60)
    asking = [asyncio.create_task(copy.get()) for _ in range(10)]
    await asyncio.sleep(0)
    fetch.gate.set()
    assert await asyncio.gather(*asking) == [1] * 10
    assert await copy.get() == 1


async def test_a_copy_is_fetched_again_when_it_is_old() -> None:
    fetch = Fetch()
    fetch.gate.set()
    copy = CachedState(fetch, ttl_s=0.01)
    assert await copy.get() == 1
    await asyncio.sleep(0.02)
    assert await copy.get() == 2


async def test_renewed_copy_was_fetched_after_the_call() -> None:
    fetch = Fetch()
    copy = CachedState(fetch, ttl_s=60)
    early = asyncio.create_task(copy.get())
    await asyncio.sleep(0)
    late = [asyncio.create_task(copy.renewed()) for _ in range(10)]
    await asyncio.sleep(0)
    fetch.gate.set()
    assert await early == 1
    assert await asyncio.gather(*late) == [2] * 10, "one more fetch, for all who asked while the first was under way"
    assert await copy.get() == 2


async def test_renewals_start_apart_for_any_number_of_callers() -> None:
    clock = asyncio.get_running_loop().time
    begun: list[float] = []

    async def fetch() -> None:
        begun.append(clock())

    copy = CachedState(fetch, ttl_s=60)

    async def ask() -> None:
        for _ in range(3):
            await copy.renewed()

    await asyncio.gather(*(ask() for _ in range(20)))
    assert len(begun) >= 3
    assert min(after - before for before, after in pairwise(begun)) >= RENEWED_S - 1e-3


async def test_failed_fetch_fails_only_for_the_callers_that_waited() -> None:
    fetch = Fetch()
    fetch.error = UnavailableError("away")
    copy = CachedState(fetch, ttl_s=60)
    asking = [asyncio.create_task(copy.get()) for _ in range(5)]
    await asyncio.sleep(0)
    fetch.gate.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(answer) for answer in answers] == [UnavailableError] * 5
    assert fetch.num_calls == 1
    fetch.error = None
    assert await copy.get() == 2


async def test_canceled_caller_leaves_the_fetch_to_the_next() -> None:
    fetch = Fetch()
    copy = CachedState(fetch, ttl_s=60)
    first, second = asyncio.create_task(copy.get()), asyncio.create_task(copy.get())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    fetch.gate.set()
    assert await second == 2
    assert first.cancelled()


async def test_old_copy_is_returned_at_once_and_fetched_in_the_background() -> None:
    fetch = Fetch()
    fetch.gate.set()
    copy = CachedState(fetch, ttl_s=0.01, stale_s=60)
    assert await copy.recent() == 1
    await asyncio.sleep(0.02)
    fetch.gate.clear()
    assert [await copy.recent() for _ in range(3)] == [1, 1, 1]
    waiting = asyncio.create_task(copy.get())
    await asyncio.sleep(0)
    fetch.gate.set()
    assert await waiting == 2, "who wants it as of now waits for the one fetch"
    assert await copy.recent() == 2
    await copy.close()


async def test_a_copy_that_is_too_old_is_waited_for() -> None:
    fetch = Fetch()
    fetch.gate.set()
    copy = CachedState(fetch, ttl_s=0.005, stale_s=0.005)
    assert await copy.recent() == 1
    await asyncio.sleep(0.02)
    assert await copy.recent() == 2


async def test_old_copy_stays_in_use_while_fetches_fail() -> None:
    fetch = Fetch()
    fetch.gate.set()
    copy = CachedState(fetch, ttl_s=0.01, stale_s=60)
    assert await copy.recent() == 1
    fetch.error = UnavailableError("away")
    await asyncio.sleep(0.02)
    assert await copy.recent() == 1
    with pytest.raises(UnavailableError):
        await copy.get()
    fetch.error = None
    assert await copy.get() > 2
    await copy.close()


@pytest.mark.parametrize("nodes", [(), (NodePressure("n1", draining=True),)])
async def test_pool_without_a_node_that_takes_jobs_is_unavailable(nodes: tuple[NodePressure, ...]) -> None:
    async def fetch() -> PoolPressure:
        return PoolPressure(nodes)

    admission = PoolAdmission("m", fetch)
    with pytest.raises(UnavailableError) as caught:
        await admission.require_node()
    assert caught.value.code == "no_node"
    assert caught.value.retry_after_ms > 0
    await admission.close()


async def test_a_node_that_has_just_joined_is_found() -> None:
    nodes: list[NodePressure] = []

    async def fetch() -> PoolPressure:
        return PoolPressure(tuple(nodes))

    admission = PoolAdmission("m", fetch)
    with pytest.raises(UnavailableError):
        await admission.require_node()
    nodes += (NodePressure("n1", draining=True), NodePressure("n2"))
    await admission.require_node()
    await admission.close()


async def test_last_copy_is_returned_while_there_is_no_newer_one() -> None:
    fetch = Fetch()
    copy = CachedState(fetch, ttl_s=0.01)
    with pytest.raises(UnavailableError):
        await copy.get_or_last(0.01)
    fetch.gate.set()
    number = await copy.get_or_last(30)
    fetch.gate.clear()
    await asyncio.sleep(0.02)
    assert await copy.get_or_last(0.01) == number
    assert fetch.num_calls > number, "it was asked for"
    fetch.error = UnavailableError("away")
    fetch.gate.set()
    assert await copy.get_or_last(30) == number
