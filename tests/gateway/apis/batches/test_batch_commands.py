"""`penstock batch` against a gateway: from a packed file to files of results, with exit codes that tell how it went."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import zstandard
from fakes.command import run_command
from fakes.waiting import wait_until

from tests.gateway.conftest import MODEL, EchoEngine, Stack

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "ended")


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine, tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        return str(stack.start_gateway())


@pytest.fixture(autouse=True)
def _at(url: str, engine: EchoEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", f"{url}/v1/")
    yield
    for one in json.loads(batch("list", "--json").stdout):
        if one.get("status", one.get("processing_status")) not in ENDED:
            batch("cancel", one["id"], status=None)
            batch("wait", one["id"], status=None)


def batch(*words: str, status: int | None = 0) -> CompletedProcess[str]:
    done = run_command("batch", *words)
    assert status in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
    return done


def row(name: str, text: str, **body: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {**messages, **body}}


def content_of(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


def submitted(*rows: dict[str, Any], words: tuple[str, ...] = ()) -> str:
    Path("in.jsonl").write_bytes(content_of(*rows))
    return batch("submit", "in.jsonl", "--model", MODEL, *words).stdout.strip()


def test_all_rows_of_a_packed_file_succeed() -> None:
    plain = b"\xef\xbb\xbf" + content_of(*(row(f"r{i}", f"text {i}") for i in range(20)))
    Path("in.gz").write_bytes(gzip.compress(plain))
    submit = ("submit", "in.gz", "--model", MODEL, "--metadata", "project=rivers", "--idempotency-key", "one")
    batch_id = batch(*submit).stdout.strip()
    assert batch(*submit).stdout.strip() == batch_id
    ended = batch("wait", batch_id)
    assert (ended.stdout, "20 answered, 0 failed" in ended.stderr) == ("completed\n", True)
    batch("results", batch_id, "out.jsonl")
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in rows}
    assert texts == {f"r{i}": f"text {i}" for i in range(20)}
    assert sorted(path.name for path in Path().iterdir()) == ["in.gz", "out.jsonl"]
    assert batch("results", batch_id, "-").stdout == Path("out.jsonl").read_text()
    shown = batch("status", batch_id)
    assert "project            rivers" in shown.stdout and "completed_at " in shown.stdout
    assert json.loads(batch("status", batch_id, "--json").stdout)["request_counts"]["completed"] == 20
    listed = batch("list").stdout.splitlines()
    assert len(listed) == 2 and listed[1].split()[:4] == [batch_id, "completed", "20", "20"]


def test_failed_rows_have_an_exit_code_a_file_and_another_try() -> None:
    rows = [row("good", "text"), row("bad", "text", temperature=-1)]
    batch_id = submitted(*rows)
    assert batch("wait", batch_id, status=1).stdout == "completed\n"
    done = batch("results", batch_id, "out.jsonl", status=1)
    assert "1 answered, 1 failed" in done.stderr and "out.errors.jsonl" in done.stderr
    failed = json.loads(Path("out.errors.jsonl").read_text())
    assert (failed["line"], failed["custom_id"]) == (2, "bad") and "temperature" in failed["error"]["message"]
    Path("mended.zst").write_bytes(zstandard.compress(content_of(rows[0], row("bad", "text"))))
    again = batch("submit", "mended.zst", "--model", MODEL, "--retry-of", "out.errors.jsonl").stdout.strip()
    batch("results", again, "again.jsonl", "--wait")
    assert [json.loads(line)["custom_id"] for line in Path("again.jsonl").read_text().splitlines()] == ["bad"]
    refused = batch("results", again, "out.jsonl", status=2)
    assert "holds rows of something else" in refused.stderr
    assert Path("out.jsonl").exists() and not Path("out.jsonl.partial").exists()


def test_a_running_batch_is_paused_read_resumed_and_canceled(engine: EchoEngine) -> None:
    engine.step_s = 0.03
    rows = [*(row(f"r{i}", "x") for i in range(3)), row("slow", "y" * 200)]
    batch_id = submitted(*rows, words=("--completion-window", "7d"))
    assert batch("pause", batch_id).stdout == f"{batch_id} paused\n"
    assert batch("list").stdout.splitlines()[1].split()[1] == "paused"
    assert batch("resume", batch_id).stdout.split()[1] in ("validating", "in_progress")
    some = wait_until(
        lambda: batch("results", batch_id, "out.jsonl", status=75), lambda one: "3 answered" in one.stderr
    )
    assert "the batch still runs" in some.stderr
    assert batch("wait", batch_id, "--timeout", "0.2", status=75).stderr.endswith("within --timeout\n")
    assert batch("cancel", batch_id).stdout == f"{batch_id} cancelling\n"
    batch("results", batch_id, "out.jsonl", "--wait", status=1)
    assert len(Path("out.jsonl").read_text().splitlines()) == 3
    assert json.loads(Path("out.errors.jsonl").read_text())["error"]["code"] == "batch_cancelled"
    assert not [*Path().glob("*.partial")]


def rows_in(name: str) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no file."""
    return [json.loads(line) for line in Path(name).read_text().splitlines()] if Path(name).exists() else []


def request(name: str, text: str, **params: Any) -> dict[str, Any]:
    return {"custom_id": name, "params": {"max_tokens": 9, "messages": [{"role": "user", "content": text}], **params}}


