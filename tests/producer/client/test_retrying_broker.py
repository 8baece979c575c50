"""Calls for many streams: a call that waits for others to be answered waits no longer than for Redis itself."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from penstock.contract.errors import UnavailableError
from penstock.producer.client.retrying_broker import MAX_CALLS, RetryingBroker
from penstock.queue.broker.producer import ProducerBroker

NO_BROKER = cast(ProducerBroker, None)


def open_broker(outage_s: float) -> RetryingBroker:
    broker = RetryingBroker(NO_BROKER, outage_s)
    broker.is_open = True
    return broker


async def test_who_finds_all_calls_waiting_gives_up_in_time() -> None:
    broker, answered = open_broker(0.1), asyncio.Event()

    async def wait(_: ProducerBroker) -> bool:
        return await answered.wait()

    waiting = [asyncio.create_task(broker.call(wait)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        with pytest.raises(UnavailableError, match=f"{MAX_CALLS} calls wait"):
            await broker.call(wait)
    answered.set()
    assert all(await asyncio.gather(*waiting))
    assert await broker.call(wait), "the places are free again"


async def test_a_place_is_free_again_however_its_call_ended() -> None:
    broker, num_under_way, most = open_broker(0.0), 0, 0

    async def fail(_: ProducerBroker) -> None:
        nonlocal num_under_way, most
        num_under_way += 1
        most = max(most, num_under_way)
        await asyncio.sleep(0)
        num_under_way -= 1
        raise UnavailableError("away")

    cancelled = [asyncio.create_task(broker.call(fail)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    num_under_way = most = 0
    answers = await asyncio.gather(*(broker.call(fail) for _ in range(MAX_CALLS)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnavailableError}
    assert most == MAX_CALLS
