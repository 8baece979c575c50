"""What a user of `penstock batch run` meets: compressed files, failed rows, progress in a log, a store that is away."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import typer
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from penstock.cli.batch import commands, progress
from penstock.contract.errors import RequestError
from penstock.producer.batch import storage
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.runner import answer_batch, opened, opened_retry, run_batch
from penstock.producer.batch.storage import is_outage
from tests.producer.batch.conftest import Row, chat_row, process, rows_in, write_rows

PENSTOCK = (sys.executable, "-m", "penstock", "batch")
NOWHERE = "unix:///nonexistent/redis.sock"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def text_of(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.compress, lambda text: b"\xef\xbb\xbf" + text])
async def test_packed_lines_are_the_same_batch(served_url: str, tmp_path: Path, packed: Any) -> None:
    rows = [chat_row("a"), chat_row("b")]
    plain = Batch(str(write_rows(tmp_path / "in.jsonl", rows)), str(tmp_path / "out.jsonl"))
    other = tmp_path / "packed"
    other.write_bytes(packed(text_of(rows)))
    done = await run_batch(served_url, Batch(str(other), plain.output))
    assert done.num_answered == 2
    assert await run_batch(NOWHERE, plain) == done


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
async def test_a_damaged_file_is_named(tmp_path: Path, pack: Any) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(pack(text_of([chat_row(f"{number}") for number in range(50)]))[:-20])
    with pytest.raises(RequestError, match="damaged: "):
        await run_batch(NOWHERE, Batch(str(source), str(tmp_path / "out.jsonl")))


def test_failed_rows_are_listed_by_line_and_only_they_run_again(served_url: str, tmp_path: Path) -> None:
    rows = [chat_row("good"), chat_row("bad", model="later"), chat_row("worse\u2028", n=99)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n" + text_of(rows))
    files = (str(source), str(output), "--redis-url", served_url)
    with process(*PENSTOCK, "run", *files) as run:
        said = run.communicate(timeout=60)[0]
    assert run.returncode == 1
    assert "1 answered, 2 failed" in said and f"failed rows: {tmp_path / 'out.errors.jsonl'}" in said
    listed = {row["custom_id"]: row for row in rows_in(tmp_path / "out.errors.jsonl")}
    assert {name: row["line"] for name, row in listed.items()} == {"bad": 3, "worse\u2028": 4}
    assert listed["bad"]["error"]["code"] == "model_not_found"
    first = {row["custom_id"]: row for row in rows_in(output)}

    with process(*PENSTOCK, "retry", *files, "--errors", str(tmp_path / "still.jsonl")) as again:
        said = again.communicate(timeout=60)[0]
    assert again.returncode == 1 and "0 answered, 2 failed" in said
    assert [row["line"] for row in rows_in(tmp_path / "still.jsonl")] == [3, 4]
    second = {row["custom_id"]: row for row in rows_in(output)}
    assert second["good"] == first["good"] and set(second) == set(first)
    assert names_in(tmp_path) == {"in.jsonl", "out.jsonl", "out.errors.jsonl", "still.jsonl"}


async def test_rows_that_succeed_at_last_take_their_places(
    served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat_row(f"row-{number}") for number in range(6)]
    batch = Batch(str(write_rows(tmp_path / "in.jsonl", rows)), str(tmp_path / "out.jsonl"), model="unknown")
    assert (await run_batch(served_url, batch)).num_failed == 6
    assert (tmp_path / "out.errors.jsonl").exists()
    renamed = [{**row, "body": {**row["body"], "model": "reference"}} for row in rows]
    monkeypatch.setattr("penstock.producer.batch.runner.rows_in", lambda path: iter(_rows(renamed)))

    def _interrupt(progress: BatchProgress) -> None:
        if progress.num_done == 6:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), opened_retry(batch) as one:
        assert one is not None
        await answer_batch(served_url, one, _interrupt)
    assert len(rows_in(tmp_path / "out.jsonl")) == 6, "the first results stay until all new ones are there"
    with opened_retry(batch) as one:
        assert one is not None
        done = await answer_batch(served_url, one, lambda _: None)
    assert (done.num_answered, done.num_failed) == (6, 0)
    assert all(row["error"] is None for row in rows_in(tmp_path / "out.jsonl"))
    assert names_in(tmp_path) == {"in.jsonl", "out.jsonl"}
    assert (await run_batch(NOWHERE, batch)).num_answered == 6
    with opened_retry(batch) as none:
        assert none is None


def _rows(rows: list[Row]) -> Iterator[Any]:
    from penstock.producer.batch.lines import InputRow

    for number, row in enumerate(rows, 1):
        yield InputRow(number - 1, row["custom_id"], row, 0, number)


def test_a_retry_of_an_unfinished_batch_is_refused(tmp_path: Path) -> None:
    batch = Batch(str(write_rows(tmp_path / "in.jsonl", [chat_row("a")])), str(tmp_path / "out.jsonl"))
    with pytest.raises(RequestError, match="No such file"), opened_retry(batch):
        pass
    write_rows(tmp_path / "out.jsonl", [{"id": "x", "custom_id": "a", "response": None, "error": {}}])
    with pytest.raises(RequestError, match="first run it to its end"), opened_retry(batch):
        pass


def test_a_log_gets_lines_with_rate_and_expected_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    lines = progress.BatchLines(io.StringIO())
    assert lines.line(100.0, 0.0) == "batch: the input is read"
    lines.update(BatchProgress(5000, 1000, 0))
    lines.update(BatchProgress(5000, 1900, 100, waiting="the queue is full"))
    said = lines.line(110.0, 1_700_000_000.0)
    assert said.startswith("batch: 2,000 of 5,000 rows done, 100 failed, 100.0 rows/s, expected end 20")
    assert said.endswith("; waits: the queue is full")


def test_a_run_without_a_terminal_speaks_while_it_runs(
    served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINES_S", 0.02)
    source = write_rows(tmp_path / "in.jsonl", [chat_row(f"{number}", max_tokens=60) for number in range(100)])
    commands.run(str(source), str(tmp_path / "out.jsonl"), in_flight=8, redis_url=served_url)
    lines = capsys.readouterr().err.splitlines()
    assert any(re.match(r"batch: \d+ of 100 rows done, 0 failed, [\d.]+ rows/s, expected end ", line) for line in lines)
    assert lines[-1].startswith("100 answered, 0 failed")


class AwayFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store that refuses its first calls."""

    protocol = "away"
    store: ClassVar[dict[str, Any]] = {}
    num_refusals: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("away://")))

    def _open(self, *arguments: Any, **options: Any) -> Any:
        AwayFileSystem.num_refusals -= 1
        if AwayFileSystem.num_refusals >= 0:
            raise ConnectionRefusedError(111, "Connection refused")
        return super()._open(*arguments, **options)


