"""The healthcheck of a node's container on real nodes: it checks the node, independent of Redis."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from uuid import uuid4

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import run_python
from faults.tools.redis_process import RedisProcess

from tests.source_tree import ROOT


def check(name: str) -> tuple[int, str]:
    """Return the healthcheck's exit status and output, in an environment that names an unreachable Redis."""
    env = os.environ | {"PENSTOCK_REDIS_URL": "redis://127.0.0.1:1", "PENSTOCK_NODE_NAME": name}
    ran = run_python(str(ROOT / "ops/node_alive.py"), env=env)
    assert ran.stderr == ""
    return ran.returncode, ran.stdout


@pytest.fixture
def name() -> str:
    """A node name that no other test uses."""
    return uuid4().hex[:8]


def test_a_node_is_healthy_also_while_redis_is_away(tmp_path: Path, name: str) -> None:
    assert check(name) == (1, f"no node called {name} serves in this container, or it hangs\n")
    with RedisProcess(tmp_path / "redis") as server, NodeProcess(server.url, name=name, lease_ms=3000) as node:
        silent_s = math.inf
        while silent_s >= 2:  # On a busy machine, some time may pass between two heartbeats.
            status, said = check(name)
            assert status == 0
            (state,) = json.loads(said)
            assert state["node_id"].startswith(f"{name}-")
            silent_s = state["redis_silent_s"]
        server.kill()
        time.sleep(3)
        status, said = check(name)
        assert status == 0 and json.loads(said)[0]["redis_silent_s"] > 2
        server.start()
        assert check(name)[0] == 0
        # Another name's check does not find it.
        assert check(f"{name}x")[0] == 1
        node.kill()
        assert check(name)[0] == 1


@pytest.mark.slow
def test_a_node_that_hangs_is_not_healthy(redis_url: str, name: str) -> None:
    with NodeProcess(redis_url, name=name) as node:
        node.signal(signal.SIGSTOP)
        assert check(name)[0] == 1
        node.signal(signal.SIGCONT)
        assert check(name)[0] == 0


@pytest.mark.slow
def test_two_nodes_of_one_name_are_both_asked(redis_url: str, name: str) -> None:
    with NodeProcess(redis_url, name=name) as one, NodeProcess(redis_url, name=name):
        assert len(json.loads(check(name)[1])) == 2
        one.kill()
        assert check(name)[0] == 0
