"""Larger models: which engines are compared, and what share of the machine's ceilings an engine reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import peers, report, weights
from bench.journal import Journal, Run, journal_path
from bench.larger import costs, table
from bench.larger.ceilings import Ceilings
from bench.larger.contestants import LARGER, bits_of, of_shape
from bench.larger.models import MODEL_SHAPES
from bench.larger.table import ROWS, compared, shares_of
from bench.report import Scene
from bench.verdicts import medians
from bench.workload import WORKLOADS

METRICS = ("itl_p50_ms", "ttft_p50_ms", "prompt_ttft_p50_ms", "first_token_s", "ready_s", "rss_peak_mib")
HIGHEST = Ceilings(70, 400, 800)
READ_GB_PER_S = 50
"""What the cores read around each run, less than the highest."""
SCENE = Scene(
    machine={"date": "", "cpu": "", "cores": 2, "cpu_features": [], "memory_gib": 8.0, "python": "", "versions": {}},
    command="python -m bench",
    peers={},
    missing={"vllm-server": "vllm is not installed"},
)


def run(name: str, itl_mean_ms: float, *, batch: float = 100, workload: str = "larger") -> Run:
    result = {"itl_mean_ms": itl_mean_ms, "batch_tokens_per_s": batch, "tokens_per_s": 1.0, "tokens_per_event": 1.0}
    result |= {"read_gb_per_s": READ_GB_PER_S, "readable_mb_per_token": READ_GB_PER_S * itl_mean_ms}
    return Run(name, workload, 0, "abc", "a command", result | dict.fromkeys(METRICS, itl_mean_ms))


def rows_of(*runs: Run) -> dict[str, tuple[str, float, bool]]:
    return {one.row.text: (one.other, round(one.ratio, 2), one.is_met) for one in compared(medians(runs))}


def test_ours_is_compared_with_peers_of_weights_at_least_as_wide() -> None:
    runs = [run("penstock Q8_0", 20), run("llamacpp Q8_0", 30), run("llamacpp Q4_K_M", 10), run("vllm", 25)]
    assert rows_of(*runs)["one stream, 8 bits, in process, ms a token"] == ("vllm", 0.8, True)
    runs = [run("penstock Q4_K_M", 20), run("openvino int8", 18), run("llamacpp Q4_K_M", 30)]
    assert rows_of(*runs)["one stream, Q4_K_M, in process, ms a token"] == ("openvino int8", 1.11, False)


def test_the_best_of_our_settings_of_a_width_counts() -> None:
    runs = [run("penstock Q8_0", 20), run("penstock int8", 15), run("llamacpp Q8_0", 30)]
    assert rows_of(*runs)["one stream, 8 bits, in process, ms a token"] == ("llamacpp Q8_0", 0.5, True)


@pytest.mark.parametrize(("batch", "is_met"), [(161, True), (159, False)])
def test_the_batch_in_bfloat16_must_be_well_ahead(batch: float, is_met: bool) -> None:
    found = rows_of(run("penstock bf16", 40, batch=batch), run("vllm", 40, batch=100))
    assert found["16 at once, bf16, in process, tokens/s"] == ("vllm", batch / 100, is_met)
    served = rows_of(run("penstock-http bf16", 40, batch=101), run("vllm-server", 40, batch=100))
    assert served["16 at once, bf16, HTTP, tokens/s"] == ("vllm-server", 1.01, True)


def test_a_first_load_is_compared_with_a_first_load() -> None:
    runs = [run("penstock first load Q8_0", 2, workload="load"), run("llamacpp first load Q8_0", 1, workload="load")]
    assert rows_of(*runs)["first load to first token, 8 bits, s"] == ("llamacpp first load Q8_0", 2, False)


def test_a_first_load_is_compared_with_one_of_the_same_file() -> None:
    loads = {"penstock first load Q4_K_M": 12, "llamacpp first load Q4_K_M": 15, "llamacpp first load Q8_0": 10}
    runs = [run(name, seconds, workload="load") for name, seconds in loads.items()]
    found = rows_of(*runs)["first load to first token, Q4_K_M, s"]
    assert found == ("llamacpp first load Q4_K_M", 0.8, True)


def test_every_row_has_contestants_on_both_sides() -> None:
    for row in ROWS:
        sides = {one.is_ours for one in LARGER.values() if (one.entry, bits_of(one.name)) == (row.entry, row.bits)}
        assert sides == {True, False}, row.text


@pytest.mark.parametrize("shape", MODEL_SHAPES)
def test_each_engine_of_a_shape_runs_what_there_is(shape: str) -> None:
    chosen = of_shape(shape)
    assert {"penstock Q4_K_M", "vllm", "llamacpp-server Q4_K_M"} <= {one.name for one in chosen}
    assert all(name in WORKLOADS for one in chosen for name in one.workloads)


def test_an_engine_that_reads_at_half_of_the_bandwidth_has_half_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(weights, "path", lambda _kind, _shape: tmp_path)
    of_bf16 = costs.decode_bytes("penstock bf16", "1b", tmp_path)
    # Of 1.24 G weights, and of 64 tokens with 16 layers of 2 × 512 numbers.
    assert of_bf16 == pytest.approx(2 * 1.2358e9 + 64 * 16 * 1024 * 2, rel=1e-3)
    assert costs.decode_bytes("penstock int8", "1b", tmp_path) == of_bf16 / 2
    [share] = shares_of(medians([run("penstock bf16", of_bf16 / 25e9 * 1e3)]), "1b", HIGHEST)
    assert share.decode == pytest.approx(0.5)
    operations = costs.prompt_operations("1b")
    assert operations == pytest.approx(2 * 0.973e9 * 512, rel=0.02)
    assert share.prompt == pytest.approx(operations / (of_bf16 / 25e9) / 400e9)


def test_the_page_has_each_shape_that_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "BUILD", tmp_path)
    monkeypatch.setattr(table, "CEILINGS", tmp_path / "ceilings.json")
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    for one in (run("penstock-http bf16", 20, workload="larger-3b"), run("vllm-server", 40, workload="larger-3b")):
        Journal(journal_path("main", "3b")).add(one)
    text = table.write(tmp_path / "results", SCENE, "main")
    assert "## 3b" in text and "## 1b" not in text
    assert "| one stream, bf16, HTTP, ms a token | 20.00 | 40.00 (vllm-server) | 0.50 |" in text
    content = json.loads((report.raw_folder() / "larger.json").read_text())
    assert content["shapes"]["3b"]["rows"][0]["is_met"] is True
    assert (tmp_path / "results" / "larger.md").read_text() == text
