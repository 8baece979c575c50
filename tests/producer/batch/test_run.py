"""A file of requests becomes a file of results, each row once, whatever fails during the run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import fsspec
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.processes.reference_engine import reference_tokens, text_of
from fakes.waiting import until

from penstock.contract.errors import (
    BusyError,
    JobFailedError,
    NotFoundError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.contract.job import SamplingParams
from penstock.contract.output import Outcome, Result
from penstock.producer.batch.answer import answer
from penstock.producer.batch.finished import row_id_of
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.request import request_of_line
from penstock.producer.batch.runner import run_batch
from tests.producer.batch.conftest import (
    Row,
    chat_row,
    completion_row,
    kill_group,
    num_lines,
    process,
    reference_node,
    rows_in,
    wait_for_lines,
    write_rows,
)

NOWHERE = "unix:///nonexistent/redis.sock"


def batch_of(tmp_path: Path, rows: list[Row], **options: Any) -> Batch:
    path = write_rows(tmp_path / "in.jsonl", rows)
    return Batch(str(path), str(tmp_path / "out.jsonl"), **options)


def job_ids(url: str) -> set[bytes]:
    with sync_redis.Redis.from_url(url) as client:
        return set(client.keys("penstock:{ref}:job:*"))


def taken_ms(url: str, name: bytes) -> int:
    with sync_redis.Redis.from_url(url) as client:
        return int(client.hget(name, "taken") or 0)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_every_row_is_answered_once(served_url: str, tmp_path: Path) -> None:
    rows = [chat_row(f"chat-{i}") if i % 2 else completion_row(f"text-{i}", n=2) for i in range(200)]
    seen: list[BatchProgress] = []

    done = await run_batch(served_url, batch_of(tmp_path, rows), seen.append)

    results = {row["custom_id"]: row for row in rows_in(tmp_path / "out.jsonl")}
    assert num_lines(tmp_path / "out.jsonl") == len(results) == 200
    assert results.keys() == {row["custom_id"] for row in rows}
    for row in rows:
        response = results[row["custom_id"]]["response"]
        prompt = row["body"].get("prompt") or row["body"]["messages"][0]["content"]
        params = SamplingParams(max_tokens=8, n=row["body"].get("n", 1))
        for choice in response["body"]["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            wanted = reference_tokens(response["request_id"], params, list(prompt.encode()), choice["index"])
            assert text == text_of(wanted)
        assert len(response["body"]["choices"]) == params.n
        assert response["body"]["model"] == "reference"
    assert done == BatchProgress(200, 200, 0, done.prompt_tokens, 100 * 8 + 100 * 16)
    assert seen[0] == BatchProgress(200)
    assert seen[-1] == done
    assert [p.num_done for p in seen] == sorted(p.num_done for p in seen)
    assert files_in(tmp_path) == {"in.jsonl", "out.jsonl"}


async def test_a_durability_that_this_redis_cannot_promise_fails_each_row(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row(f"disk-{i}") for i in range(2)], durability="fsync")
    done = await run_batch(served_url, batch)
    assert (done.num_answered, done.num_failed) == (0, 2)
    codes = {row["error"]["code"] for row in rows_in(tmp_path / "out.jsonl")}
    assert codes == {"unsupported_durability"}


def test_an_unknown_durability_is_refused() -> None:
    with pytest.raises(RequestError, match="durability must be one of memory, fsync, replicated, not 'disk'") as caught:
        Batch("in", "out", durability="disk")
    assert caught.value.param == "durability"


async def test_no_row_is_taken_before_its_time(served_url: str, tmp_path: Path) -> None:
    earlier, not_before_s = job_ids(served_url), time.time() + 0.5
    batch = batch_of(tmp_path, [chat_row(f"night-{i}") for i in range(5)], not_before_s=not_before_s)
    assert (await run_batch(served_url, batch)).num_answered == 5
    jobs = job_ids(served_url) - earlier
    assert len(jobs) == 5
    assert min(taken_ms(served_url, name) for name in jobs) >= 1000 * not_before_s


def test_a_time_too_far_ahead_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 31622400 s in the future") as caught:
        Batch("in", "out", not_before_s=time.time() + 367 * 24 * 3600)
    assert caught.value.param == "not_before_s"


async def test_rows_that_cannot_be_answered_become_error_rows(served_url: str, tmp_path: Path) -> None:
    rows = [
        chat_row("good"),
        chat_row("stream", stream=True),
        chat_row("unknown", max_tokns=3),
        chat_row("wrong", n=99),
        chat_row("role", messages=[{"role": "judge", "content": "x"}]),
        chat_row("model", model="another"),
        completion_row("long", prompt="x" * 5000),
    ]
    done = await run_batch(served_url, batch_of(tmp_path, rows))

    errors = {row["custom_id"]: row["error"] for row in rows_in(tmp_path / "out.jsonl")}
    assert (done.num_answered, done.num_failed) == (1, 6)
    assert errors.pop("good") is None
    assert {name: error["code"] for name, error in errors.items()} == {
        "stream": "unsupported_value",
        "unknown": "unknown_field",
        "wrong": "invalid_request",
        "role": "invalid_request",
        "model": "model_not_found",
        "long": "context_length_exceeded",
    }
    assert (errors["stream"]["param"], errors["unknown"]["param"]) == ("stream", "max_tokns")
    assert "n:" in errors["wrong"]["message"]


async def test_a_row_may_have_a_deadline_and_a_ttl(served_url: str, tmp_path: Path) -> None:
    rows = [
        chat_row("in time", deadline_s=60, ttl_s=60),
        completion_row("late", max_tokens=4000, deadline_s=0.3),
        completion_row("wrong", ttl_s=0),
        chat_row("too far", deadline_s=31_622_401),
    ]
    done = await run_batch(served_url, batch_of(tmp_path, rows))
    assert (done.num_answered, done.num_failed) == (1, 3)
    errors = {row["custom_id"]: row["error"] for row in rows_in(tmp_path / "out.jsonl")}
    assert errors["in time"] is None
    assert errors["late"]["code"] == "deadline_exceeded"
    assert (errors["wrong"]["param"], errors["too far"]["param"]) == ("ttl_s", "deadline_s")


async def test_an_answer_of_a_pool_whose_record_has_gone_names_the_pool() -> None:
    client, job = AsyncMock(), AsyncMock(id="ref.id", pool="ref")
    client.submit.return_value = job
    client.pools.return_value = {}
    job.result.return_value = Result("ref.id", Outcome("succeeded"), (), None)
    _, body = await answer(client, request_of_line(chat_row("a")), "key")
    assert body["model"] == "ref"


@pytest.mark.parametrize(("code", "kind"), [("unavailable", JobFailedError), ("not_found", NotFoundError)])
async def test_job_that_has_ended_is_not_submitted_again(code: str, kind: type[PenstockError]) -> None:
    """Whatever a job failed of, its idempotency key would only find it again."""
    client, job = AsyncMock(), AsyncMock()
    client.submit.return_value = job
    job.result.return_value = Result("ref.id", Outcome("failed", code, "over"))
    request = request_of_line(chat_row("a"))
    with pytest.raises(kind, match="over"):
        await answer(client, request, "key")


async def test_a_duplicate_is_refused_before_anything_is_submitted(served_url: str, tmp_path: Path) -> None:
    before = job_ids(served_url)
    with pytest.raises(RequestError, match="line 3"):
        await run_batch(served_url, batch_of(tmp_path, [chat_row("a"), chat_row("b"), chat_row("a")]))
    assert job_ids(served_url) == before
    assert files_in(tmp_path) == {"in.jsonl"}


async def test_no_more_than_the_limit_is_in_flight(served_url: str, tmp_path: Path) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=20) for i in range(40)]
    most = 0
    with sync_redis.Redis.from_url(served_url) as client:
        running = asyncio.create_task(run_batch(served_url, batch_of(tmp_path, rows, max_in_flight=5)))
        while not running.done():
            most = max(most, client.scard("penstock:{ref}:open"))
            await asyncio.sleep(0.005)
    assert (await running).num_answered == 40
    assert most == 5


async def test_batch_waits_for_a_full_pool(served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A node of which nothing is known yet says: in some seconds.
    monkeypatch.setattr("penstock.producer.batch.run.random", SimpleNamespace(uniform=lambda *_: 0.05))
    seen: list[str] = []
    rows = [chat_row(f"row-{i}", model="small") for i in range(12)]
    with reference_node(served_url, pool="small", step_s=0.02, max_open_jobs=8):
        done = await run_batch(served_url, batch_of(tmp_path, rows), lambda progress: seen.append(progress.waiting))
    with sync_redis.Redis.from_url(served_url) as client:
        client.hdel("penstock:pools", "small")
    assert done.num_answered == 12
    assert any("8 open jobs" in waiting for waiting in seen)


async def test_a_batch_waits_for_its_first_node(redis_url: str, tmp_path: Path) -> None:
    waits = asyncio.Event()

    def note(progress: BatchProgress) -> None:
        if "no model" in progress.waiting:
            waits.set()

    running = asyncio.create_task(run_batch(redis_url, batch_of(tmp_path, [chat_row("a")]), note))
    await asyncio.wait_for(waits.wait(), 60)
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, reference_node(redis_url))
        assert (await running).num_answered == 1


def test_killed_batch_continues_where_it_was(served_url: str, tmp_path: Path) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=40) for i in range(200)]
    write_rows(tmp_path / "in.jsonl", rows)
    command = (
        sys.executable,
        "-m",
        "penstock",
        "batch",
        "run",
        str(tmp_path / "in.jsonl"),
        str(tmp_path / "out.jsonl"),
    )
    before = job_ids(served_url)
    with process(*command, "--in-flight", "16", PENSTOCK_REDIS_URL=served_url) as first:
        wait_for_lines(tmp_path / "out.jsonl.partial", 30, first)
        kill_group(first)
    written = rows_in(tmp_path / "out.jsonl.partial")
    assert 30 <= len(written) < 200
    assert not (tmp_path / "out.jsonl").exists()
    with (tmp_path / "out.jsonl.partial").open("ab") as file:
        file.write(b'{"id": "torn')

    with process(*command, PENSTOCK_REDIS_URL=served_url) as second:
        said = second.communicate(timeout=60)[0]

    assert second.returncode == 0, said
    assert "200 answered, 0 failed" in said
    results = rows_in(tmp_path / "out.jsonl")
    assert results[: len(written)] == written
    assert Counter(row["custom_id"] for row in results) == Counter(row["custom_id"] for row in rows)
    assert len(job_ids(served_url) - before) == 200, "no row was asked twice"
    assert files_in(tmp_path) == {"in.jsonl", "out.jsonl"}


async def test_a_finished_batch_is_left_as_it_is(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row("a"), chat_row("b", n=99)])
    first = await run_batch(served_url, batch)
    written = (tmp_path / "out.jsonl").read_bytes()

    assert await run_batch(NOWHERE, batch) == first

    assert (tmp_path / "out.jsonl").read_bytes() == written
    assert files_in(tmp_path) == {"in.jsonl", "out.jsonl", "out.errors.jsonl"}


async def test_another_batchs_output_is_refused_and_kept(served_url: str, tmp_path: Path) -> None:
    await run_batch(served_url, batch_of(tmp_path, [chat_row("a")]))
    written = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(RequestError, match="another batch"):
        await run_batch(served_url, batch_of(tmp_path, [chat_row("a", seed=1)]))
    assert (tmp_path / "out.jsonl").read_bytes() == written

    (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.partial")
    with pytest.raises(RequestError, match="another batch"):
        await run_batch(served_url, batch_of(tmp_path, [chat_row("a", seed=1)]))
    assert (tmp_path / "out.jsonl.partial").read_bytes() == written


async def test_an_incomplete_output_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row("a"), chat_row("b")], batch_id="mine")
    row = {"id": row_id_of("mine", "a"), "custom_id": "a", "response": None, "error": {"code": "x"}}
    write_rows(tmp_path / "out.jsonl", [row])
    with pytest.raises(RequestError, match="exists"):
        await run_batch(NOWHERE, batch)


async def test_one_output_has_one_writer(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row(f"row-{i}", max_tokens=400) for i in range(20)])
    first = asyncio.create_task(run_batch(served_url, batch))
    await until((tmp_path / "out.jsonl.partial").exists)
    with pytest.raises(BusyError, match="another run") as caught:
        await run_batch(served_url, batch)
    assert caught.value.code == "batch_running"
    assert (await first).num_answered == 20
    assert num_lines(tmp_path / "out.jsonl") == 20


async def test_a_writer_that_waited_at_the_lock_finds_the_published_file(
    served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our lock, the run before us publishes."""
    batch = batch_of(tmp_path, [chat_row("a")])
    first = await run_batch(served_url, batch)
    os.rename(tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial")
    real, calls = fcntl.flock, []

    def publish_then_lock(file: Any, operation: int) -> None:
        if not calls:
            os.rename(tmp_path / "out.jsonl.partial", tmp_path / "out.jsonl")
        calls.append(operation)
        real(file, operation)

    monkeypatch.setattr("fcntl.flock", publish_then_lock)
    assert await run_batch(NOWHERE, batch) == first
    assert len(calls) == 2
    assert num_lines(tmp_path / "out.jsonl") == 1


async def test_a_run_without_its_output_file_answers_every_row_again(served_url: str, tmp_path: Path) -> None:
    rows = [chat_row("a")]
    ids = []
    for batch_id in ("one", "one", "two"):
        await run_batch(served_url, batch_of(tmp_path, rows, batch_id=batch_id))
        ids += [row["response"]["request_id"] for row in rows_in(tmp_path / "out.jsonl")]
        (tmp_path / "out.jsonl").unlink()
    assert len(set(ids)) == 3, "results that a run has written are freed"


async def test_fsspec_urls_can_be_read_and_written(
    served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    source = write_rows(tmp_path / "in.jsonl", [chat_row("a"), chat_row("b")]).read_bytes()
    store = fsspec.filesystem("memory")
    store.pipe("/batch/in.jsonl", source)
    batch = Batch("memory://batch/in.jsonl", "memory://batch/out.jsonl")

    first = await run_batch(served_url, batch)
    again = await run_batch(NOWHERE, batch)

    assert first == again
    assert store.cat("/batch/out.jsonl").count(b"\n") == 2
    assert list((tmp_path / "penstock/batch").iterdir()) == []


@pytest.mark.parametrize(
    ("input_name", "output_name", "param"),
    [
        ("missing.jsonl", "out.jsonl", "input"),
        (".", "out.jsonl", "input"),
        ("in.jsonl", "missing/out.jsonl", "output"),
        ("nonsense://in.jsonl", "out.jsonl", "input"),
        ("memory://missing.jsonl", "out.jsonl", "input"),
    ],
)
async def test_unusable_path_is_named(tmp_path: Path, input_name: str, output_name: str, param: str) -> None:
    write_rows(tmp_path / "in.jsonl", [chat_row("a")])
    source = input_name if "://" in input_name else str(tmp_path / input_name)
    with pytest.raises(RequestError) as caught:
        await run_batch(NOWHERE, Batch(source, str(tmp_path / output_name)))
    assert caught.value.param == param


async def test_unreachable_redis_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError):
        await run_batch(NOWHERE, batch_of(tmp_path, [chat_row("a")]))
    assert files_in(tmp_path) == {"in.jsonl"}


def test_in_flight_is_bounded() -> None:
    with pytest.raises(RequestError, match="max_in_flight"):
        Batch("in", "out", max_in_flight=0)


def test_failed_rows_show_in_the_exit_code(served_url: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [chat_row("good"), chat_row("bad", n=99)])
    command = (sys.executable, "-m", "penstock", "batch", "run", str(source), str(tmp_path / "out.jsonl"))
    with process(*command, "--redis-url", served_url) as run:
        said = run.communicate(timeout=60)[0]
    assert run.returncode == 1
    assert "1 answered, 1 failed" in said


async def test_a_pipe_is_read_as_a_file_is(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row("a"), chat_row("b")])
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "wb") as writer:
        writer.write(files_of(tmp_path)["in.jsonl"])
        writer.close()
        done = await run_batch(served_url, replace(batch, input=f"/dev/fd/{read_end}"))
    assert done.num_answered == 2
    # The lines make the batch, not where they came from.
    assert await run_batch(NOWHERE, batch) == done


