"""The sampler: the reference's tokens, transformers' distributions, and rows that do not see each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes.cover import examples
from fixtures.sampling import SamplingCase, level_draws, rows_of
from fixtures.sampling_cases import sampling_cases
from fixtures.sampling_ranges import ALONE, PAIRS, case_of
from hypothesis import given, settings
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.gpu_node.model.protocol import FAILED_TOKEN
from penstock.gpu_node.model.torch_common.sampler import sample


@settings(max_examples=examples(150))
@given(sampling_cases())
def test_tokens_equal_those_of_the_reference(case: SamplingCase) -> None:
    assert case.disagreements(sample(torch.from_numpy(case.logits.copy()), case.rows)) == []


def test_a_row_draws_the_number_that_every_sampler_draws() -> None:
    case, want = level_draws()
    assert sample(torch.from_numpy(case.logits), case.rows).tolist() == want


def test_no_end_of_a_range_overflows() -> None:
    for chosen in ALONE + PAIRS:
        case = case_of(chosen)
        tokens = sample(torch.from_numpy(case.logits.copy()), case.rows)
        assert (tokens != FAILED_TOKEN).all(), chosen
        assert case.disagreements(tokens) == [], chosen


def _processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities by transformers' own processors. logits: [vocab]."""
    scores, ids = logits[None].clone(), torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return torch.softmax(scores, -1)[0]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 5.0])
def test_large_vocabularies_keep_the_same_tokens_as_transformers(top_p: float, spread: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5000) * spread
    support = set(_processed(logits, 1.0, 0, top_p).nonzero().squeeze(1).tolist())
    drawn = sample(logits.repeat(800, 1), rows_of(800, top_p=top_p))
    missing = set(drawn.tolist()) - support
    # Two sums of thousands of shares may disagree about the token at the very edge.
    assert len(missing) <= 1


def test_zero_temperature_takes_the_best_and_small_ones_do_not_break() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, -1.0]])
    assert sample(logits.repeat(3, 1), rows_of(3, temperature=[0.0, 1e-30, 0.001])).tolist() == [1, 1, 1]


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(1)
    logits = torch.randn(30, 3000) * 3
    columns = {
        "temperature": np.resize([0.0, 0.7, 1.3], 30),
        "top_k": np.resize([0, 3, 0, 2000], 30),
        "top_p": np.resize([1.0, 0.5, 0.99, 1.0, 0.2], 30),
        "min_p": np.resize([0.0, 0.01], 30),
    }
    together = sample(logits.clone(), rows_of(30, **columns))
    for i in range(30):
        alone = sample(logits[i : i + 1].clone(), rows_of(1, position=i, **{k: v[i] for k, v in columns.items()}))
        assert alone.tolist() == [together[i]]


def test_a_limit_on_one_row_looks_at_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, topk = [], torch.Tensor.topk

    def counting(logits: torch.Tensor, k: int, **options: Any) -> Any:
        looked_at.append(k)
        return topk(logits, k, **options)

    monkeypatch.setattr(torch.Tensor, "topk", counting)
    logits = torch.randn(2, 50_000) * 9
    sample(logits.clone(), rows_of(2, top_k=[40, 3]))
    sample(logits.clone(), rows_of(2, top_k=[40, 0], top_p=[0.5, 1.0]))
    sample(logits.clone(), rows_of(2, top_k=[40, 0], top_p=[1.0, 0.5]))
    assert looked_at == [40, 40, 512]


def test_rows_equal_the_reference_with_few_and_with_many_candidates() -> None:
    spread = np.resize([0.01, 0.01, 9.0], (60, 1))
    logits = (np.random.default_rng(4).standard_normal((60, 1500)) * spread).astype(np.float32)
    rows = rows_of(
        60,
        top_p=np.resize([0.9, 0.5, 1.0, 0.99], 60),
        top_k=np.resize([0, 40, 0, 700, 0], 60),
        min_p=np.resize([0.0, 0.98], 60),
    )
    assert SamplingCase(logits, rows).disagreements(sample(torch.from_numpy(logits.copy()), rows)) == []


def test_repetition_penalty_equals_that_of_transformers() -> None:
    torch.manual_seed(2)
    logits, seen = torch.randn(1, 50), np.array([3, 3, 7, 49], np.int32)
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.from_numpy(seen)[None].long(), logits.clone())
    rows = rows_of(1, temperature=0.0, repetition_penalty=1.7, seen=(seen,))
    penalised = logits.clone()
    assert sample(penalised, rows).tolist() == want.argmax(-1).tolist()
    torch.testing.assert_close(penalised, want)


def test_banned_tokens_are_never_taken() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    banned = np.array([0, 1], np.int32)
    rows = rows_of(2, temperature=[0.0, 1.0], banned=(banned, banned))
    assert sample(logits.repeat(2, 1), rows).tolist() == [2, 2]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(poison: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 9.0
    logits[1, 2] = poison
    assert sample(logits, rows_of(3, temperature=[0.0, 1.0, 0.0])).tolist() == [4, FAILED_TOKEN, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_penalty_overflows_or_that_bans_everything_fails_alone(temperature: float) -> None:
    all_ids = np.arange(3, dtype=np.int32)
    rows = rows_of(
        3,
        temperature=temperature,
        top_k=[0, 0, 1],
        repetition_penalty=[1e-39, 1.0, 1.0],
        seen=(all_ids, all_ids, all_ids),
        banned=(all_ids[:0], all_ids, all_ids[:1]),
    )
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    assert sample(logits.repeat(3, 1), rows).tolist() == [FAILED_TOKEN, FAILED_TOKEN, 1]
