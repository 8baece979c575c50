"""Thousands of changed model files: each is refused by name, or its model answers. `make check-full` runs all of them.

Each runs in a fork (model_files.py). Fifty are served by `penstock node` too, and asked over HTTP.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess
from hostile import model_files, mutations

COUNT, FEW, SERVED = 5_000, 25, 50
ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "tests", ROOT / "ops")


def _campaign(tmp_path: Path, *words: str, timeout_s: float) -> None:
    """Run it as a process of its own, which has one thread when it forks."""
    command = [sys.executable, "-m", "hostile.model_files", *words]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]


def test_a_few_changed_files_are_refused_by_name_or_their_model_answers(tmp_path: Path) -> None:
    _campaign(tmp_path, "--few", "--count", str(FEW), timeout_s=300)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_thousands_of_changed_files_are_refused_by_name_or_their_models_answer(tmp_path: Path) -> None:
    _campaign(tmp_path, "--count", str(COUNT), timeout_s=2300)


def test_a_number_makes_the_same_change_every_time(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    made = []
    for _ in range(2):
        path.write_text('{"hidden_size": 64, "rope_parameters": {"rope_theta": 1.0}, "architectures": ["A"]}')
        made.append((mutations.change(random.Random(7), path), path.read_bytes()))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("end", "message", "problem"),
    [
        ("refused", "cannot load m: hidden_size is -1 in config.json", None),
        ("refused", "cannot load m: list index out of range in config.json", "names no field"),
        ("refused", "list index out of range", "names no file"),
        ("fault", "Traceback", "fault"),
        ("killed", "status -9", "killed"),
        ("answered", "", None),
        ("request refused", "the text is too long", None),
    ],
)
def test_the_campaign_sees_what_is_wrong(end: str, message: str, problem: str | None) -> None:
    tried = model_files.Tried(1, "llama", "hidden_size = -1", "hidden_size", "config.json", end, message)
    assert tried.problem == problem


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_node_ends_with_status_2_and_a_sentence_or_answers_over_http(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "bases").mkdir()
    bases = [base for base in model_files.make_bases(tmp_path / "bases") if base.name != "adapter"]
    problems: list[str] = []
    with GatewayProcess(redis_url) as gateway:
        for number in range(COUNT, COUNT + SERVED):
            folder = tmp_path / str(number)
            folder.mkdir()
            base, model, made = model_files.changed_copy(number, bases, folder)
            if (problem := _problem_of_node(redis_url, gateway.url, number, model)) is not None:
                problems.append(f"{number} {base.name}/{made.path.name}: {made.what}: {problem}")
            shutil.rmtree(folder, ignore_errors=True)
    assert problems == []


def _problem_of_node(redis_url: str, gateway_url: str, number: int, model: Path) -> str | None:
    """Serve a model and ask it. Return what is wrong with what a caller or an operator sees."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "num_kv_blocks": 64, "max_num_seqs": 2, "weight_cache": False}
    node = NodeProcess(redis_url, model=model, name=f"m{number}", **settings)
    try:
        while (event := node.next_event()) is not None and event["event"] != "ready":
            pass
        if event is None:
            status, log = node.wait(), node.log
            sentence = next((line for line in log.splitlines() if '"the process ends"' in line), "")
            is_good = status == 2 and str(model) in sentence and "Traceback" not in log
            return None if is_good else f"status {status}: {log[-2000:]}"
        chat = {"model": f"m{number}", "messages": [{"role": "user", "content": "the gate"}], "max_tokens": 4}
        answer = httpx.post(f"{gateway_url}/v1/chat/completions", json=chat, timeout=60)
        return None if answer.status_code < 500 else f"{answer.status_code} {answer.text}\n{node.log[-2000:]}"
    finally:
        node.close()
