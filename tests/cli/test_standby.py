"""A gateway on standby follows the one that ends, a lost one is replaced, and a planned restart takes a new one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from fakes.waiting import until

from penstock.cli import standby
from penstock.cli.keeper import ConnectionKeeper
from penstock.cli.kept_gateway import keep_gateway, start_gateway
from penstock.cli.processes import ChildCommand, Supervisor
from penstock.gateway.kept.slots import memory_bytes
from penstock.gateway.kept.standby import PROCESS_NAME

NUM_SLOTS = 4
GATEWAY = """
import json, os, socket, sys
from penstock.gateway.kept.standby import may_start
from penstock.runtime.kept_sockets import LEAVE, Inherited, receive_message
def tell(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{word} {os.getpid()}\\n")
tell("made")
inherited = Inherited.of_environment()
if not may_start(inherited):
    sys.exit(0)
tell("serves")
print(json.dumps({"event": "ready", "url": "-"}), flush=True)
control = socket.socket(fileno=inherited.control)
while (message := receive_message(control)) is not None and message[0] != LEAVE:
    pass
"""


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Told:
    """What the gateways of a test wrote, in its order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pids(self, word: str) -> list[int]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(word)]


@asynccontextmanager
async def kept(path: Path) -> AsyncIterator[tuple[ConnectionKeeper, Told, list[str]]]:
    """A gateway that serves, with its keeper."""
    said: list[str] = []
    command = ChildCommand("gateway", (sys.executable, "-c", GATEWAY, str(path)), {}, 1.0)
    keeper = ConnectionKeeper([socket.create_server(("127.0.0.1", 0))], os.memfd_create("slots"), NUM_SLOTS)
    os.ftruncate(keeper._slots, memory_bytes(NUM_SLOTS))
    async with Supervisor(lambda *_: None) as supervisor:
        supervisor.before_stop.append(keeper.close)
        child = await start_gateway(supervisor, command, keeper)
        await child.ready(timeout_s=60)
        keeping = asyncio.create_task(keep_gateway(supervisor, child, command, keeper, said.append))
        try:
            yield keeper, Told(path), said
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "FIRST_AFTER_S", 0.01)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def is_named_standby(told: Told, number: int) -> Callable[[], bool]:
    return lambda: len(told.pids("made")) > number and name_of(told.pids("made")[number]) == PROCESS_NAME


async def test_the_gateway_on_standby_follows_one_that_is_killed(tmp_path: Path) -> None:
    async with kept(tmp_path / "told") as (_, told, said):
        await until(is_named_standby(told, 1), within_s=60)
        first, second = told.pids("made")
        assert told.pids("serves") == [first]
        os.kill(first, signal.SIGKILL)
        await until(lambda: "gateway serves again" in said, within_s=60)
        assert told.pids("serves") == [first, second] and name_of(second) != PROCESS_NAME


async def test_a_gateway_on_standby_that_is_killed_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(tmp_path / "told") as (_, told, said):
        await until(is_named_standby(told, 1), within_s=60)
        os.kill(told.pids("made")[1], signal.SIGKILL)
        await until(is_named_standby(told, 2), within_s=60)
        first, _, third = told.pids("made")
        assert not said and "on standby ended" in caplog.text
        os.kill(first, signal.SIGKILL)
        await until(lambda: "gateway serves again" in said, within_s=60)
        assert told.pids("serves") == [first, third]


async def test_a_planned_restart_takes_a_gateway_that_is_made_after_it_was_asked_for(tmp_path: Path) -> None:
    async with kept(tmp_path / "told") as (keeper, told, said):
        await until(is_named_standby(told, 1), within_s=60)
        keeper.asked_to_leave.set()
        await until(lambda: "gateway serves again" in said, within_s=60)
        first, second, third = told.pids("made")[:3]
        assert told.pids("serves") == [first, third]
        assert not exists(second)


async def test_without_a_standby_the_next_gateway_is_made_when_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "FIRST_AFTER_S", 600.0)
    async with kept(tmp_path / "told") as (_, told, said):
        (first,) = told.pids("made")
        os.kill(first, signal.SIGKILL)
        await until(lambda: "gateway serves again" in said, within_s=60)
        assert len(told.pids("serves")) == 2


async def test_no_standby_is_left_when_the_command_ends(tmp_path: Path) -> None:
    async with kept(tmp_path / "told") as (_, told, _):
        await until(is_named_standby(told, 1), within_s=60)
        pids = told.pids("made")
    assert not any(map(exists, pids))