async def test_input_that_changes_during_the_run_is_an_error(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row("a"), chat_row("b")])
    with pytest.raises(RequestError, match="changed"):
        await run_batch(served_url, batch, lambda _: Path(batch.input).write_text(""))
    assert "out.jsonl" not in files_in(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
async def test_output_that_cannot_be_published_is_refused(tmp_path: Path, kind: str) -> None:
    batch = batch_of(tmp_path, [chat_row("a")])
    {"folder": os.mkdir, "pipe": os.mkfifo}[kind](batch.output)
    with pytest.raises(RequestError, match="not a regular file"):
        await run_batch(NOWHERE, batch)
    assert files_in(tmp_path) == {"in.jsonl", "out.jsonl"}


def test_batch_whose_disk_was_full_continues_later(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row(str(number)) for number in range(9)])
    run = (sys.executable, "-m", "penstock", "batch", "run", batch.input, batch.output, "--redis-url", served_url)
    with process("sh", "-c", f"ulimit -f 2; exec {shlex.join(run)} --in-flight 1") as small:
        said = small.communicate(timeout=60)[0]
    assert (small.returncode, said) == (2, f"penstock: {batch.output}.partial: File too large\n")
    assert 0 < num_lines(Path(f"{batch.output}.partial")) < 9

    with process(*run) as large:
        assert "9 answered, 0 failed" in large.communicate(timeout=60)[0]
    assert sorted(row["custom_id"] for row in rows_in(Path(batch.output))) == [str(number) for number in range(9)]


