"""Replicas of a node: what each gets of the machine, and how they live and end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.command import call_command, run_command
from fakes.processes.python_process import PythonProcess, run_python
from fakes.waiting import wait_until
from fixtures.tiny_model import make_tiny_model

from penstock.cli import replicas
from penstock.cli.options import words_of
from penstock.cli.processes import ChildCommand
from penstock.cli.replicas import replica_commands, replicas_of
from penstock.cli.services import NODE_FLAGS
from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.pool import NodePressure
from penstock.gpu_node.gpus import VISIBLE, GpuDevice
from penstock.gpu_node.settings import NodeSettings
from penstock.kernels.cpu import probe
from penstock.kernels.cpu.probe import usable_cores
from penstock.producer.client import AsyncClient
from tests.source_tree import ROOT

PATIENCE_S = 60.0
GPUS = tuple(GpuDevice(f"GPU-{at}", "H100", 81_559) for at in range(4))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, 64 GiB of free memory, and four GPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(probe, "usable_cores", lambda: 8)
    monkeypatch.setattr(probe, "cores_of", lambda cpus, _: [probe.Core(0, (cpu,)) for cpu in cpus])
    monkeypatch.setattr(replicas, "available_bytes", lambda: 64 << 30)
    monkeypatch.setattr(replicas, "devices_here", lambda: GPUS)


def settings_of(**given: Any) -> NodeSettings:
    return NodeSettings.load(**{"model": "m", "redis_url": "unix://x", "name": "host", "runner": "cpu"} | given)


def flags(settings: NodeSettings, number: int) -> dict[str, str]:
    words = replicas_of(settings)[number].arguments
    return dict(zip(words[::2], words[1::2], strict=True))


def test_one_replica_is_a_node_without_a_supervisor() -> None:
    assert replicas_of(settings_of()) == ()
    assert replicas_of(settings_of(replicas="auto")) == ()
    assert replicas_of(settings_of(replicas="1", runner="gpu")) == ()


def test_cores_quota_and_the_default_kv_cache_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(replicas="2", metrics_port=9100)
    assert [one.cpus for one in replicas_of(settings)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert flags(settings, 1) == {
        "--replicas": "1",
        "--name": "host-1",
        "--metrics-port": "9101",
        "--num-threads": "4",
        "--reserved-cores": "0",
        "--kv-cache-gib": "0.5",
    }
    monkeypatch.setattr(probe, "usable_cores", lambda: 3)
    assert [flags(settings, number)["--num-threads"] for number in (0, 1)] == ["2", "1"]
    assert flags(settings_of(replicas="2", reserved_cores=1), 0)["--num-threads"] == "1"


def test_sizes_that_are_set_hold_for_each_replica() -> None:
    settings = settings_of(replicas="2", kv_cache_gib=2, num_threads=3)
    assert "--kv-cache-gib" not in flags(settings, 0)
    assert flags(settings, 0)["--num-threads"] == "3"
    assert "--kv-cache-gib" not in flags(settings_of(replicas="2", num_kv_blocks=8), 0)


def test_each_gpu_gets_a_replica_that_sees_only_it() -> None:
    settings = settings_of(replicas="auto", runner="gpu")
    assert [one.env for one in replicas_of(settings)] == [{VISIBLE: f"GPU-{at}"} for at in range(4)]
    assert flags(settings, 3) == {"--replicas": "1", "--name": "host-3", "--runner": "gpu"}
    assert [one.cpus for one in replicas_of(settings_of(replicas="2", runner="gpu"))] == [(), ()]
    pairs = replicas_of(settings, ranks=2)
    assert [one.env[VISIBLE] for one in pairs] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]


def test_little_host_memory_is_divided_before_gpu_replicas_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "available_bytes", lambda: 16 << 30)
    assert flags(settings_of(replicas="4", runner="gpu"), 0)["--swap-space-gib"] == "1"
    assert "--swap-space-gib" not in flags(settings_of(replicas="4", runner="gpu", swap_space_gib=0.5), 0)


@pytest.mark.parametrize(
    ("given", "reason", "name"),
    [
        ({"replicas": "9"}, "replicas: 9 processes need a core each, but only 8 may be used", "replicas"),
        ({"replicas": "65"}, "at most 64 nodes of a host can be told apart", "replicas"),
        ({"replicas": "3", "num_threads": 4}, "num_threads 4: each of 3 replicas has 2", "num_threads"),
        ({"replicas": "2", "kv_cache_gib": 40}, "kv_cache_gib: .* 2 replicas take 80 GiB, but 64 GiB", "kv_cache_gib"),
        ({"replicas": "2", "swap_space_gib": 40}, "replicas: .* take 81 GiB, but 64 GiB", "replicas"),
        ({"replicas": "5", "runner": "gpu"}, "replicas 5: 4 GPUs are visible", "replicas"),
        ({"replicas": "2", "runner": "cuda:1"}, "runner cuda:1 is one GPU; give cuda", "replicas"),
        ({"replicas": "2", "remote_ranks": 1}, "replicas 2 with remote_ranks 1: ranks of other hosts", "replicas"),
        ({"replicas": "2", "metrics_port": 65_535}, "metrics_port 65535: replica 1 would need 65536", "metrics_port"),
    ],
)
def test_more_than_the_machine_has_is_refused_by_name(given: dict[str, Any], reason: str, name: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        replicas_of(settings_of(**given))
    assert refused.value.param == name


def test_ranks_of_replicas_without_a_core_each_are_refused_before_any_starts() -> None:
    assert len(replicas_of(settings_of(replicas="2"), ranks=4)) == 2
    with pytest.raises(ConfigError, match="replicas 2: its 5 ranks need a thread each, and one of 2 replicas has 4"):
        replicas_of(settings_of(replicas="2"), ranks=5)
    with pytest.raises(ConfigError, match="its 3 ranks need a thread each, and one of 2 replicas has 2"):
        replicas_of(settings_of(replicas="2", num_threads=2), ranks=3)


def test_gpus_that_are_wanted_and_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "devices_here", lambda: ())
    with pytest.raises(ConfigError, match="runner gpu: no GPU is visible"):
        replicas_of(settings_of(replicas="auto", runner="gpu"))
    with pytest.raises(ConfigError, match="replicas auto: 4 GPUs are visible, of which each replica needs 8"):
        monkeypatch.setattr(replicas, "devices_here", lambda: GPUS)
        replicas_of(settings_of(replicas="auto", runner="gpu"), ranks=8)


def test_the_flags_of_a_replica_come_last_and_its_drain_may_take_its_time() -> None:
    command = ChildCommand("node", ("penstock", "node", "m", "--name", "x"), {"A": "1"}, 110.0)
    own = replicas_of(settings_of(replicas="2", runner="gpu"))
    first, second = replica_commands(command, own)
    assert (first.name, second.name, second.grace_s) == ("node-0", "node-1", 110.0)
    assert second.argv[:5] == command.argv and second.argv[5:9] == ("--replicas", "1", "--name", "host-1")
    assert second.env == {"A": "1", VISIBLE: "GPU-1"}
    assert replica_commands(command, ()) == [command]


def test_serve_starts_the_same_replicas_and_one_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[ChildCommand, ...]] = []

    async def start_all(_: object, url: str, model: str, nodes: Sequence[ChildCommand], *_more: object) -> None:
        started.append(tuple(nodes))
        raise PenstockError("enough")

    monkeypatch.setattr("penstock.cli.serve.start_all", start_all)
    for options in (["--replicas", "2", "--device", "cpu"], ["--replicas", "auto", "--device", "cuda"], []):
        call_command("serve", "m", "--redis-url", "unix://x", *options)
    cores, gpus, one = started
    assert [(node.name, node.cpus) for node in cores] == [("node-0", (0, 1, 2, 3)), ("node-1", (4, 5, 6, 7))]
    assert [(node.name, node.env[VISIBLE]) for node in gpus] == [(f"node-{at}", f"GPU-{at}") for at in range(4)]
    assert [(node.name, node.cpus) for node in one] == [("node", ())]


@pytest.mark.parametrize(("options", "grace_s"), [((), (30.0, 40.0)), (("--drain-s", "100"), (110.0, 110.0))])
def test_serve_gives_its_parts_the_time_of_their_drain(
    options: Sequence[str], grace_s: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[float, float]] = []

    async def start_all(
        _: object, url: str, model: str, nodes: Sequence[ChildCommand], gateway: ChildCommand, _keeper: object
    ) -> None:
        started.append((nodes[0].grace_s, gateway.grace_s))
        raise PenstockError("enough")

    monkeypatch.setattr("penstock.cli.serve.start_all", start_all)
    call_command("serve", "m", "--redis-url", "unix://x", *options)
    assert started == [grace_s]


def test_the_settings_of_all_replicas_become_flags_again() -> None:
    given = {"weight_cache": False, "loop_debug": True, "dtype": None, "aliases": ["a", "b"], "runner": "cpu"}
    words = words_of(given, NODE_FLAGS)
    assert words == ("--no-weight-cache", "--loop-debug", "--alias", "a", "--alias", "b", "--runner", "cpu")


@pytest.mark.parametrize("words", ["0", "-1", "two", "1.5", ""])
def test_a_wrong_number_is_refused(words: str) -> None:
    done = run_command("node", "m", "--redis-url", "unix://x", f"--replicas={words}")
    assert done.returncode == 2
    assert "--replicas: must match the pattern" in done.stderr


# --- real processes: two replicas on two cores


class Replicas:
    """`penstock node --replicas 2` with the tiny model."""

    def __init__(self, redis_url: str, folder: Path, name: str) -> None:
        self._redis_url = redis_url
        self.name = name
        words = ("-m", "penstock", "node", str(make_tiny_model(folder / name)), "--replicas", "2", "--name", name)
        options = ("--redis-url", redis_url, "--kv-cache-gib", "0.01", "--drain-s", "100", "--log-format", "json")
        env = os.environ | {"PENSTOCK_NODE_DTYPE": "bfloat16", "PENSTOCK_NODE_LEASE_MS": "3000"}
        self.process = PythonProcess(*words, *options, env=env, imports=("penstock.gpu_node.model.loading.load",))
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said += self.process.stderr

    def nodes(self) -> list[NodePressure]:
        async def live() -> list[NodePressure]:
            async with AsyncClient(self._redis_url) as client:
                pools, _ = await client.pool_stats()
                return [node for pool in pools if pool.pool == self.name for node in pool.nodes]

        return asyncio.run(live())

    def numbers(self) -> list[str]:
        """Return the names of the live nodes, without the part that each process makes up."""
        return sorted({node.node_id.rpartition("-")[0] for node in self.nodes()})

    def processes(self) -> list[psutil.Process]:
        """Return all processes below the command: guards, nodes and theirs."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def pid_of(self, number: int) -> int:
        found: list[int] = [
            one.pid
            for one in self.processes()
            if f"{self.name}-{number}" in one.cmdline() and not any("process_guard" in word for word in one.cmdline())
        ]
        (pid,) = found
        return pid

    def until(self, is_so: Callable[[], bool]) -> None:
        wait_until(is_so, what=lambda: self.said, meanwhile=lambda: self.process.poll() is None)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._listener.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def started(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    monkeypatch.undo()
    if usable_cores() < 2:
        pytest.skip("there is one core")
    one = Replicas(redis_url, tmp_path, f"r{time.time_ns()}")
    try:
        one.until(lambda: len(one.numbers()) == 2)
        yield one
    finally:
        one.close()


def _ended(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    return not alive


def test_replicas_are_told_apart_restarted_alone_and_drain_together(started: Replicas) -> None:
    assert started.numbers() == [f"{started.name}-0", f"{started.name}-1"]
    cores = [os.sched_getaffinity(started.pid_of(number)) for number in (0, 1)]
    assert cores[0] and cores[1] and not cores[0] & cores[1]
    check = run_python(str(ROOT / "ops/node_alive.py"), env=os.environ | {"PENSTOCK_NODE_NAME": started.name})
    assert (check.returncode, check.stdout.count('"node_id"')) == (0, 2)

    before = {node.node_id for node in started.nodes()}
    os.kill(started.pid_of(0), signal.SIGKILL)
    started.until(lambda: any("node-0 serves again" in line for line in started.said))
    started.until(lambda: len({node.node_id for node in started.nodes()} - before) == 1)
    assert len({node.node_id for node in started.nodes()} & before) == 1
    assert any(line.startswith('{"part": "node-1", ') for line in started.said)

    processes = started.processes()
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(PATIENCE_S) == 0, started.said
    assert _ended(processes)
    assert sum('"message": "left"' in line for line in started.said) == 2, started.said


def test_a_second_signal_gives_the_jobs_back(started: Replicas, redis_url: str) -> None:
    async def submit() -> None:
        async with AsyncClient(redis_url) as client:
            for at in range(32):
                options: Any = {"model": started.name, "max_tokens": 1500, "ignore_eos": True, "background": True}
                await client.submit_unread(f"gate {at}", **options)

    asyncio.run(submit())
    started.until(lambda: sum(node.num_jobs for node in started.nodes()) > 0)
    started.process.send_signal(signal.SIGTERM)
    started.until(lambda: sum('"message": "draining"' in line for line in started.said) == 2)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(PATIENCE_S) == 0, started.said
    left = [json.loads(line) for line in started.said if '"message": "left"' in line]
    assert len(left) == 2 and sum(one["num_given_back"] for one in left) > 0, started.said


def test_no_replica_outlives_its_supervisor(started: Replicas) -> None:
    processes = started.processes()
    assert len(processes) >= 4
    started.process.kill()
    assert _ended(processes)
