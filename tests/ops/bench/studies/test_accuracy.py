"""Errors of tokens are the sums of their definitions; llama-perplexity's file and output are read as it writes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.studies.accuracy import report, rows, verdict
from bench.studies.divergence import BaseFile, Figure, TokenErrors, accuracy_of, accuracy_of_output, token_errors
from numpy.typing import NDArray

WINDOW, VOCAB, NUM_WINDOWS = 8, 7, 2
SCORED = WINDOW - 1 - WINDOW // 2

OUTPUT = """\
====== KL divergence statistics ======
Mean    KLD:   0.003021 ±   0.000050
Maximum KLD:   0.301000
====== Token probability statistics ======
Mean    Δp: -0.012 ± 0.010 %
RMS Δp    :  1.260 ± 0.030 %
Same top p: 97.410 ± 0.070 %
"""


def log_probs(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.exp(logits).sum(-1, keepdims=True)
    found: NDArray[np.float64] = logits - np.log(sums)
    return found


def stored(path: Path, logits: NDArray[np.float64], tokens: NDArray[np.int32]) -> None:
    """Write a base file row by row, as llama-perplexity does. logits: [windows, scored, vocab]."""
    with path.open("wb") as file:
        file.write(b"_logits_")
        file.write(np.array([WINDOW, VOCAB, NUM_WINDOWS], np.int32).tobytes() + tokens.tobytes())
        for row in log_probs(logits).reshape(-1, VOCAB):
            least = max(row.min(), row.max() - 16)
            step = (row.max() - least) / 65535
            codes = np.round((np.maximum(row, least) - least) / step)
            padding = [0] * (VOCAB % 2)
            file.write(
                np.array([step, least], np.float32).tobytes() + np.array([*codes, *padding], np.uint16).tobytes()
            )


def test_errors_of_tokens_are_the_sums_of_their_definitions() -> None:
    rng = np.random.default_rng(1)
    ours, base = rng.normal(0, 3, (2, 50, VOCAB))
    base[:, 3] -= 40  # less likely than e^-16: left out of the divergence, as llama-perplexity does
    targets = rng.integers(0, VOCAB, 50)
    q, p = log_probs(ours), log_probs(base)
    want_kl, want_delta, want_same = [], [], []
    for row in range(50):
        kept = [i for i in range(VOCAB) if p[row, i] > -16]
        want_kl.append(sum(math.exp(p[row, i]) * (p[row, i] - q[row, i]) for i in kept))
        want_delta.append(math.exp(q[row, targets[row]]) - math.exp(p[row, targets[row]]))
        want_same.append(
            float(max(range(VOCAB), key=lambda i: q[row, i]) == max(range(VOCAB), key=lambda i: p[row, i]))
        )
    logits, base_log_probs = (torch.from_numpy(x.astype(np.float32)) for x in (ours, p))
    got = token_errors(logits, base_log_probs, torch.from_numpy(targets))
    np.testing.assert_allclose(got.kl, want_kl, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got.delta_p, want_delta, atol=1e-6)
    assert got.same_top.tolist() == want_same
    assert 0 < sum(want_same) < 50


def test_accuracies_are_means_over_all_windows_with_intervals_of_two_sided_95_percent() -> None:
    rng = np.random.default_rng(2)
    kl, delta_p = rng.exponential(0.01, 40), rng.normal(0, 0.02, 40)
    same = (rng.random(40) < 0.8).astype(float)
    parts = [TokenErrors(kl[:15], delta_p[:15], same[:15]), TokenErrors(kl[15:], delta_p[15:], same[15:])]
    found = accuracy_of(parts)
    assert found.kl.value == pytest.approx(sum(kl) / 40)
    assert found.kl.error == pytest.approx(1.96 * np.std(kl, ddof=1) / math.sqrt(40))
    rms = math.sqrt(sum(delta_p**2) / 40)
    assert found.rms_delta_p.value == pytest.approx(100 * rms)
    assert found.rms_delta_p.error == pytest.approx(100 * 1.96 * np.std(delta_p**2, ddof=1) / math.sqrt(40) / 2 / rms)
    share = sum(same) / 40
    assert found.same_top.value == pytest.approx(100 * share)
    assert found.same_top.error == pytest.approx(100 * 1.96 * math.sqrt(share * (1 - share) / 39))


def test_a_base_file_has_the_tokens_and_the_log_probabilities_that_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (NUM_WINDOWS, SCORED, VOCAB))
    tokens = rng.integers(0, VOCAB, (NUM_WINDOWS, WINDOW)).astype(np.int32)
    stored(tmp_path / "base", logits, tokens)
    base = BaseFile(tmp_path / "base")
    np.testing.assert_array_equal(base.tokens, tokens)
    for window in range(NUM_WINDOWS):
        # A code is at most half a step away: 16 / 65,535 / 2.
        np.testing.assert_allclose(base.log_probs(window), log_probs(logits[window]), atol=1.3e-4)
        assert base.targets(window).tolist() == tokens[window, WINDOW // 2 + 1 :].tolist()


def test_a_base_file_that_is_cut_off_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    logits, tokens = np.zeros((NUM_WINDOWS, SCORED, VOCAB)), np.zeros((NUM_WINDOWS, WINDOW), np.int32)
    logits[..., 0] = 1
    stored(tmp_path / "base", logits, tokens)
    content = (tmp_path / "base").read_bytes()
    (tmp_path / "base").write_bytes(content[:-2])
    with pytest.raises(ValueError, match="cut off"):
        BaseFile(tmp_path / "base")
    (tmp_path / "base").write_bytes(b"GGUF" + content)
    with pytest.raises(ValueError, match="does not begin with"):
        BaseFile(tmp_path / "base")


def test_accuracies_are_read_from_the_output_of_llama_perplexity() -> None:
    found = accuracy_of_output(OUTPUT)
    values = [found.kl.value, found.rms_delta_p.value, found.same_top.value]
    assert values == [0.003021, 1.26, 97.41]
    errors = [found.kl.error, found.rms_delta_p.error, found.same_top.error]
    assert errors == pytest.approx([1.96 * 0.00005, 1.96 * 0.03, 1.96 * 0.07])
    with pytest.raises(ValueError, match="RMS"):
        accuracy_of_output(OUTPUT.replace("RMS", "Root"))


def test_a_row_is_worse_only_if_the_intervals_are_apart() -> None:
    assert verdict(Figure(1.44, 0.05), Figure(1.35, 0.05)) == "same"
    assert verdict(Figure(1.44, 0.02), Figure(1.35, 0.05)) == "**worse**"
    assert verdict(Figure(1.20, 0.02), Figure(1.35, 0.05)) == "better"


FIGURES: dict[str, Any] = {name: {"value": 1.25, "error": 0.25} for name in ("kl", "rms_delta_p", "same_top")}


def page_of(runs: dict[str, Any]) -> str:
    return report({"date": "2026-11-24", "versions": "llama.cpp", "windows": 2, "runs": runs})


def test_the_page_names_the_machines() -> None:
    first, second, *_ = rows()
    made_on = {first.ours: "one, 2 cores (avx2)", first.theirs: "two", second.ours: "two"}
    page = page_of({run.name: FIGURES | {"machine": where} for run, where in made_on.items()})
    assert ", on one, 2 cores and two.\n" in page


def test_the_page_names_the_runs_that_it_lacks() -> None:
    row = next(rows())
    page = page_of({row.ours.name: FIGURES | {"machine": "one"}})
    [found] = [line for line in page.splitlines() if line.startswith(f"| {row.title} |")]
    assert "1.25 ± 0.25 | – |" in found
    assert f"- {row.theirs.name}" in page.splitlines()
    assert f"- {row.ours.name}" not in page.splitlines()
