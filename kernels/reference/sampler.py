"""Defines sampling, one row at a time, with the rules in order. Every faster sampler is tested against it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.philox import sampling_uniform

FAILED_TOKEN = -1
"""The token of a row that cannot sample: its logits were not finite, before or after biases, penalties and bans."""

NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
NO_BIASES: NDArray[np.float32] = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRow:
    """The sampling rule of one row. The defaults draw from the plain softmax."""

    temperature: float = 1.0
    """0 chooses the best token."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    seen: NDArray[np.int32] = field(default_factory=NO_TOKENS.copy)
    """Tokens so far: the prompt, then the output."""
    num_seen_prompt: int = 0
    banned: NDArray[np.int32] = field(default_factory=NO_TOKENS.copy)
    biased: NDArray[np.int32] = field(default_factory=NO_TOKENS.copy)
    """Distinct tokens to whose logits `biases` are added."""
    biases: NDArray[np.float32] = field(default_factory=NO_BIASES.copy)
    mask: NDArray[np.uint32] | None = None
    """[vocab / 32]: one bit per token, lowest bit first; only tokens with a set bit may be chosen."""


def sample_row(logits: NDArray[np.float32], row: SamplingRow) -> int:
    """Return the token that a row samples with its own random number. logits: [vocab]."""
    return choose(logits, row, uniform_of(row))


def uniform_of(row: SamplingRow) -> float:
    """Return the random number of a row, in [0, 1)."""
    seed, counters = np.array([row.seed], np.uint64), np.array([[row.choice], [row.position]], np.int32)
    return float(sampling_uniform(seed, *counters)[0])


def choose(logits: NDArray[np.float32], row: SamplingRow, uniform: float) -> int:
    """Return the token that a row chooses with the random number `uniform`, or FAILED_TOKEN. logits: [vocab]."""
    return int(choose_each(logits, row, np.array([uniform]))[0])


# The code checks for overflow and NaN itself, so numpy need not warn.
@np.errstate(all="ignore")
def choose_each(logits: NDArray[np.float32], row: SamplingRow, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return what `choose` does for each of many random numbers, [n]."""
    if not np.isfinite(logits.max()):
        return np.full(len(uniforms), FAILED_TOKEN)
    scores = logits.copy()
    scores[row.biased] += row.biases
    scores = _penalized(scores, row)
    scores[row.banned] = -np.inf
    if row.mask is not None:
        scores[np.unpackbits(row.mask.view(np.uint8), count=len(scores), bitorder="little") == 0] = -np.inf
    if not np.isfinite(scores.max()):
        return np.full(len(uniforms), FAILED_TOKEN)
    if row.temperature == 0:
        return np.full(len(uniforms), scores.argmax())
    scores = (scores - scores.max()) / row.temperature
    # Each limit applies to the tokens that the limit before it kept.
    for least in (_least_by_min_p, _least_by_top_k, _least_by_top_p):
        scores = np.where(scores < least(scores, row), -np.inf, scores)
    cumulative = np.cumsum(np.exp(scores, dtype=np.float64))
    tokens: NDArray[np.int64] = np.argmax(cumulative > uniforms[:, None] * cumulative[-1], axis=1)
    return tokens


def _penalized(logits: NDArray[np.float32], row: SamplingRow) -> NDArray[np.float32]:
    scores, seen = logits.copy(), np.unique(row.seen)
    repeated = scores[seen]
    scores[seen] = np.where(repeated < 0, repeated * row.repetition_penalty, repeated / row.repetition_penalty)
    output, counts = np.unique(row.seen[row.num_seen_prompt :], return_counts=True)
    scores[output] -= row.frequency_penalty * counts.astype(np.float32)
    scores[output] -= row.presence_penalty
    return scores


def _least_by_min_p(_scores: NDArray[np.float32], row: SamplingRow) -> float:
    # The best score is 0, so this is the score of a token min_p times as likely as the best one.
    return float(np.log(row.min_p, dtype=np.float64))


def _least_by_top_k(scores: NDArray[np.float32], row: SamplingRow) -> float:
    k = min(row.top_k, len(scores)) if row.top_k > 0 else len(scores)
    return float(np.sort(scores)[-k])


def _least_by_top_p(scores: NDArray[np.float32], row: SamplingRow) -> float:
    if row.top_p >= 1:
        return -np.inf
    best_first = np.sort(scores)[::-1]
    weights = np.exp(best_first, dtype=np.float64)
    better = np.cumsum(weights) - weights
    return float(best_first[better < row.top_p * weights.sum()][-1])


def logprobs_of(logits: NDArray[np.float32], token: int, count: int) -> list[tuple[int, float]]:
    """Return the log-probabilities of `token`, then of the `count` most likely tokens, of equal ones the lowest first.

    logits: [vocab], as the model computed them, without biases, penalties and bans.
    """
    exact = logits.astype(np.float64)
    values = exact - np.logaddexp.reduce(exact)
    best = np.argsort(-exact, kind="stable")[:count]
    return [(int(i), float(values[i])) for i in (token, *best)]
