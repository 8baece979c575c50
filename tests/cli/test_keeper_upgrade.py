"""A keeper becomes that of another release, and its connections and listening sockets stay."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli import kept_gateway as module
from penstock.cli.keeper import ConnectionKeeper
from penstock.cli.keeper_upgrade import HandedKeeper, own_command, slot_version_of
from penstock.cli.kept_gateway import Upgrade
from penstock.gateway.kept.slots import VERSION, AnswerSlot
from tests.cli.test_keeper import end, gateway_of, opened, turns

NEXT = """
import socket, sys
from penstock.cli.keeper_upgrade import HandedKeeper
handed = HandedKeeper.of_environment()
assert handed.num_slots == 7 and HandedKeeper.of_environment() is None
((slot, descriptor),) = handed.kept.items()
socket.socket(fileno=descriptor).sendall(b"slot %d, %d ns" % (slot, handed.ended_ns))
connection, _ = socket.socket(fileno=handed.listeners[0]).accept()
connection.sendall(b"accepted")
"""
FIRST = f"""
import os, socket, sys
from penstock.cli.keeper_upgrade import HandedKeeper, become
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
ours, _ = listener.accept()
os.set_inheritable(client.fileno(), True)
slots = os.memfd_create("slots")
print(listener.getsockname()[1], flush=True)
os.dup2(client.fileno(), 0)
become([sys.executable, "-c", {NEXT!r}], HandedKeeper([listener.fileno()], slots, 7, {{3: ours.fileno()}}, 99))
"""


def test_a_keeper_that_becomes_another_process_keeps_its_sockets() -> None:
    with subprocess.Popen([sys.executable, "-c", FIRST], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline())), timeout=60) as waiting:
            assert waiting.recv(20) == b"accepted"
        assert process.wait(60) == 0


async def test_what_is_handed_over_moves_to_the_next_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=10)
        ours, _ = listener.accept()
    async with opened() as before:
        first = gateway_of(before)
        slot = first.hold(ours.fileno())
        assert isinstance(slot, AnswerSlot)
        end(first)
        ours.close()
        before.gateway_ended()
        kept = {number: os.dup(descriptor) for number, descriptor in before._kept.items()}
        listeners = [os.dup(listener.fileno()) for listener in before._listeners]
        keeper = ConnectionKeeper.take_over(HandedKeeper(listeners, os.dup(before._slots), 4, kept, 5))
    second = gateway_of(keeper)
    ((number, descriptor),), ended_ns = await second.kept_before()
    assert (number, ended_ns) == (slot.number, 5)
    with socket.socket(fileno=descriptor) as again:
        again.sendall(b"goes on")
        assert client.recv(20) == b"goes on"
    second.slots.connections.forget_all()
    end(second)
    keeper.close()
    client.close()


async def test_a_release_that_does_not_start_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [
        sys.executable,
        "-c",
        "import os; print('{\"slot_version\":', os.environ['PENSTOCK_GATEWAY_CHECK'] * 2, '}')",
    ]
    assert await slot_version_of(good) == 11
    for bad in (["/absent"], [sys.executable, "-c", "raise SystemExit('no such setting')"], ["/bin/echo", "{}"]):
        assert await slot_version_of(bad) is None
    reasons = [record.__dict__["reason"] for record in caplog.records]
    assert len(reasons) == 3 and reasons[1] == "no such setting"


def test_the_command_leads_to_the_release_that_is_installed_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "penstock"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "orig_argv", ["/old/python", str(program), "gateway"])
    assert own_command() == [str(program), "gateway"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "penstock", "gateway"])
    assert own_command() == [sys.executable, "-m", "penstock", "gateway"]


@pytest.mark.parametrize(("version", "leaves", "drains"), [(VERSION, 1, 0), (VERSION + 1, 0, 1), (None, 0, 0)])
async def test_answers_are_left_only_to_a_release_that_knows_their_slots(
    monkeypatch: pytest.MonkeyPatch, version: int | None, leaves: int, drains: int
) -> None:
    done: list[str] = []

    async def told(_: object) -> int | None:
        return version

    async def stop() -> None:
        done.append("drain")

    monkeypatch.setattr(module, "slot_version_of", told)
    leaves_when_asked = SimpleNamespace(set=lambda: done.append("leave"))
    keeper: Any = SimpleNamespace(next_command=(), asked_to_leave=leaves_when_asked)
    upgrade = Upgrade(keeper, SimpleNamespace(children=[SimpleNamespace(stop=stop)]))  # type: ignore[arg-type]
    upgrade.start()
    upgrade.start()
    await turns()
    assert done == ["leave"] * leaves + ["drain"] * drains
    assert bool(keeper.next_command) == (version is not None)


async def test_a_command_that_cannot_be_run_leaves_the_keeper_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as keeper:
        keeper.next_command = ["/absent/penstock"]
        keeper.hand_over()
        assert not keeper.next_command and not os.get_inheritable(keeper._slots)
        assert "does not start" in caplog.text
        await asyncio.sleep(0)
