import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.gpu_node.publishing.sending import Alarm
from penstock.runtime import event_loop


@pytest.mark.parametrize("run", [asyncio.run, event_loop.run])
def test_an_alarm_rings_once_and_not_before_its_time(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def set_twice() -> None:
        loop = asyncio.get_running_loop()
        rings: list[float] = []
        alarm = Alarm(lambda: rings.append(loop.time()))
        due_s = loop.time() + 0.0104
        alarm.set(0.5)
        alarm.set(0.0104)
        await asyncio.sleep(0.05)
        assert len(rings) == 1
        assert rings[0] >= due_s

    run(set_twice())


@pytest.mark.parametrize("run", [asyncio.run, event_loop.run])
def test_an_alarm_that_is_set_to_short_and_past_times_rings_for_each(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def set_often() -> None:
        rings = 0

        def ring() -> None:
            nonlocal rings
            rings += 1

        alarm = Alarm(ring)
        for number in range(1000):
            delay_s = (-0.001, 0.0, 1e-5, 1e-4, 4e-4, 6e-4)[number % 6]
            num_before = rings
            for later_s in (0.0, 1e-4, -1e-4):
                alarm.set(delay_s + later_s)
            async with asyncio.timeout(5):
                while rings == num_before:
                    await asyncio.sleep(0)
            assert rings == num_before + 1

    run(set_often())
