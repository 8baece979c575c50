"""What the samplers draw, many times over: chi-square against exact probabilities, as transformers' rules give them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.native import ISAS, built
from fakes.single_kernels import Single
from fixtures.sampling import rows_of
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.text.output import BadWords, EndRule
from penstock.gpu_node.model.torch_common.sampler import sample
from penstock.kernels.reference.sampler import SamplingRow

Draw = Callable[[NDArray[np.float32], SamplingRow, int], NDArray[np.int32]]
"""Tokens of a row at so many positions."""
VOCAB = 50
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cool": {"temperature": 0.4},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.04},
    "top-k and top-p": {"top_k": 12, "top_p": 0.8, "temperature": 1.3},
    "min-p and top-k": {"min_p": 0.02, "top_k": 7},
    "all": {"temperature": 1.5, "min_p": 0.01, "top_k": 20, "top_p": 0.9},
}


def _by_torch(logits: NDArray[np.float32], row: SamplingRow, count: int) -> NDArray[np.int32]:
    columns = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in ("mask", "position")}
    rows = rows_of(count, **{name: [value] * count for name, value in columns.items()})
    return sample(torch.from_numpy(logits).repeat(count, 1), rows)


SAMPLERS: dict[str, Draw] = {
    "torch": _by_torch,
    **{isa: lambda *drawn, isa=isa: Single(built(isa)).draw(*drawn) for isa in ISAS},  # type: ignore[misc]
}


def _probabilities(logits: NDArray[np.float32], rules: dict[str, Any]) -> NDArray[np.float64]:
    """Each rule by transformers, in the order of ours, in double precision."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(rules.get("temperature", 1.0))])
    if "min_p" in rules:
        warpers.append(MinPLogitsWarper(rules["min_p"]))
    if "top_k" in rules:
        warpers.append(TopKLogitsWarper(rules["top_k"]))
    if "top_p" in rules:
        warpers.append(TopPLogitsWarper(rules["top_p"]))
    scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None].double())
    shares: NDArray[np.float64] = torch.softmax(scores, -1)[0].numpy()
    return shares


def _chi_square_is_likely(counts: NDArray[np.int64], shares: NDArray[np.float64], *, sigmas: float = 4.0) -> bool:
    """Whether counts stay within so many standard deviations; tokens that hardly ever come are counted together."""
    want = shares * counts.sum()
    rare = want < 5
    pairs = [*zip(counts[~rare], want[~rare], strict=True), (counts[rare].sum(), want[rare].sum())]
    statistic = sum((got - due) ** 2 / due for got, due in pairs if due > 0)
    freedom = max(1, sum(due > 0 for _, due in pairs) - 1)
    return bool(statistic < freedom + sigmas * math.sqrt(2 * freedom))


def _logits(seed: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 2).astype(np.float32)


@pytest.mark.parametrize("rules", COMBINATIONS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("count", [10_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_tokens_come_as_often_as_they_are_likely(sampler: str, rules: str, count: int) -> None:
    logits, row = _logits(8), SamplingRow(seed=5, **COMBINATIONS[rules])
    counts = np.bincount(SAMPLERS[sampler](logits, row, count), minlength=VOCAB)
    shares = _probabilities(logits, COMBINATIONS[rules])
    assert not counts[shares == 0].any()
    assert _chi_square_is_likely(counts, shares)


def test_slightly_other_distributions_are_told_apart() -> None:
    logits = _logits(8)
    counts = np.bincount(_by_torch(logits, SamplingRow(temperature=0.85), 10_000), minlength=VOCAB)
    assert _chi_square_is_likely(counts, _probabilities(logits, {"temperature": 0.85}))
    assert not _chi_square_is_likely(counts, _probabilities(logits, {}))


PROMPT, OUTPUT = [7, 7, 9, 30], [9, 11, 12]
BIAS = {3: 2.5, 9: -1.0, 11: 6.0}
BAD_WORDS = ((20,), (11, 12, 21), (12, 22), (5, 23))
ENDS = (1, 2)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("min_tokens", [3, 4])
def test_changes_of_logits_equal_those_of_transformers(sampler: str, min_tokens: int) -> None:
    """Biases, penalties, bad words and the ends of a text that is still too short, over the engine's own lists."""
    logits = _logits(9)
    logits[[1, 20, 21, 22, 23]] += 3
    token_ids = np.array(PROMPT + OUTPUT, np.int32)
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], added] for token, added in BIAS.items()]),
            RepetitionPenaltyLogitsProcessor(1.4),
            NoBadWordsLogitsProcessor([[*word] for word in BAD_WORDS], eos_token_id=None),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, list(ENDS)),
        ]
    )
    scores = processors(torch.from_numpy(token_ids)[None].long(), torch.from_numpy(logits.copy())[None]).double()
    params = SamplingParams(logit_bias=BIAS, repetition_penalty=1.4, min_tokens=min_tokens)
    rule = EndRule(frozenset(ENDS), min_tokens, 99)
    seq = Sequence("a", 0, params, 0, token_ids, len(PROMPT), rule, bad_words=BadWords(BAD_WORDS))
    row = SamplingRow(
        seed=6,
        repetition_penalty=1.4,
        num_seen_prompt=len(PROMPT),
        seen=token_ids,
        banned=seq.banned_ids(token_ids),
        biased=seq.biased,
        biases=seq.biases,
    )
    draw = SAMPLERS[sampler]
    assert draw(logits, replace(row, temperature=0.0), 1).tolist() == [int(scores.argmax())]
    shares = torch.softmax(scores, -1)[0].numpy()
    counts = np.bincount(draw(logits, row, 10_000), minlength=VOCAB)
    assert not counts[shares == 0].any()
    assert _chi_square_is_likely(counts, shares)
