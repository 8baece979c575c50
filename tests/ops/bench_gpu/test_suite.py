"""How the GPU benchmark runs test files and other programs: with a time limit, and with their output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_gpu import suite
from bench_gpu.programs import run_program
from fakes.waiting import wait_until


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_program_that_is_killed_leaves_no_child_and_keeps_what_it_said() -> None:
    ended = run_program(["sh", "-c", "sleep 60 & echo $!; wait"], 0.2)
    assert ended.returncode is None
    wait_until(lambda: not _is_running(int(ended.stdout)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of tests, in place of the repository's."""
    made = tmp_path / "tests"
    made.mkdir()
    (made / "gpu.ini").write_text("[pytest]\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "FOLDERS", ("tests",))
    return made


def test_a_test_process_that_crashes_leaves_its_output(folder: Path) -> None:
    (folder / "test_crash.py").write_text("import os\n\n\ndef test_it():\n    os.abort()\n")
    (row,) = rows = suite.run_tests(1)
    assert row["failed"] == [], "no summary of pytest names it"
    assert "Fatal Python error: Aborted" in str(row["output"])
    assert suite.failed_files(rows) == (["tests/test_crash.py"], [])


def test_files_that_do_not_end_in_time_are_no_wrong_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (folder / f"test_{name}.py").touch()
    slow = folder / "python"
    slow.write_text("#!/bin/sh\necho begun\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    rows = suite.run_tests(1, limit_s=0.3)
    assert [row["summary"] for row in rows] == ["no end after 0 s", "not started: no time was left"]
    assert rows[0]["output"] == "begun\n"
    assert suite.failed_files(rows) == ([], ["tests/test_a.py", "tests/test_b.py"])


def test_files_that_compile_most_start_first(folder: Path) -> None:
    for name in ("attention", "bare_steps"):
        (folder / f"test_{name}.py").touch()
    rows = suite.run_tests(1, limit_s=0.0)
    assert [row["file"] for row in rows] == ["tests/test_bare_steps.py", "tests/test_attention.py"]