def test_a_failed_row_is_shown_with_its_reason(served_url: str, tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [chat_row("a"), chat_row("b", wrong=1)])
    run = (sys.executable, "-m", "penstock", "batch", "run", "-", batch.output, "--redis-url", served_url)
    with process("sh", "-c", f"exec {shlex.join(run)} < {batch.input}") as done:
        # On a busy machine it takes so long that its progress is shown.
        said = [line for line in done.communicate(timeout=60)[0].splitlines() if not line.startswith("batch: ")]
    assert done.returncode == 1
    assert said[0].startswith("1 answered, 1 failed, ")
    assert said[1:2] == ["first failure: b: wrong: unknown field"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("in.jsonl", "-"), "OUTPUT must be a file: an interrupted batch continues with it"),
        (("-", "out.jsonl", "--via-celery"), "INPUT must be a file: with --via-celery, the worker reads it"),
    ],
)
def test_what_cannot_be_a_stream_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = run_command("batch", "run", *arguments, "--redis-url", NOWHERE)
    assert (done.returncode, done.stderr) == (2, f"penstock: {said}\n")


def test_ctrl_c_works_while_the_input_is_read(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "penstock", "batch", "run", "-", str(tmp_path / "out.jsonl"))
    with subprocess.Popen(
        (*command, "--redis-url", NOWHERE), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        # More than a pipe holds: what comes back from this is being read.
        run.stdin.write("\n" * (1 << 20))
        run.stdin.flush()
        run.send_signal(signal.SIGINT)
        try:
            assert run.wait(timeout=60) == 130 and run.stderr is not None
            said = run.stderr.read()
            assert said.startswith("interrupted with no row done; ") and said.count("\n") == 1
        finally:
            run.kill()
    assert files_in(tmp_path) == set()
