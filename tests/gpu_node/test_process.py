"""A node as a process: its loop is watched once it serves, not while it loads; it survives a lack of descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import time
from pathlib import Path

import redis
from fakes.processes.python_process import PythonProcess, run_python

from penstock.producer.client import AsyncClient

STALL_S = 0.4
SLOW = """
import re, sys, time
from penstock.cli.main import app
from penstock.gpu_node import process

load = process.open_engine

def compile_and_load(*given, **named):
    # One call that holds Python's lock, so that the loop stands still.
    began_s = time.monotonic()
    re.match("(a+)+b", "a" * 26)
    print("held", time.monotonic() - began_s, file=sys.stderr, flush=True)
    return load(*given, **named)

process.open_engine = compile_and_load
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


def _refusal(redis_url: str, model: Path, **variables: str) -> str:
    """Return the error of a node that ends before it loads its model."""
    env = {**os.environ, "PENSTOCK_NODE_MODEL": str(model), "PENSTOCK_REDIS_URL": redis_url, **variables}
    done = run_python("-m", "penstock", "node", env=env)
    assert done.returncode == 2
    assert "native runner" not in done.stderr
    return done.stderr


def test_a_wrong_password_and_a_used_port_are_named_before_the_model_is_loaded(
    redis_url: str, tiny_model: Path
) -> None:
    assert "rejected the credentials" in _refusal(redis_url.replace("unix://", "unix://node:wrong@"), tiny_model)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = _refusal(redis_url, tiny_model, PENSTOCK_NODE_METRICS_PORT=str(port))
    assert f"metrics_port {port} on 127.0.0.1: Address already in use" in told
    assert "there is no file /nowhere/model.gguf" in _refusal(redis_url, Path("/nowhere/model.gguf"))


def test_a_node_that_waits_for_redis_is_stopped_at_once(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"model": tiny_model, "dtype": "bfloat16", "num_threads": 1, "metrics_port": 0}
    env = {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
    away = {**os.environ, **env, "PENSTOCK_REDIS_URL": f"unix://{tmp_path}/none"}
    with PythonProcess("-m", "penstock", "node", env=away) as node:
        assert node.stderr is not None
        # The next thing that the node does is to join.
        assert any("serves metrics" in line for line in node.stderr)
        began_s = time.monotonic()
        node.terminate()
        _, log = node.communicate(timeout=60)
    assert node.returncode == 0 and "the node was stopped before it joined" in log, log
    assert time.monotonic() - began_s < 20


SOON_FREE = """
from functools import partial
from penstock.cli.main import app
from penstock.gpu_node import process

process.DescriptorWatch = partial(process.DescriptorWatch, look_s=0.2, recovered_after_s=1.0)
app(["node"])
"""
SHORT, FREE = '"too few file descriptors are free"', '"file descriptors are free again"'


async def _tokens_of_a_job(redis_url: str) -> int:
    async with AsyncClient(redis_url) as client:
        job = await client.submit([3, 4, 5], max_tokens=4, ignore_eos=True, background=True)
        return len((await job.result(timeout=60)).token_ids)


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_node_without_free_file_descriptors_says_so_once_and_recovers(redis_url: str, tiny_model: Path) -> None:
    settings = {"model": tiny_model, "dtype": "bfloat16", "num_threads": 1, "progress": "json"}
    env = {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
    with PythonProcess("-c", SOON_FREE, env={**os.environ, **env, "PENSTOCK_REDIS_URL": redis_url}) as node:
        assert node.stdout is not None and node.stderr is not None
        assert any(json.loads(line)["event"] == "ready" for line in node.stdout)
        lines = list[str]()

        def wait_for(said: str) -> dict[str, str]:
            assert node.stderr is not None
            for line in node.stderr:
                lines.append(line)
                if said in line:
                    record: dict[str, str] = json.loads(line)
                    return record
            raise AssertionError("the node has ended")

        assert asyncio.run(_tokens_of_a_job(redis_url)) == 4
        limits = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        for has_lost_redis in (False, True):
            limit = 3 if has_lost_redis else _open_files(node.pid) + 4
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (limit, limits[1]))
            if has_lost_redis:
                with redis.Redis.from_url(redis_url) as connection:
                    connection.client_kill_filter(_type="normal", skipme=True)
                    connection.client_kill_filter(_type="pubsub", skipme=True)
            reason = wait_for(SHORT)["reason"]
            assert f"may have {limit} open files" in reason and "LimitNOFILE=" in reason
            if not has_lost_redis:
                assert asyncio.run(_tokens_of_a_job(redis_url)) == 4
            resource.prlimit(node.pid, resource.RLIMIT_NOFILE, limits)
            wait_for(FREE)
            assert asyncio.run(_tokens_of_a_job(redis_url)) == 4
        node.terminate()
        log = "".join(lines) + node.communicate(timeout=60)[1]
    assert node.returncode == 0, log
    assert log.count(SHORT) == log.count(FREE) == 2, log
    assert "Traceback" not in log
