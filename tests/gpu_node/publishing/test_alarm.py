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
