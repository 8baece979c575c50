"""`penstock submit` streams a job's answer to stdout; the node is real, its engine is the reference one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess, run_python
from fakes.waiting import until

from penstock.contract.fields import option_of
from penstock.contract.job import QueueFields
from penstock.contract.tasks import Embedding
from penstock.producer.client import Client
from penstock.runtime.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module")
def pool() -> Iterator[str]:
    """URL of a Redis with a running node."""
    with EmbeddedRedis() as server, NodeProcess(server.url, step_s=0.01):
        yield server.url


def command(redis_url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "submit", *arguments, "--redis-url", redis_url]


def submit(redis_url: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_command("submit", *arguments, "--redis-url", redis_url, stdin=stdin)


def test_answer_comes_to_stdout(pool: str) -> None:
    done = submit(pool, "hello", "--raw", "--seed", "7", "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    with Client(pool) as client:
        assert done.stdout == client.submit("hello", seed=7, max_tokens=5).result().choices[0].text + "\n"


def test_a_durability_that_this_redis_cannot_promise_is_refused(pool: str) -> None:
    assert submit(pool, "hello", "--raw", "--max-tokens", "2", "--durability", "memory").returncode == 0
    done = submit(pool, "hello", "--durability", "fsync")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: --durability: fsync is not possible, because this is ")


def test_prompt_can_come_from_stdin(pool: str) -> None:
    sampling = ("--raw", "--seed", "7", "--max-tokens", "5")
    wanted = submit(pool, "hello", *sampling).stdout
    assert submit(pool, "-", *sampling, stdin="hello").stdout == wanted
    assert submit(pool, *sampling, stdin="hello").stdout == wanted


def test_prompt_that_is_no_valid_text_is_refused_in_one_line(pool: str) -> None:
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command(pool, "-", "--raw"), input=b"a\xff", env=strict, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"penstock: PROMPT: text must be valid Unicode") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("option", "value"), [("temperature", "11"), ("top-p", "-0.1"), ("top-p", "1.5")])
def test_wrong_parameter_is_one_line_and_exit_code_2(pool: str, option: str, value: str) -> None:
    done = submit(pool, "hello", f"--{option}", value)
    assert done.returncode == 2
    assert f"--{option}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unknown_model_is_one_line_and_exit_code_2(pool: str) -> None:
    done = submit(pool, "hello", "--model", "nonesuch")
    assert done.returncode == 2
    assert "nonesuch" in done.stderr


def test_ctrl_c_cancels_the_job(pool: str) -> None:
    _, *words = command(pool, "hello", "--raw", "--max-tokens", "20000")
    running = PythonProcess(*words)
    assert running.stdout is not None
    assert running.stdout.read(1)

    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "Traceback" not in errors
    asyncio.run(_until_idle(pool))


async def _until_idle(redis_url: str) -> None:
    from penstock.queue.broker.connection import connect

    async with connect(redis_url) as redis:
        await until(lambda: redis.scard("penstock:{reference}:open"), lambda seen: not seen, what="the job still runs")


def test_error_without_a_redis_says_how_to_name_one() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PENSTOCK_REDIS_URL"}
    done = run_python("-m", "penstock", "submit", "x", env=clean)
    assert done.returncode == 2
    assert "--redis-url" in done.stderr and done.stderr.count("\n") == 1


LINES: list[dict[str, Any]] = [
    {"prompt": "hello", "seed": 7, "max_tokens": 5, "custom_id": "a"},
    {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "hello", "seed": 7, "max_tokens": 4, "ttl_s": 600},
    },
]


def lines_of(found: list[Any]) -> str:
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in found)


def test_each_line_of_a_file_becomes_a_background_job(pool: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(lines_of([LINES[0], "", LINES[1]]))
    for done in (
        submit(pool, "--jsonl", str(path), "--priority", "batch"),
        submit(pool, "--jsonl", "-", "--ttl", "600", stdin=path.read_text()),
    ):
        assert done.returncode == 0, done.stderr
        shown = [json.loads(line) for line in done.stdout.splitlines()]
        assert [(one["line"], one["custom_id"], one["state"]) for one in shown] == [
            (1, "a", "queued"),
            (3, "b", "queued"),
        ]
        with Client(pool) as client:
            results = [client.result(one["id"]) for one in shown]
        assert [len(result.choices[0].token_ids) for result in results] == [5, 4]
        assert results[0].choices[0].text.startswith(results[1].choices[0].text)


def test_a_line_with_a_url_keeps_what_its_body_says_of_the_queue(pool: str) -> None:
    said = {"tags": ["of-body"], "metadata": {"a": "b"}, "not_before_s": 600, "deadline_s": 900}
    line = {"url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 2, **said}}
    done = submit(pool, "--jsonl", "-", "--tag", "of-flag", stdin=lines_of([line]))
    assert json.loads(done.stdout)["state"] == "scheduled", done.stdout
    with Client(pool) as client:
        (job,) = client.jobs(tag="of-body").jobs
        client.cancel(job.job_id)
    assert (job.metadata, job.tags) == ({"a": "b"}, ("of-body",))


def test_a_line_with_texts_to_embed_is_one_embedding(pool: str) -> None:
    one, two = ({"url": "/v1/embeddings", "body": {"input": texts}} for texts in ("hello", ["hello", "there"]))
    shown = [json.loads(line) for line in submit(pool, "--jsonl", "-", stdin=lines_of([one, two])).stdout.splitlines()]
    with Client(pool) as client:
        assert isinstance(client.result(shown[0]["id"]).output, Embedding)
    assert shown[1]["error"]["param"] == "input"
    assert "a line is one job and has one text, not 2" in shown[1]["error"]["message"]


def test_every_option_of_the_queue_with_a_help_text_is_a_flag() -> None:
    listed = run_command("submit", "--help").stdout
    flagged = [name for name in QueueFields.model_fields if option_of(QueueFields, name).flag]
    assert {"deadline_s", "ttl_s", "tags", "channel"} <= {*flagged}
    for name in flagged:
        flag = {"tags": "tag"}.get(name, name.removesuffix("_s")).replace("_", "-")
        assert f"--{flag} " in listed


def test_a_wrong_line_of_a_file_refuses_only_itself(pool: str) -> None:
    wrong: list[Any] = ["{", "3", {"custom_id": "c"}, {"prompt": "x", "heat": 1}, {"prompt": "x", "ttl_s": -1}]
    wrong += [{"url": "/v1/models", "body": {}}, {**LINES[1], "body": {"prompt": "x", "heat": 1}}]
    done = submit(pool, "--jsonl", "-", stdin=lines_of([*wrong, LINES[0]]))
    assert done.returncode == 1
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["line"] for one in shown] == [*range(1, 9)]
    params = [one["error"]["param"] for one in shown[:-1]]
    assert params == [None, None, "prompt", "heat", "ttl_s", "url", "heat"]
    assert shown[2]["custom_id"] == "c"
    assert "id" in shown[-1]


def test_a_file_and_a_prompt_are_refused(pool: str, tmp_path: Path) -> None:
    done = submit(pool, "hello", "--jsonl", "-")
    assert (done.returncode, done.stderr.startswith("penstock: PROMPT")) == (2, True), done.stderr
    done = submit(pool, "--jsonl", str(tmp_path / "none"))
    assert (done.returncode, "none cannot be read: No such file" in done.stderr) == (2, True), done.stderr


def test_a_wrong_ttl_is_named(pool: str) -> None:
    done = submit(pool, "hello", "--ttl", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: --ttl must be above 0 and at most 31622400 seconds")
