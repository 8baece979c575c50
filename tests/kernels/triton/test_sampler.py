"""Triton's sampler chooses what the reference chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes.cover import examples
from fixtures.sampling import SamplingCase, level_draws, rows_of
from fixtures.sampling_ranges import ALONE, PAIRS, case_of
from numpy.typing import NDArray

from penstock.gpu_node.model.gpu.inputs import RowMarks, mark_rows_of
from penstock.kernels.reference.sampler import NO_TOKENS
from penstock.kernels.triton.sampler import pack_rules, sample
from penstock.kernels.triton.sampling_passes import MAX_CANDIDATES


def sampled_tokens(case: SamplingCase, device: torch.device) -> NDArray[np.int32]:
    """The kernel's tokens, with marks that hold garbage before they are written."""
    row_marks = RowMarks(case.logits.shape[1], device)
    row_marks.reserve(len(case.logits))
    row_marks.marks.marks.fill_(99)
    row_marks.marks.biases.fill_(torch.nan)
    mark_rows = mark_rows_of(case.rows)
    rules = torch.from_numpy(pack_rules(case.rows, mark_rows)).to(device)
    if (mark_rows >= 0).any():
        rules = row_marks.write(case.rows, mark_rows)
    return sample(torch.from_numpy(case.logits).to(device), rules, row_marks.marks).cpu().numpy()


def test_a_row_draws_the_number_that_every_sampler_draws(device: torch.device) -> None:
    case, want = level_draws()
    assert sampled_tokens(case, device).tolist() == want


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


def test_biases_and_masks_come_before_the_draw(device: torch.device) -> None:
    rng, count, vocab = np.random.default_rng(0), 12, 70
    rows = rows_of(
        count,
        seed=np.arange(count),
        mask=[rng.random(vocab) < 0.3 if i % 3 else None for i in range(count)],
        biased=[np.array([i, 69], np.int32) for i in range(count)],
        biases=[np.array([3.0, 4.5], np.float32)] * count,
    )
    case = SamplingCase(rng.standard_normal((count, vocab)).astype(np.float32), rows)
    assert case.disagreements(sampled_tokens(case, device)) == []


@pytest.mark.parametrize("rules", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 20, "top_p": 0.9}])
def test_limits_among_more_tokens_than_are_collected(rules: dict[str, Any], device: torch.device) -> None:
    """Every token is about as likely as any other, so all of them are near each limit."""
    rng, vocab = np.random.default_rng(1), MAX_CANDIDATES + 100
    logits = (rng.standard_normal((2, vocab)) * 1e-3).astype(np.float32)
    logits[1] = 0
    case = SamplingCase(logits, rows_of(2, seed=np.arange(2), **rules))
    assert case.disagreements(sampled_tokens(case, device)) == []


@pytest.mark.parametrize(
    ("vocab", "rules", "count"),
    [*((33, rules, 6) for rules in RULES), (9000, "plain", 4), (9000, "all", 3), (9000, "penalties", 3), (1, "all", 1)],
)
def test_each_rule_draws_what_it_keeps(vocab: int, rules: str, count: int, device: torch.device) -> None:
    rng = np.random.default_rng(vocab)
    seen = (
        [rng.integers(0, vocab, 300).astype(np.int32) for _ in range(count)]
        if rules == "penalties"
        else [NO_TOKENS] * count
    )
    logits = rng.standard_normal((count, vocab)).astype(np.float32)
    rows = rows_of(count, seed=np.arange(count), num_seen_prompt=10, seen=seen, **RULES[rules])
    case = SamplingCase(logits, rows)
    assert case.disagreements(sampled_tokens(case, device)) == []


@pytest.mark.parametrize(
    "rules",
    [{"top_k": 3}, {"top_k": 5, "top_p": 0.8}, {"top_p": 0.9}, {"top_p": 0.99, "min_p": 0.001}, {"top_k": 6}],
    ids=str,
)
def test_limits_hold_where_most_tokens_are_not_counted(rules: dict[str, Any], device: torch.device) -> None:
    """Of five tiles: their best tokens bound top_k, and few tokens have nearly all of the weight."""
    rng, count = np.random.default_rng(3), 6
    rows = rows_of(count, seed=np.arange(count), **rules)
    case = SamplingCase((6 * rng.standard_normal((count, 10_000))).astype(np.float32), rows)
    assert case.disagreements(sampled_tokens(case, device)) == []


def test_no_end_of_a_range_overflows(device: torch.device) -> None:
    for chosen in [*ALONE, *PAIRS][:: len(PAIRS) // examples(20)]:
        case = case_of(chosen)
        tokens = sampled_tokens(case, device)
        assert (tokens >= 0).all(), chosen
        assert case.disagreements(tokens) == [], chosen
