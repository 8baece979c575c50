"""A node as a process: its loop is watched once it serves, not while it loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fakes.processes.python_process import PythonProcess

STALL_S = 0.4
SLOW = """
import re, sys, time
from penstock.cli.main import app
from penstock.gpu_node import process

load = process.Engine

def compile_and_load(*given, **named):
    # One call that holds Python's lock, so that the loop stands still.
    began_s = time.monotonic()
    re.match("(a+)+b", "a" * 26)
    print("held", time.monotonic() - began_s, file=sys.stderr, flush=True)
    return load(*given, **named)

process.Engine = compile_and_load
app(["node"])
"""


def test_a_node_whose_loop_stands_still_while_it_loads_is_not_ended(redis_url: str, tiny_model: Path) -> None:
    settings = {"model": tiny_model, "dtype": "bfloat16", "num_threads": 1, "loop_stall_s": STALL_S}
    env = {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
    env |= {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_NODE_PROGRESS": "json"}
    with PythonProcess("-c", SLOW, env={**os.environ, **env}) as node:
        assert node.stdout is not None
        is_ready = any(json.loads(line)["event"] == "ready" for line in node.stdout)
        node.terminate()
        _, log = node.communicate(timeout=60)
    assert is_ready and node.returncode == 0, log
    held_s = next(float(line.split()[1]) for line in log.splitlines() if line.startswith("held "))
    assert held_s > 2 * STALL_S
    assert "stands still" not in log
