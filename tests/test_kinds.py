"""Tests are marked by what they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kinds import NOT_QUICK, OF_FIXTURES, OF_FOLDERS, OF_IMPORTS, TESTS, kinds_of_file, mixed


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("import subprocess", {"process"}),
        ("from fakes.processes.node_process import NodeProcess", {"process"}),
        ("def late():\n    import torch.nn", {"torch"}),
        ("from redis.asyncio import Redis", {"redis"}),
        ("import json", set()),
    ],
)
def test_a_file_needs_what_it_imports(tmp_path: Path, source: str, kinds: set[str]) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(source)
    assert kinds_of_file(path) == kinds


def test_every_kind_is_a_marker_that_quick_runs_leave_out(request: pytest.FixtureRequest) -> None:
    kinds = {*OF_FIXTURES, *OF_IMPORTS, *OF_FOLDERS}
    assert kinds <= set(NOT_QUICK)
    registered = {line.partition(":")[0] for line in request.config.getini("markers")}
    assert set(NOT_QUICK) <= registered


def test_files_that_compute_stand_evenly_among_those_that_wait() -> None:
    kernels = sorted((TESTS / "kernels").rglob("test_*.py"))
    computing = [file for file in kernels if "process" not in kinds_of_file(file)]
    waiting = sorted((TESTS / "queue").rglob("test_*.py"))
    order = mixed([*computing, *waiting])
    assert [file for file in order if file in computing] == computing
    assert [file for file in order if file in waiting] == waiting
    half = order[: len(order) // 2]
    assert sum(file in computing for file in half) == pytest.approx(len(computing) / 2, abs=1)
