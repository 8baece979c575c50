"""A node's process ends with its own status and its own words, though threads still compute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
from fakes.processes.node_process import NodeProcess

from penstock.cli.demo_model import demo_model
from penstock.producer.client import Client

LEAVING = """
import ctypes, logging, sys, threading
from penstock.contract.errors import ConfigError
from penstock.gpu_node.process import exiting_despite_threads

logging.basicConfig(format="%(message)s")
with exiting_despite_threads(lambda error: 3):
    if "{hangs}":
        # In a library, without Python's lock, as a step is.
        threading.Thread(target=ctypes.CDLL(None).sleep, args=(300,), daemon=True).start()
    print("told", end="")
    logging.getLogger().warning("logged")
    {ends}
"""
ENDS = {
    "pass": (0, ""),
    "raise ConfigError('no such thing')": (3, "penstock: no such thing"),
    "sys.exit(7)": (7, ""),
    "raise ValueError('a bug')": (1, "ValueError: a bug"),
}


@pytest.mark.parametrize("ends", ENDS)
def test_hanging_thread_changes_neither_exit_status_nor_message(ends: str) -> None:
    status, said = ENDS[ends]
    started_s = time.monotonic()
    code = LEAVING.format(hangs="yes", ends=ends)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (status, "told")
    assert ran.stderr.startswith("logged\n") and said in ran.stderr
    assert time.monotonic() - started_s < 30


def test_block_without_hanging_threads_ends_normally() -> None:
    code = LEAVING.format(hangs="", ends="raise ValueError('a bug')") + "\nprint('not reached')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "told")
    assert ran.stderr.count("Traceback") == 1


STARTING = """
import threading, time
from penstock.gpu_node.process import exiting_despite_threads

class SlowStart(threading.Thread):
    def _bootstrap(self):
        time.sleep(0.2)
        super()._bootstrap()

with exiting_despite_threads(lambda error: 3):
    thread = SlowStart(target={target}, daemon=True)
    threading.Thread(target=thread.start).start()
    while thread not in threading.enumerate():
        time.sleep(0.001)
    assert not thread.is_alive()
{then}
"""


def test_a_thread_that_is_being_started_does_not_break_the_exit() -> None:
    code = STARTING.format(target="int", then="print('went on')")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "went on\n", "")
    hanging = STARTING.format(target="threading.Event().wait", then="print('not reached')")
    ran = subprocess.run([sys.executable, "-c", hanging], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.model
@pytest.mark.slow
def test_node_whose_step_hangs_reports_it_and_does_not_crash(redis_url: str) -> None:
    """A step of thousands of tokens on one thread is a hang by these settings; it still runs when the process ends."""
    slow_steps = {"num_threads": 1, "max_num_batched_tokens": 8192, "max_prefill_ms_beside_decode": 1e6}
    hanging = {"stall_after_s": 0.3, "lease_ms": 3000}
    with NodeProcess(redis_url, model=demo_model(), **slow_steps, **hanging) as node, Client(redis_url) as client:
        for first in range(4):
            client.submit([7 + first] * 7000, max_tokens=4)
        assert node.wait() == 1
        log = node.log
    reason = json.loads(log.splitlines()[-1])["reason"]
    assert re.fullmatch(r"the engine has work and has made no step for \d+ s", reason)
    assert "Traceback" not in log
