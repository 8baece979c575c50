"""How the GPU benchmark reads a GPU's clock, with substitutes for it, and how it treats wrong results."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_gpu import measure, run, verdict
from bench_gpu.measure import Clock, fraction, rotated
from bench_gpu.run import Run
from bench_gpu.verdict import SHORT, WrongResultError


class Graph:
    """Counts replays; a replay takes the milliseconds that were captured, one a call."""

    def __init__(self) -> None:
        self.captured = self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_calls_are_captured_over_all_buffers_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, calls = Graph(), []
    is_capturing = [False]

    @contextmanager
    def capture(_graph: Graph) -> Iterator[None]:
        is_capturing[0] = True
        yield
        is_capturing[0] = False

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = graph.replays * graph.captured * 0.5

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def work(which: int) -> Any:
        def call() -> None:
            calls.append((which, is_capturing[0]))
            assert gc.isenabled() != is_capturing[0], "a finalizer that frees GPU memory aborts a capture"
            graph.captured += is_capturing[0]

        return call

    for name, stand_in in {"CUDAGraph": lambda: graph, "graph": capture, "Event": Event}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = Clock(torch.device("cuda"), 1.0)
    assert clock.device_ms([work(i) for i in range(3)]) == 0.5
    assert [which for which, is_captured in calls if not is_captured] == [0, 1, 2], "each runs once before"
    assert [which for which, is_captured in calls if is_captured] == [0, 1, 2] * 7, "at least 20 calls, in turn"
    assert graph.replays == 1 + measure._REPLAYS
    assert gc.isenabled()


def test_the_ceiling_of_float8_multiplies_rows_by_columns() -> None:
    """Tensors without contents check layouts as a GPU's do."""
    a, b = (torch.randn(32, 32, device="meta") for _ in "ab")
    product: Any = measure.float8_product(a, b)()
    assert (product.shape, product.dtype) == ((32, 32), torch.bfloat16)


def test_a_ceiling_of_float8_that_fails_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(Clock, "is_gpu", True)
    monkeypatch.setattr(Clock, "device_ms", lambda *_: 1.0)
    clock = Clock(torch.device("cpu"), 1.0)
    assert "fp8_tflop_s" in measure.ceilings(clock, dry=True)
    monkeypatch.setattr(measure, "float8_product", refused)
    assert set(measure.ceilings(clock, dry=True)) == {"device", "copy_gb_s", "read_gb_s", "bf16_tflop_s"}


@pytest.mark.parametrize(("num_bytes", "want"), [(100 << 20, 2), (10 << 20, 16), (1, 32), (0, 32)])
def test_buffers_together_exceed_the_l2_cache(num_bytes: int, want: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert len(rotated(lambda: lambda: None, num_bytes)) == want


def test_a_fraction_is_of_the_slower_ceiling() -> None:
    ceilings = {"read_gb_s": 1000.0, "bf16_tflop_s": 100.0}
    assert fraction(ceilings, 2.0, 1e9, 1e10, "bf16_tflop_s") == pytest.approx(0.5), "1 GB in 1 ms"
    assert fraction(ceilings, 2.0, 1e6, 1e11, "bf16_tflop_s") == pytest.approx(0.5), "100 GFLOP in 1 ms"


@pytest.mark.parametrize("wrong", [1.05, float("nan")])
def test_a_result_beyond_its_bound_is_an_error(wrong: float) -> None:
    want = torch.ones(100)
    assert verdict.judge("right", want * 1.001, want, SHORT)["rms"] == pytest.approx(0.001, rel=0.01)
    got = want.clone()
    got[7] = wrong
    with pytest.raises(WrongResultError, match="wrong: "):
        verdict.judge("wrong", got, want, SHORT)
    with pytest.raises(WrongResultError, match="differ"):
        verdict.judge_equal("wrong", got, want)


def test_a_wrong_result_ends_the_run_and_another_error_ends_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, dry=True)
    monkeypatch.setattr(run, "_kernels", lambda: run._part("broken", lambda: 1 / 0))
    run.stage("kernels")
    assert list(run.failed) == ["broken"]

    def wrong() -> None:
        raise WrongResultError("attention")

    monkeypatch.setattr(run, "_truth", lambda: run._part("attention", wrong))
    with pytest.raises(WrongResultError):
        run.stage("truth")
    assert "attention" in (tmp_path / "truth.json").read_text()
    run.pack()
    assert {path.name for path in tmp_path.iterdir()} == {"kernels.json", "truth.json", "bench-gpu.tar.gz"}


def _truth_with(monkeypatch: pytest.MonkeyPatch, tests: list[dict[str, Any]], **checks: Any) -> list[str]:
    """Replace the parts of the first stage; return the list of those that ran."""
    ran: list[str] = []

    def started(title: str) -> Any:
        ran.append(title)
        return checks[title]()

    def check(stage: Run) -> None:
        for title in checks:
            stage._check(title, partial(started, title))

    monkeypatch.setattr(run, "run_tests", lambda *_, **__: tests)
    monkeypatch.setattr(Run, "_checks", check)
    return ran


def test_the_stage_of_truth_runs_to_its_end_and_names_all_wrong_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong() -> Iterator[dict[str, Any]]:
        yield {"check": "first"}
        raise WrongResultError("attention differs")

    tests = [{"file": "test_a.py", "is_ok": False, "exit_code": 1}, {"file": "test_b.py", "is_ok": True}]
    stage = Run(tmp_path, dry=True)
    ran = _truth_with(monkeypatch, tests, one=wrong, two=lambda: [{"check": "second"}])
    with pytest.raises(WrongResultError, match=r"attention differs; tests failed: \['test_a.py'\]"):
        stage.stage("truth")
    assert ran == ["one", "two"]
    found = json.loads((tmp_path / "truth.json").read_text())
    stage.pack()
    assert (found["one"], found["two"], found["tests"]) == ([{"check": "first"}], [{"check": "second"}], tests)


def test_checks_end_with_the_stages_time_and_are_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Run(tmp_path, dry=True)

    def slow() -> Iterator[dict[str, Any]]:
        for i in range(3):
            stage._clock.start(1.0 - i)
            yield {"check": str(i)}

    unfinished = [{"file": "test_a.py", "is_ok": False}]
    ran = _truth_with(monkeypatch, unfinished, one=slow, two=lambda: [{"check": "second"}])
    stage.stage("truth")
    assert ran == ["one"]
    assert set(stage.failed) == {"one", "two", "tests"}
    found = json.loads((tmp_path / "truth.json").read_text())
    assert ([row["check"] for row in found["one"]], found["two"]) == (["0", "1"], [])
    assert set(found["failed"]) == set(stage.failed)
    stage.pack()


def test_rows_are_written_before_their_part_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Run(tmp_path, dry=True)

    def rows() -> Iterator[dict[str, Any]]:
        yield {"check": "first"}
        assert "first" in (tmp_path / "kernels.json").read_text()

    monkeypatch.setattr(stage, "_kernels", lambda: stage._rows("part", rows()))
    stage.stage("kernels")
    assert not stage.failed
    stage.pack()
