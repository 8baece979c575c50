"""Calls shared by many streams: a call that waits for other calls waits no longer than for Redis itself."""

from __future__ import annotations

import asyncio

import pytest

from penstock.contract.errors import UnavailableError
from penstock.queue.broker.connection import MAX_CALLS, Retries


def open_retries(outage_s: float) -> Retries:
    retries = Retries(outage_s)
    retries.is_open = True
    return retries


async def test_call_without_a_slot_gives_up_in_time() -> None:
    retries, answered = open_retries(0.1), asyncio.Event()

    waiting = [asyncio.create_task(retries.call(answered.wait)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        with pytest.raises(UnavailableError, match=f"{MAX_CALLS} calls wait"):
            await retries.call(answered.wait)
    answered.set()
    assert all(await asyncio.gather(*waiting))
    assert await retries.call(answered.wait), "the slots are free again"


async def test_slot_is_free_again_however_its_call_ended() -> None:
    retries, num_under_way, most = open_retries(0.0), 0, 0

    async def fail() -> None:
        nonlocal num_under_way, most
        num_under_way += 1
        most = max(most, num_under_way)
        await asyncio.sleep(0)
        num_under_way -= 1
        raise UnavailableError("away")

    cancelled = [asyncio.create_task(retries.call(fail)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    num_under_way = most = 0
    answers = await asyncio.gather(*(retries.call(fail) for _ in range(MAX_CALLS)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnavailableError}
    assert most == MAX_CALLS


async def test_call_of_a_closed_client_is_not_retried() -> None:
    retries, num_calls = open_retries(30.0), 0

    async def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        retries.is_open = False
        raise UnavailableError("away")

    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError) as caught:
            await retries.call(fail)
    assert (caught.value.code, num_calls) == ("client_closed", 1)