def test_a_store_that_is_away_is_waited_for(
    served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(progress, "FIRST_LINES_S", 0.01)
    fsspec.register_implementation("away", AwayFileSystem, clobber=True)
    store = fsspec.filesystem("away")
    store.pipe("/in.jsonl", text_of([chat_row("good"), chat_row("bad", n=99)]))
    reasons: list[str] = []
    batch = Batch("away://in.jsonl", "away://out.jsonl")
    AwayFileSystem.num_refusals = 3
    with pytest.raises(ZeroDivisionError), opened(batch, reasons.append):
        AwayFileSystem.num_refusals = 2
        raise ZeroDivisionError
    assert len(reasons) == 3 and "away://in.jsonl is unreachable" in reasons[0]

    with pytest.raises(typer.Exit):
        commands.run(batch.input, batch.output, redis_url=served_url)
    said = capsys.readouterr().err
    assert "away://in.jsonl is unreachable" in said and "1 answered, 1 failed" in said
    AwayFileSystem.num_refusals = 0
    assert store.cat("/out.jsonl").count(b"\n") == 2
    assert json.loads(store.cat("/out.errors.jsonl"))["line"] == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(113, "No route to host"), True),
        (FileNotFoundError("x"), False),
        (PermissionError(13, "x"), False),
        (OSError(28, "No space left on device"), False),
        (type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})("x"), True),
        (type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})("x"), False),
        (ValueError("x"), False),
    ],
)
def test_an_outage_is_told_from_an_answer(error: Exception, expected: bool) -> None:
    assert is_outage(error) is expected
    try:
        raise RequestError("x") from error
    except RequestError as wrapped:
        assert is_outage(wrapped) is expected
