"""The questions of the runbook: each command, on a system in which the cause was planted, shows the cause."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.queue.harness import POOL, Queue

from penstock.contract.errors import NotFoundError
from penstock.contract.pool import NodePressure
from penstock.contract.tenant import ApiKey
from penstock.gateway.http.middleware.access_log import log_socket_error
from penstock.gateway.metrics import GatewayMetrics
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.broker.steering import Steering
from penstock.runtime.logging import LogSettings, log_formatter
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.source_tree import ROOT

COMPLETION = {"model": MODEL, "prompt": "abcdef"}


def questions() -> dict[str, str]:
    """The runbook's questions, with their commands."""
    section = (ROOT / "ops/RUNBOOK.md").read_text().split("\n## Questions\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \|", section, re.MULTILINE))


@dataclass
class Planted:
    """The names of what was planted."""

    slow_job: str
    poison: str
    request_id: str = "the-stream-of-10-03"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What gateways of this process log, in JSON."""
    path = tmp_path_factory.mktemp("log") / "gateway.log"
    handler, logger = logging.FileHandler(path), logging.getLogger("penstock")
    with path.open("w") as stream:
        handler.setFormatter(log_formatter(LogSettings.load(log_format="json"), stream))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield path
    logger.removeHandler(handler)
    logger.setLevel(level)
    handler.close()


@pytest.fixture(scope="module")
def planted(stack: Stack, shared_engine: EchoEngine, url: str, log: Path) -> Planted:
    found = stack.call(plant_in_queue(stack.redis_url))
    with httpx.Client(base_url=url, timeout=60) as http, sync_redis.Redis.from_url(stack.redis_url) as client:
        asked = {"json": COMPLETION | {"stream": True}, "headers": {"X-Request-Id": found.request_id}}
        assert http.post("/v1/completions", **asked).status_code == 200  # type: ignore[arg-type]
        limit = client.hget(keys.config("echo"), "max_open_jobs")
        client.hset(keys.config("echo"), "max_open_jobs", 0)
        assert http.post("/v1/completions", json=COMPLETION).status_code == 429
        client.hset(keys.config("echo"), "max_open_jobs", limit)
        client.config_set("appendonly", "yes")
    return found


async def plant_in_queue(redis_url: str) -> Planted:
    async with connect(redis_url) as redis:
        queue = Queue(redis)
        victim = await queue.node("victim", max_losses=1)
        poison = (await queue.running(victim)).job_id
        await queue.kill(victim)
        for name, step_ms in (("quick", 21.0), ("sluggish", 87.0)):
            node = await queue.node(name)
            told = NodePressure(name, kv_blocks_total=10, step_ms_p50=step_ms, max_num_seqs=4)
            await node.broker.heartbeat(told, free=10, answered_call=0, held=None)
        for _ in range(7):
            await queue.submit(tenant="greedy")
        slow = await queue.submit(tenant="modest")
        await queue.producer.cancel(await queue.submit(tenant="greedy"), "greedy")
        await Steering(redis).pause(POOL, ["tenant:modest"], on=True)
        return Planted(slow, poison)


def run(command: str, log: Path, redis_url: str) -> str:
    words = shlex.split(command)
    if words[0] == "penstock":
        return run_command(*words[1:], PENSTOCK_REDIS_URL=redis_url, COLUMNS="160").stdout
    return subprocess.run(words, cwd=log.parent, capture_output=True, text=True, check=True).stdout


def of_node(text: str, node: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(node))


def shows_slower(text: str, _: Planted) -> bool:
    return "87ms" in of_node(text, "sluggish") and "21ms" in of_node(text, "quick")


def shows_greedy(text: str, _: Planted) -> bool:
    return bool(re.search(r"\bgreedy +7 +0\b.*", text)) and text.rindex("greedy") < text.rindex("modest")


ANSWERS: dict[str, Callable[[str, Planted], Any]] = {
    "why is this job slow?": lambda text, _: (
        "waits for a pause of its tenant" in text and "penstock pools resume" in text
    ),
    "which tenant fills the queue?": shows_greedy,
    "which node is slower?": shows_slower,
    "why does this caller get 429?": lambda text, _: re.search(r'"code": "pool_busy", "pool": "echo"', text),
    "what became of this stream?": lambda text, _: re.search(r'"outcome": "complete".*"ttft_s": ', text),
    "which job kills nodes?": lambda text, planted: planted.poison.rpartition(".")[2] in text,
    "what fills the disk?": lambda text, _: re.search(r"append-only file is on: \d+ MiB", text),
}


def test_each_question_has_its_answer_here() -> None:
    assert questions().keys() == ANSWERS.keys()


@pytest.mark.parametrize("question", ANSWERS)
def test_the_command_of_a_question_shows_the_planted_cause(
    stack: Stack, planted: Planted, log: Path, question: str
) -> None:
    command = questions()[question].replace("JOB", planted.slow_job).replace("REQUEST_ID", planted.request_id)
    text = run(command, log, stack.redis_url)
    assert ANSWERS[question](text, planted), text


def test_the_fields_that_the_runbook_names_are_those_of_real_lines(stack: Stack, planted: Planted, log: Path) -> None:
    log_socket_error(GatewayMetrics(), NotFoundError("no"), ApiKey(key_id="k1", digest="", tenant="acme"), "/v1/stream")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    text = (ROOT / "ops/RUNBOOK.md").read_text().split("- **Logs**", 1)[1].split("\n- **", 1)[0]
    named = set(re.findall(r"`([a-z_]+)`", text)) - {"complete", "failed", "caller_left"}
    of_jobs = {"job_id", "finish_reason"}
    assert of_jobs | {"status", "outcome", "ttft_s", "key_id"} < named
    assert named - {"reason"} - {name for line in lines for name in line} == set()
    ended = [line for line in lines if line["message"] == "job.ended"]
    assert all(of_jobs <= line.keys() for line in ended)
    assert any("output_tokens" not in line for line in ended), "that of a job that no node ended"
    assert any("output_tokens" in line for line in ended)
    requests = [line for line in lines if line["message"] == "request"]
    assert named - of_jobs - {"reason", "key_id"} - {name for line in requests for name in line} == set()
