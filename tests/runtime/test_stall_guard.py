"""A loop that stands still ends its process with a stack dump. A stopped process is not ended."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from fakes.processes.python_process import PythonProcess

STALL_S = 0.4
CODE = """
import asyncio, re, sys, time
from penstock.runtime.stall_guard import StallGuard

def busy():
    while True:
        pass

def sleeping():
    time.sleep(600)

def holding_the_lock():
    re.match("(a+)+b", "a" * 60)

async def main():
    guard = StallGuard({stall_s})
    guard.start()
    print("guarded", flush=True)
    name = (await asyncio.to_thread(sys.stdin.readline)).strip()
    if name == "rest":
        guard.stop()
        print("rested", flush=True)
        return
    globals()[name]()

asyncio.run(main())
"""


def started() -> subprocess.Popen[str]:
    process = PythonProcess("-c", CODE.format(stall_s=STALL_S), stdin=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "guarded\n"
    return process


@pytest.mark.parametrize("held_by", ["busy", "sleeping", "holding_the_lock"])
def test_a_loop_that_stands_still_ends_its_process_with_a_dump(held_by: str) -> None:
    with started() as process:
        _, log = process.communicate(f"{held_by}\n", timeout=60)
    assert process.returncode == -signal.SIGABRT
    assert "the event loop stands still" in log and f"in {held_by}" in log


def test_a_stopped_process_is_not_ended() -> None:
    with started() as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(5 * STALL_S)
        os.kill(process.pid, signal.SIGCONT)
        said, log = process.communicate("rest\n", timeout=60)
    assert (process.returncode, said, log) == (0, "rested\n", "")
