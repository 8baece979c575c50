"""A Prometheus server scrapes a running system, and the query of every panel returns data."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fakes.waiting import wait_until
from faults.tools.redis_process import RedisProcess, free_port
from fixtures.tiny_model import make_tiny_model
from observe.grafana import BOARDS
from observe.records import substituted

from tests.source_tree import ROOT

PROMETHEUS = shutil.which("prometheus")
LOAD_S = 30.0
ABSENT = {"a GPU", "a webhook that waits", "a problem of Redis", "a stream that failed"}
"""What this test's system does not have."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (Debian: prometheus)"),
]


@contextmanager
def process(log: Path, *words: str, **env: str) -> Iterator[None]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    with log.open("w") as file, subprocess.Popen(words, env=clean | env, stdout=file, stderr=file) as running:
        try:
            yield
        finally:
            running.terminate()


def until_it_answers(url: str, folder: Path) -> None:
    wait_until(
        lambda: httpx.get(url, timeout=5).status_code == 200,
        what=lambda: url + "\n" + "\n".join(log.read_text()[-1500:] for log in folder.glob("*.log")),
        but=httpx.TransportError,
    )


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that has scraped a gateway, a node of two ranks and a worker under load."""
    folder = tmp_path_factory.mktemp("system")
    model = make_tiny_model(folder / "tiny")
    redis_port, gateway_port, node_port, worker_port, own_port = (free_port() for _ in range(5))
    python, redis_url = (sys.executable, "-m"), f"redis://127.0.0.1:{redis_port}"
    env = {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_FILES_URL": str(folder / "files")}
    gateway, node = f"http://127.0.0.1:{gateway_port}", f"http://127.0.0.1:{node_port}"
    of_node = (str(model), "--metrics-port", str(node_port), "--tensor-parallel-size", "2", "--dtype", "bfloat16")
    celery = (*python, "celery", "-A", "penstock.producer.batch.app", "worker", "--pool", "threads")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "ops/observe/alerts.yml")],
        "scrape_configs": [
            {"job_name": f"penstock-{name}", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for name, port in (("gateway", gateway_port), ("node", node_port), ("worker", worker_port))
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    assert PROMETHEUS is not None
    with ExitStack() as stack:
        stack.callback(RedisProcess(folder / "redis", port=redis_port, maxmemory="256mb").start().stop)
        replica = RedisProcess(folder / "replica", port=free_port(), replicaof=("127.0.0.1", redis_port))
        stack.callback(replica.start().stop)
        stack.enter_context(process(folder / "node.log", *python, "penstock", "node", *of_node, **env))
        stack.enter_context(
            process(folder / "gateway.log", *python, "penstock", "gateway", "--port", str(gateway_port), **env)
        )
        stack.enter_context(
            process(
                folder / "worker.log",
                *celery,
                "--concurrency",
                "4",
                **env,
                PENSTOCK_CELERY_METRICS_PORT=str(worker_port),
            )
        )
        for url in (f"{gateway}/ready", f"{node}/metrics", f"http://127.0.0.1:{worker_port}/metrics"):
            until_it_answers(url, folder)
        words = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
        address = f"--web.listen-address=127.0.0.1:{own_port}"
        stack.enter_context(process(folder / "prometheus.log", PROMETHEUS, *words, address))
        until_it_answers(f"http://127.0.0.1:{own_port}/-/ready", folder)
        run_load(gateway, folder, env)
        yield f"http://127.0.0.1:{own_port}"


def run_load(gateway: str, folder: Path, env: dict[str, str]) -> None:
    """Send streams, refused requests and batch files for a while."""
    rows = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "tiny", "prompt": f"once upon {number}", "max_tokens": 8},
        }
        for number in range(40)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    end_s, number = time.monotonic() + LOAD_S, 0
    with httpx.Client(base_url=gateway, timeout=60) as http:
        while time.monotonic() < end_s:
            number += 1
            body = {"model": "tiny", "prompt": f"once {number}", "max_tokens": 24, "stream": True, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/completions", json={"model": "tiny", "max_tokens": -1}).status_code == 400
            if number % 20 == 1:
                words = ("batch", "run", str(folder / "in.jsonl"), str(folder / f"out{number}.jsonl"), "--via-celery")
                clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
                run = subprocess.run(
                    [sys.executable, "-m", "penstock", *words], env=clean | env, capture_output=True, text=True
                )
                assert run.returncode == 0, run.stderr


def values_of(prometheus: str, expr: str) -> list[float]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expr}, timeout=30).json()
    assert answer["status"] == "success", f"{expr}: {answer}"
    return [float(sample["value"][1]) for sample in answer["data"]["result"]]


def test_the_query_of_every_panel_returns_data(prometheus: str) -> None:
    panels = [(board.name, panel) for board in BOARDS for row in board.rows for panel in row.panels]
    asked = [
        (name, panel.title, substituted(query.expr))
        for name, panel in panels
        if panel.needs not in ABSENT
        for query in panel.queries
    ]
    assert len(asked) > 90
    empty = [one for one in asked if not any(map(math.isfinite, values_of(prometheus, one[2])))]
    assert empty == []


def test_the_values_of_the_variables_are_found(prometheus: str) -> None:
    queries = {variable.query for board in BOARDS for variable in board.variables}
    for query in queries:
        metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
        params = {"match[]": metric}
        found = httpx.get(f"{prometheus}/api/v1/label/{label}/values", params=params, timeout=30).json()["data"]
        assert found, query


def test_all_rules_are_evaluated_and_none_fires(prometheus: str) -> None:
    groups: list[dict[str, Any]] = httpx.get(f"{prometheus}/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 25
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