def test_requests_of_messages_become_a_message_batch_whose_failures_are_tried_again() -> None:
    rows = [*(request(f"m{i}", f"text {i}") for i in range(20)), request("wrong", "x", temperature=-1)]
    words = ("--idempotency-key", "once")
    batch_id = submitted(*rows, words=words)
    assert batch_id.startswith("msgbatch_") and submitted(*rows, words=words) == batch_id
    done = batch("results", batch_id, "out.jsonl", "--wait", status=1)
    assert "ended: 20 answered, 1 failed: out.jsonl" in done.stderr and "out.errors.jsonl" in done.stderr
    results = {one["custom_id"]: one["result"] for one in rows_in("out.jsonl")}
    texts = {name: one["message"]["content"][0]["text"] for name, one in results.items()}
    assert texts == {f"m{i}": f"text {i}" for i in range(20)}
    (failed,) = rows_in("out.errors.jsonl")
    assert failed["custom_id"] == "wrong" and "temperature" in failed["result"]["error"]["error"]["message"]
    assert {path.name for path in Path().iterdir()} == {"in.jsonl", "out.jsonl", "out.errors.jsonl"}
    assert batch("results", batch_id, "-", status=1).stdout == Path("out.jsonl").read_text()
    batch("results", batch_id, "out.jsonl", status=1)
    again = submitted(*rows[:-1], request("wrong", "right"), words=("--retry-of", "out.errors.jsonl"))
    assert batch("wait", again).stdout == "ended\n"
    done = batch("results", again, "out.jsonl", status=2)
    assert "out.jsonl holds something else" in done.stderr
    batch("results", again, "second.jsonl")
    assert [one["custom_id"] for one in rows_in("second.jsonl")] == ["wrong"]
    assert batch("list", "--limit", "2").stdout.split("\n")[1].split()[:5] == [again, "ended", "1", "1", "0"]


def test_a_message_batch_is_paused_and_canceled(engine: EchoEngine) -> None:
    batch_id = submitted(*(request(f"m{i}", "text " * 50) for i in range(200)))
    assert batch("pause", batch_id).stdout.split() == [batch_id, "paused"]
    assert "paused" in batch("list").stdout and "processing_status" in batch("status", batch_id).stdout
    done = batch("results", batch_id, "out.jsonl", status=75)
    assert "of 200 rows; the batch still runs" in done.stderr and "partial" not in done.stderr
    assert batch("resume", batch_id).stdout.split() == [batch_id, "in_progress"]
    batch("cancel", batch_id)
    batch("wait", batch_id, status=None)
    batch("results", batch_id, "out.jsonl", status=None)
    kinds = [one["result"]["type"] for name in ("out.jsonl", "out.errors.jsonl") for one in rows_in(name)]
    assert len(kinds) == 200 and set(kinds) <= {"succeeded", "canceled"}


def test_a_wrong_input_of_messages_is_named() -> None:
    Path("in.jsonl").write_bytes(content_of(request("a", "x"), row("b", "y")))
    assert "line 2: a line of a message batch has custom_id and params" in batch("submit", "in.jsonl", status=2).stderr
    for words in (("--metadata", "a=b"), ("--completion-window", "7d")):
        Path("in.jsonl").write_bytes(content_of(request("a", "x")))
        said = batch("submit", "in.jsonl", *words, status=2).stderr
        assert f"{words[0]}: a message batch has 24h" in said
    Path("in.jsonl").write_bytes(content_of(request("not valid", "x")))
    assert "requests[0].custom_id" in batch("submit", "in.jsonl", status=2).stderr


def test_a_wrong_input_names_its_lines() -> None:
    found = batch("wait", submitted(row("a", "x"), {**row("b", "x"), "url": "/v1/completions"}), status=1)
    assert (found.stdout, "line 2: url is '/v1/completions'" in found.stderr) == ("failed\n", True)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("submit", "none.jsonl"), 2, "none.jsonl"),
        (("submit", "wrong.jsonl"), 2, "line 1: not JSON"),
        (("submit", "good.jsonl", "--completion-window", "soon"), 2, "--completion-window must be"),
        (("submit", "good.jsonl", "--metadata", "x"), 2, "--metadata must be NAME=VALUE"),
        (("submit", "good.jsonl", "--base-url", "ftp://x"), 2, "--base-url must begin"),
        (("submit", "good.jsonl", "--retry-of", "wrong.jsonl"), 2, "is no error file"),
        (("status", "batch_" + "0" * 32), 2, "no batch"),
        (("status", "../jobs"), 2, "no batch"),
        (("results", "batch_" + "0" * 32, "out.jsonl"), 2, "no batch"),
        (("results", "batch_1", "out.jsonl", "--timeout", "1"), 2, "only with --wait"),
        (("list", "--base-url", "http://127.0.0.1:9"), 75, "http://127.0.0.1:9 does not answer"),
    ],
)
def test_wrong_use_and_no_server_have_codes_of_their_own(words: tuple[str, ...], status: int, said: str) -> None:
    Path("wrong.jsonl").write_text("{no json\n")
    Path("good.jsonl").write_bytes(content_of(row("a", "x", model=MODEL)))
    done = batch(*words, status=status)
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert not Path("out.jsonl.partial").exists()


def test_a_wrong_key_is_named(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = stack.start_gateway(require_keys=True)
    monkeypatch.setenv("OPENAI_API_KEY", "pk-wrong")
    done = batch("list", "--base-url", closed, status=2)
    assert "--api-key: http://127.0.0.1" in done.stderr and "pk-wrong" not in done.stderr
