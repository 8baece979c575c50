"""Samples tokens without a sort, one program per row: limits are found by bisection over the bits of a float.

`kernels.reference.sampler` defines the rules and their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.triton.launches import padded

RULE_COLUMNS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("top_k", "choice", "position", "seed_low", "seed_high", "marks"),
)
"""The fields of a row's rule, 32 bits each; the first six are floats. `marks` is the row of `Marks`, or -1."""

_NUM_COLUMNS = tl.constexpr(len(RULE_COLUMNS))
_PROMPT, _BANNED = tl.constexpr(1 << 29), tl.constexpr(1 << 30)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_FAILED = tl.constexpr(-1)
_MAX_COLUMNS = 4096
_MARKS_AT_ONCE = 256


@triton.jit
def _real(rule, COLUMN: tl.constexpr):
    return tl.load(rule + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _scores(row, ids, vocab):
    """Return logits with biases, penalties and bans applied, -inf past the vocabulary."""
    logits, marks, biases, is_marked, repetition, presence, frequency = row
    inside = ids < vocab
    x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if is_marked:
        x += tl.load(biases + ids, mask=inside, other=0.0)
        mark = tl.load(marks + ids, mask=inside, other=0)
        x = tl.where(mark != 0, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
        count = mark & (_PROMPT - 1)
        x -= frequency * count.to(tl.float32)
        x = tl.where(count > 0, x - presence, x)
        x = tl.where(mark >= _BANNED, -float("inf"), x)
    return x


@triton.jit
def _behind(scores, best, temperature):
    """Return how far scores are below the best, in temperatures from 0 to infinity, and its bits, which sort alike."""
    distance = tl.where(scores == best, 0.0, (best - scores) / temperature)
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _amount_below(row, best, temperature, bits, vocab, COLUMNS: tl.constexpr, WEIGHED: tl.constexpr):
    """Return how many tokens, or how much weight, are nearer to the best score than `bits`."""
    amounts = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, COLUMNS):
        ids = start + tl.arange(0, COLUMNS)
        scores = _scores(row, ids, vocab)
        distance, near = _behind(scores, best, temperature)
        amounts += tl.where(near < bits, tl.exp(-distance) if WEIGHED else 1.0, 0.0)
    return tl.sum(amounts.to(tl.float64), 0)


@triton.jit
def _limit(row, best, temperature, max_bits, wanted, vocab, COLUMNS: tl.constexpr, WEIGHED: tl.constexpr):
    """Return the largest bits, up to `max_bits`, such that less than `wanted` is nearer."""
    low, high = tl.full([], 0, tl.int32), max_bits
    while low < high:
        middle = low + (high - low + 1) // 2
        if _amount_below(row, best, temperature, middle, vocab, COLUMNS, WEIGHED) < wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _weights(row, best, temperature, max_bits, start, vocab, COLUMNS: tl.constexpr):
    """Return the weights of the kept tokens among the COLUMNS tokens from `start` on, in float64."""
    ids = start + tl.arange(0, COLUMNS)
    scores = _scores(row, ids, vocab)
    distance, near = _behind(scores, best, temperature)
    return tl.where(near <= max_bits, tl.exp(-distance), 0.0).to(tl.float64)


@triton.jit
def _draw(row, best, temperature, max_bits, uniform, vocab, COLUMNS: tl.constexpr):
    """Return the first token, by id, at which the cumulative weight exceeds the share `uniform` of all kept weight."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, COLUMNS):
        total += tl.sum(_weights(row, best, temperature, max_bits, start, vocab, COLUMNS), 0)
    target = uniform * total
    before, cumulated = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    at = tl.full([], 0, tl.int32)
    for start in range(0, vocab, COLUMNS):
        amount = tl.sum(_weights(row, best, temperature, max_bits, start, vocab, COLUMNS), 0)
        # Rounding may put the target past the last weight; then the last token with any weight is chosen.
        is_next = (cumulated <= target) & (amount > 0)
        at = tl.where(is_next, start, at)
        before = tl.where(is_next, cumulated, before)
        cumulated += amount
    weights = _weights(row, best, temperature, max_bits, at, vocab, COLUMNS)
    ids = at + tl.arange(0, COLUMNS)
    reached = (before + tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(reached, ids, vocab), 0)
    last = tl.max(tl.where(weights > 0, ids, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def _best(row, vocab, COLUMNS: tl.constexpr):
    """Return the best score, the first token that has it, and whether the row can sample at all."""
    logits = row[0]
    best, at, is_sound = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32), tl.full([], True, tl.int1)
    largest = tl.full([], -float("inf"), tl.float32)
    for start in range(0, vocab, COLUMNS):
        ids = start + tl.arange(0, COLUMNS)
        x = tl.load(logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        scores = _scores(row, ids, vocab)
        is_sound = is_sound & (tl.sum(((x != x) | (scores != scores)).to(tl.int32), 0) == 0)
        largest = tl.maximum(largest, tl.max(x, 0))
        here = tl.max(scores, 0)
        at = tl.where(here > best, tl.min(tl.where(scores == here, ids, vocab), 0), at)
        best = tl.maximum(best, here)
    infinity = float("inf")
    return best, at, is_sound & (largest < infinity) & (best < infinity) & (best > -infinity)


@triton.jit
def _sample(tokens, logits, rules, marks, biases, vocab, stride, COLUMNS: tl.constexpr):
    """Grid [rows]."""
    row_index = tl.program_id(0)
    rule = rules + row_index * _NUM_COLUMNS
    temperature, top_p, min_p = _real(rule, 0), _real(rule, 1), _real(rule, 2)
    marks_row = tl.load(rule + 11)
    marks_at = tl.maximum(marks_row, 0).to(tl.int64) * vocab
    row = (
        logits + row_index.to(tl.int64) * stride,
        marks + marks_at,
        biases + marks_at,
        marks_row >= 0,
        _real(rule, 3),
        _real(rule, 4),
        _real(rule, 5),
    )
    best, token, is_sound = _best(row, vocab, COLUMNS)
    if is_sound & (temperature > 0):
        max_bits = tl.full([], _INFINITY_BITS, tl.int32)
        if min_p > 0:
            max_bits = (-tl.log(tl.minimum(min_p, 1.0)) + 0.0).to(tl.int32, bitcast=True)
        top_k = tl.load(rule + 6)
        if (top_k > 0) & (top_k < vocab):
            max_bits = _limit(row, best, temperature, max_bits, top_k.to(tl.float64), vocab, COLUMNS, False)
        if top_p < 1:
            kept = _amount_below(row, best, temperature, max_bits + 1, vocab, COLUMNS, True)
            max_bits = _limit(row, best, temperature, max_bits, kept * top_p, vocab, COLUMNS, True)
        seed = tl.load(rule + 9).to(tl.uint32, bitcast=True), tl.load(rule + 10).to(tl.uint32, bitcast=True)
        position, choice = tl.load(rule + 8).to(tl.uint32, bitcast=True), tl.load(rule + 7).to(tl.uint32, bitcast=True)
        zero = tl.full([], 0, tl.uint32)
        low, high, _, _ = tl.philox_impl(position, choice, zero, zero, seed[0], seed[1], 10)
        # 53 of the 64 bits, as a fraction of 1.
        bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
        uniform = bits.to(tl.float64) * 1.1102230246251565e-16
        token = _draw(row, best, temperature, max_bits, uniform, vocab, COLUMNS)
    tl.store(tokens + row_index, tl.where(is_sound, token, _FAILED))


@triton.jit(do_not_specialize=["count"])
def _mark(marks, entries, count, vocab, COUNT: tl.constexpr):
    """Grid [runs of entries]. An entry is a row of marks, a token, and the number to add (1) or the flag to set."""
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = i < count
    row = tl.load(entries + 3 * i, mask=inside, other=0).to(tl.int64)
    token = tl.load(entries + 3 * i + 1, mask=inside, other=0)
    what = tl.load(entries + 3 * i + 2, mask=inside, other=0)
    at = marks + row * vocab + token
    tl.atomic_add(at, what, mask=inside & (what == 1))
    tl.atomic_or(at, what, mask=inside & (what > 1))


@triton.jit
def _mask(marks, words, rows, vocab, words_stride, COLUMNS: tl.constexpr):
    """Grid [masks, runs of columns]: ban the tokens that a mask's bits do not allow."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = ids < vocab
    word = tl.load(words + row * words_stride + ids // 32, mask=inside, other=0)
    at = marks + tl.load(rows + row).to(tl.int64) * vocab + ids
    mark = tl.load(at, mask=inside, other=0)
    tl.store(at, tl.where((word >> (ids % 32)) & 1 != 0, mark, mark | _BANNED), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """By row and token: how often the row has seen it, whether it is banned, and the bias added to its logit."""

    marks: Tensor
    """[max_rows, vocab] int32."""
    biases: Tensor
    """[max_rows, vocab] float32."""

    @classmethod
    def empty(cls, max_rows: int, vocab: int, device: torch.device) -> Marks:
        """Allocate `max_rows` rows. They must be cleared before use."""
        shape = max_rows, vocab
        return cls(torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, device=device))

    def clear(self, num_rows: int) -> None:
        """Clear the first `num_rows` rows."""
        self.marks[:num_rows].zero_()
        self.biases[:num_rows].zero_()

    def add(self, entries: Tensor) -> None:
        """Record the tokens that rows have seen and must not choose. entries: [n, 3] in int32, from `mark_entries`."""
        if len(entries):
            grid = (triton.cdiv(len(entries), _MARKS_AT_ONCE),)
            _mark[grid](self.marks, entries, len(entries), self.marks.shape[1], COUNT=_MARKS_AT_ONCE)

    def allow_only(self, rows: Tensor, words: Tensor) -> None:
        """Ban all tokens without a set bit. rows: [n]; words: [n, vocab / 32], both int32, lowest bit first."""
        vocab = self.marks.shape[1]
        columns = min(_MAX_COLUMNS, padded(vocab, 16))
        grid = (len(rows), triton.cdiv(vocab, columns))
        _mask[grid](self.marks, words, rows, vocab, words.stride(0), COLUMNS=columns)


def mark_entries(row: int, seen: NDArray[np.int32], num_prompt: int, banned: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the entries of a row for `Marks.add`: its prompt tokens, output tokens and banned tokens."""
    what = np.ones(len(seen) + len(banned), np.int32)
    what[:num_prompt] = _PROMPT.value
    what[len(seen) :] = _BANNED.value
    return np.stack((np.full_like(what, row), np.concatenate((seen, banned)), what), axis=1)


class RuleArrays(Protocol):
    """The sampling rules of all rows, every array [rows]. The engine's `SamplingRows` implements it."""

    @property
    def temperature(self) -> NDArray[np.float32]: ...  # noqa: D102
    @property
    def top_p(self) -> NDArray[np.float32]: ...  # noqa: D102
    @property
    def min_p(self) -> NDArray[np.float32]: ...  # noqa: D102
    @property
    def repetition_penalty(self) -> NDArray[np.float32]: ...  # noqa: D102
    @property
    def presence_penalty(self) -> NDArray[np.float32]: ...  # noqa: D102
    @property
    def frequency_penalty(self) -> NDArray[np.float32]: ...  # noqa: D102
    @property
    def top_k(self) -> NDArray[np.int32]: ...  # noqa: D102
    @property
    def seed(self) -> NDArray[np.uint64]: ...  # noqa: D102
    @property
    def choice(self) -> NDArray[np.int32]: ...  # noqa: D102
    @property
    def position(self) -> NDArray[np.int32]: ...  # noqa: D102


def pack_rules(rows: RuleArrays, marks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the rules as `sample` takes them. marks: [rows], each row's own row of `Marks`, or -1."""
    packed = np.empty((len(marks), len(RULE_COLUMNS)), np.int32)
    for at, name in enumerate(RULE_COLUMNS[:6]):
        packed[:, at] = getattr(rows, name).view(np.int32)
    packed[:, 6], packed[:, 7], packed[:, 8] = rows.top_k, rows.choice, rows.position
    packed[:, 9:11] = rows.seed.reshape(-1, 1).view(np.int32)
    packed[:, 11] = marks
    return packed


def sample(logits: Tensor, rules: Tensor, marks: Marks) -> Tensor:
    """Sample one token per row, in int32; FAILED_TOKEN (-1) if a row cannot sample.

    logits: [rows, vocab], any float; rules: [rows, len(RULE_COLUMNS)] in int32.
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    columns = min(_MAX_COLUMNS, padded(vocab, 16))
    # The reference rounds after each penalty. Fused steps round once, so another token could win by the last bit.
    _sample[(num_rows,)](
        *(tokens, logits, rules, marks.marks, marks.biases, vocab, logits.stride(0)),
        COLUMNS=columns,
        num_warps=8 if columns > 1024 else 4,
        enable_fp_fusion=False,
    )
    return tokens
