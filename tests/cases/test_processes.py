"""Processes as containers and shells start them: as process 1, beside another server, as a user without a name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PENSTOCK = (sys.executable, "-m", "penstock")
ORPHANS = """
import os, signal, subprocess, sys, time
from penstock.runtime.init_process import reap_orphans_if_first
reap_orphans_if_first()
assert os.getpid() != 1 and os.getppid() == 1
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
# A child whose children end after it: they belong to process 1 then.
if os.fork() == 0:
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(0.2)
            break
    os._exit(0)
os.wait()
time.sleep(0.6)
states = [open(f"/proc/{p}/stat").read().rpartition(")")[2].split()[0] for p in os.listdir("/proc") if p.isdigit()]
print("zombies:", states.count("Z"), flush=True)
time.sleep(60)
"""
NEW_PIDS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def needs_namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*NEW_PIDS, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a namespace of processes")


def test_process_1_reaps_orphans_passes_a_signal_on_and_exits_as_the_command_does() -> None:
    needs_namespaces()
    with subprocess.Popen([*NEW_PIDS, sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "zombies: 0\n"
        (first,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert outer.wait(60) == 7


def test_a_command_as_process_1_ends_with_its_own_exit_status() -> None:
    needs_namespaces()
    done = subprocess.run([*NEW_PIDS, *PENSTOCK, "no-such-command"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "penstock")
