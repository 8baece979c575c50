"""Calls shared by many streams: a call that waits for other calls waits no longer than for Redis itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from penstock.contract.errors import UnavailableError
from penstock.queue.broker.connection import MAX_CALLS, Patience, retried


def open_patience(outage_s: float) -> Patience:
    patience = Patience(outage_s)
    patience.is_open = True
    return patience


async def test_call_without_a_slot_gives_up_in_time() -> None:
    patience, answered = open_patience(0.1), asyncio.Event()

    waiting = [asyncio.create_task(patience.call(answered.wait)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match=f"{MAX_CALLS} calls wait"):
            await patience.call(answered.wait)
    answered.set()
    assert all(await asyncio.gather(*waiting))
    assert await patience.call(answered.wait), "the slots are free again"


async def test_slot_is_free_again_however_its_call_ended() -> None:
    patience, num_under_way, most = open_patience(0.0), 0, 0

    async def fail() -> None:
        nonlocal num_under_way, most
        num_under_way += 1
        most = max(most, num_under_way)
        await asyncio.sleep(0)
        num_under_way -= 1
        raise UnavailableError("away")

    cancelled = [asyncio.create_task(patience.call(fail)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    num_under_way = most = 0
    answers = await asyncio.gather(*(patience.call(fail) for _ in range(MAX_CALLS)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnavailableError}
    assert most == MAX_CALLS


async def test_call_of_a_closed_client_is_not_retried() -> None:
    patience, num_calls = open_patience(30.0), 0

    async def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        patience.is_open = False
        raise UnavailableError("away")

    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError) as caught:
            await patience.call(fail)
    assert (caught.value.code, num_calls) == ("client_closed", 1)


@dataclass
class Counting:
    """A broker whose first two calls of each method fail."""

    patience: Patience | None
    calls: list[str] = field(default_factory=list)

    @retried
    async def read(self, name: str, *, is_strict: bool = False) -> tuple[str, bool]:
        self.calls.append(name)
        if len(self.calls) <= 2:
            raise UnavailableError("away")
        return name, is_strict


async def test_method_of_a_broker_is_retried_with_its_patience_and_without_one_called_once() -> None:
    broker = Counting(open_patience(30.0))
    assert await broker.read("a", is_strict=True) == ("a", True)
    assert broker.calls == ["a"] * 3

    impatient = Counting(None)
    with pytest.raises(UnavailableError):
        await impatient.read("a")
    assert impatient.calls == ["a"]


async def test_call_keeps_its_slot_while_it_waits_for_redis() -> None:
    patience, num_calls = open_patience(30.0), 0

    async def fail_once() -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= MAX_CALLS:
            raise UnavailableError("away")
        return num_calls

    first = [asyncio.create_task(patience.call(fail_once)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0)
    last = asyncio.create_task(patience.call(fail_once))
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*first, last)
    assert sorted(answers) == list(range(MAX_CALLS + 1, 2 * MAX_CALLS + 2))
    assert answers[-1] > MAX_CALLS + 1, "the last call waited for another one"
