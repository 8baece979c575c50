"""What the GPU benchmark does with a GPU's clock, on stand-ins for it; and what it does with wrong results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_gpu import measure, verdict
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
