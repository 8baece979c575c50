"""Nodes on the same cores: background work waits while another node has work for which a caller waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.waiting import wait_until

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.records import EngineRequest, StepOutput
from penstock.gpu_node.engine.shared_cores import WORD_S, SharedCores
from penstock.gpu_node.engine.worker import EngineWorker

SHARE = 0.1
SAYS = """
import sys, time
from pathlib import Path
from penstock.gpu_node.engine.shared_cores import SharedCores
cores = SharedCores.join(0.1, Path(sys.argv[1]))
print("joined", flush=True)
while True:
    cores.pause_s(time.monotonic(), has_foreground=True)
    time.sleep(0.01)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def joined(folder: Path, share: float = SHARE) -> SharedCores:
    found = SharedCores.join(share, folder)
    assert found is not None
    return found


def test_a_node_alone_never_waits(folder: Path) -> None:
    cores = joined(folder)
    for has_foreground in (False, True, False):
        assert cores.pause_s(100.0, has_foreground=has_foreground) == 0
    assert not cores.is_foreground_beside


def test_background_work_waits_until_the_other_node_has_no_foreground_work(folder: Path) -> None:
    chat, batch = joined(folder), joined(folder)
    assert batch.pause_s(100.0, has_foreground=False) == 0
    assert chat.pause_s(100.0, has_foreground=True) == 0
    assert batch.pause_s(100.1, has_foreground=False) > 0
    assert batch.is_foreground_beside
    assert batch.pause_s(100.2, has_foreground=True) == 0, "its own foreground work never waits"
    chat.pause_s(100.3, has_foreground=False)
    assert batch.pause_s(100.3, has_foreground=False) == 0


def test_background_work_gets_its_share_of_the_time_meanwhile(folder: Path) -> None:
    chat, batch = joined(folder), joined(folder)
    now_s, computed_s, step_s = 100.0, 0.0, 0.2
    while now_s < 200:
        chat.pause_s(now_s, has_foreground=True)
        if batch.pause_s(now_s, has_foreground=False) > 0:
            now_s += 0.01
        else:
            now_s += step_s
            computed_s += step_s
    assert computed_s / 100 == pytest.approx(SHARE, rel=0.1)


def test_without_a_share_it_waits_for_as_long_as_it_takes(folder: Path) -> None:
    chat, batch = joined(folder), joined(folder, share=0.0)
    for at in range(100):
        chat.pause_s(100.0 + at, has_foreground=True)
        assert batch.pause_s(100.0 + at, has_foreground=False) > 0


def test_nodes_on_other_cores_do_not_wait_for_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    chat = joined(folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    batch = joined(folder)
    chat.pause_s(100.0, has_foreground=True)
    assert batch.pause_s(100.0, has_foreground=False) == 0


@contextmanager
def saying(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that says all the time that it has foreground work."""
    with subprocess.Popen([sys.executable, "-c", SAYS, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_killed_or_stopped_loses_its_word_within_a_second(folder: Path, number: int) -> None:
    batch = joined(folder)
    with saying(folder) as process:
        wait_until(lambda: batch.pause_s(time.monotonic(), has_foreground=False))
        process.send_signal(number)
        # What it said last is at most as old as now.
        assert batch.pause_s(time.monotonic() + WORD_S + 0.05, has_foreground=False) == 0
    assert WORD_S < 1


def test_places_of_processes_that_ended_are_taken_again(folder: Path) -> None:
    for _ in range(70):
        joined(folder).leave()
    held = [SharedCores.join(SHARE, folder) for _ in range(65)]
    assert [one is None for one in held] == [False] * 64 + [True]


def test_a_folder_of_others_is_not_used(folder: Path) -> None:
    folder.chmod(0o777)
    assert SharedCores.join(SHARE, folder) is None


def test_an_engine_holds_its_background_requests_and_runs_others(folder: Path) -> None:
    chat, delivered = joined(folder), list[StepOutput]()
    worker = EngineWorker(ReferenceEngine(), delivered.extend, gate=joined(folder, share=0.0))
    worker.start()
    try:

        def run(name: str, *, background: bool) -> None:
            request = EngineRequest(name, [1, 2], SamplingParams(max_tokens=2), seed=1, background=background)
            worker.add(request, lambda error: None)

        def has_ended(name: str) -> bool:
            return any(one.request_id == name and one.finish_reason for one in delivered)

        def says_it_has_work() -> bool:
            return chat.pause_s(time.monotonic(), has_foreground=True) is not None

        chat.pause_s(time.monotonic(), has_foreground=True)
        run("batch", background=True)
        wait_until(lambda: worker.is_held, meanwhile=says_it_has_work)
        assert not delivered
        run("chat", background=False)
        wait_until(lambda: has_ended("chat"), meanwhile=says_it_has_work)
        chat.idle()
        wait_until(lambda: has_ended("batch"))
    finally:
        worker.stop()
        worker.stopped.result(5)
