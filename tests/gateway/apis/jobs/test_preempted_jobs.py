"""`/v1/jobs/{id}` says how often the engine preempted a job, with a KV cache that is too small for all jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fakes.runners.faulty_runner import FaultyRunner
from fakes.waiting import wait_until
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.engine import Engine, EngineConfig
from tests.gateway.apis.jobs.test_jobs import ended, shown
from tests.gateway.conftest import Stack


@pytest.fixture(scope="module")
def engine(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The engine of a small real model, with 80 KV tokens on the device and 144 on the host."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    blocks = {"num_kv_blocks": 5, "num_swap_blocks": 9}
    engine = Engine(EngineConfig(model=str(folder), **blocks, num_threads=1, scheduling_policy="priority"))
    slow = FaultyRunner(engine._runner, lambda at, _: time.sleep(0.005) if at == "start" else None)
    engine._runner = cast(Any, slow)
    stack.start_node(cast(Any, engine), model="acme/small", pool="small", scheduling_policy="priority")
    return engine


def test_a_jobs_ledger_counts_how_often_the_engine_preempted_it(http: httpx.Client, engine: Engine) -> None:
    def submitted(priority: str, num_prompt: int, num_tokens: int) -> str:
        params = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        body = {"model": "acme/small", "tokens": [*range(3, 3 + num_prompt)], "params": params, "priority": priority}
        answer = http.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    large = submitted("batch", 147, 70)
    wait_until(lambda: shown(http, large)["num_chunks"])
    urgent = submitted("standard", 20, 10)
    ledgers = [ended(http, job_id)["ledger"] for job_id in (urgent, large)]
    assert [ledger["engine_preemptions"] for ledger in ledgers] == [0, 1]
    assert [ledger["preemptions"] for ledger in ledgers] == [0, 0], "no job moved"
    assert engine.stats().num_preemptions == 1
