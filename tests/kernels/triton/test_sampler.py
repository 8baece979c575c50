"""Triton's sampler chooses what the reference chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes.sampling import SamplingCase, rows_of, sampling_cases
from hypothesis import given, settings
from numpy.typing import NDArray

from penstock.kernels.reference.sampler import NO_TOKENS
from penstock.kernels.triton.sampler import Marks, mark_entries, pack_rules, sample


def _tokens(case: SamplingCase, device: torch.device) -> NDArray[np.int32]:
    rows, (count, vocab) = case.rows, case.logits.shape
    looks = [i for i in range(count) if len(rows.seen[i]) or len(rows.banned[i])]
    places = np.full(count, -1, np.int32)
    places[looks] = range(len(looks))
    entries = [mark_entries(places[i], rows.seen[i], int(rows.num_seen_prompt[i]), rows.banned[i]) for i in looks]
    marks = Marks(torch.full((max(1, len(looks)), vocab), 99, dtype=torch.int32, device=device))
    if entries:
        marks.fill(torch.from_numpy(np.concatenate(entries)).to(device), len(looks))
    rules = torch.from_numpy(pack_rules(rows, places)).to(device)
    return sample(torch.from_numpy(case.logits).to(device), rules, marks).cpu().numpy()


@settings(max_examples=5, deadline=None)
@given(case=sampling_cases(max_kinds=1))
def test_tokens_are_the_references(case: SamplingCase, device: torch.device) -> None:
    assert case.disagreements(_tokens(case, device)) == []


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "all": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}


@pytest.mark.parametrize(
    ("vocab", "rules", "count"),
    [
        *((33, rules, 16) for rules in RULES),
        (9000, "plain", 16),
        (9000, "all", 3),
        (9000, "penalties", 3),
        (1, "all", 1),
    ],
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
    assert case.disagreements(_tokens(case, device)) == []
