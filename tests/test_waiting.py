"""A pause of the machine ends no wait; a condition that never holds does, and the error shows what was seen last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import waiting
from fakes.waiting import WAIT_S, Deadline, until, wait_until

Wait = Callable[..., Any]


class Clock:
    """A clock that a test moves, and that moves by each pause of a wait."""

    def __init__(self) -> None:
        self.now_s, self.num_pauses = 100.0, 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s, self.num_pauses = self.now_s + seconds, self.num_pauses + 1

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=made.sleep_async))
    return made


@pytest.fixture(params=[wait_until, until])
def wait(request: pytest.FixtureRequest) -> Wait:
    """Either form, called in the same way."""
    form: Wait = request.param
    return form if form is wait_until else lambda *args, **options: asyncio.run(form(*args, **options))


def test_pauses_of_the_machine_end_no_wait(clock: Clock, wait: Wait) -> None:
    def look() -> str:
        clock.now_s += 66.0
        return "told" if clock.now_s > 100 + 20 * 66 else ""

    assert wait(look) == "told"


def test_a_condition_that_never_holds_ends_the_wait(clock: Clock, wait: Wait) -> None:
    with pytest.raises(AssertionError, match=r"not within 60 s: a job of two \(seen last: \['a'\]\)"):
        wait(lambda: ["a"], lambda found: len(found) == 2, what=lambda: "a job of two")
    assert clock.now_s == pytest.approx(100 + WAIT_S, abs=0.1)
    assert clock.num_pauses > WAIT_S / 0.1


def test_expected_errors_count_as_not_yet_and_others_end_the_wait(wait: Wait) -> None:
    looks = iter([ConnectionError("away"), OSError("lost"), None])

    def look() -> bool:
        if error := next(looks):
            raise error
        return True

    assert wait(look, but=(OSError,)) is True
    with pytest.raises(AssertionError, match="ValueError"):
        wait(lambda: int("a"), but=ValueError, within_s=0.1)
    with pytest.raises(ValueError):
        wait(lambda: int("a"))


def test_a_wait_ends_early_once_what_must_hold_meanwhile_does_not(wait: Wait) -> None:
    looks, running = iter(range(9)), iter([True, True, False])
    with pytest.raises(AssertionError, match=r"must hold meanwhile does not: it ended \(seen last: 2\)"):
        wait(lambda: next(looks), lambda number: number == 9, what="it ended", meanwhile=lambda: next(running))
    assert wait(lambda: "there", meanwhile=lambda: False) == "there"


def test_other_tasks_run_while_one_waits_for_what_is_awaited() -> None:
    found: list[int] = []

    async def num_found() -> int:
        return len(found)

    async def run() -> int:
        async with asyncio.TaskGroup() as group:
            waiting_one = group.create_task(until(num_found, lambda number: number > 2))
            for number in range(3):
                await asyncio.sleep(0.02)
                found.append(number)
        return int(waiting_one.result())

    assert asyncio.run(run()) == 3


def test_a_loop_asks_what_is_left_of_its_patience(clock: Clock) -> None:
    deadline = Deadline(5.0)
    clock.now_s += 1.5
    assert deadline.left_s() == pytest.approx(3.5)
    clock.now_s += 3600.0
    assert deadline.left_s() == pytest.approx(1.5)
    deadline.check()
    clock.now_s += 1.5
    with pytest.raises(AssertionError, match="not within 5 s: two lines"):
        deadline.check("two lines")
