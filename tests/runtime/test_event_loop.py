import asyncio
import sys

import pytest

from penstock.runtime import event_loop


async def _kind_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def test_the_loop_is_uvloop_where_it_is_installed() -> None:
    pytest.importorskip("uvloop")
    assert event_loop.run(_kind_of_loop()) == "uvloop"


def test_without_uvloop_the_loop_is_asyncios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert event_loop.run(_kind_of_loop()) == "asyncio"
