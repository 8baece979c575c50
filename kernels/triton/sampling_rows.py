"""What the sampler's kernels compute of a row: scores, distances from the best score, weights, buckets and limits."""

from __future__ import annotations

import triton
import triton.language as tl

RULE_COLUMNS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("top_k", "choice", "position", "seed_low", "seed_high", "marks"),
)
"""The fields of a row's rule, 32 bits each; the first six are floats. `marks` is the row of `Marks`, or -1."""

NUM_RULE_COLUMNS = tl.constexpr(len(RULE_COLUMNS))
PROMPT, BANNED = tl.constexpr(1 << 29), tl.constexpr(1 << 30)

INFINITY_BITS = tl.constexpr(0x7F800000)
FAILED = tl.constexpr(-1)
WEIGHT_UNIT = tl.constexpr(float(1 << 40))
_EVEN_BUCKETS = tl.constexpr(1024)
_EVEN_LIMIT = tl.constexpr(16.0)
_EVEN_PER_UNIT = tl.constexpr(64.0)
_FIRST_OCTAVE = tl.constexpr(0x41800000 >> 20)
"""16.0, with three bits of its mantissa."""


@triton.jit
def real(rule, COLUMN: tl.constexpr):
    """Return a float of a rule."""
    return tl.load(rule + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def row_of(logits, rules, marks, biases, vocab, stride):
    """Return the rule of this program's row, and the row as `scores_of` takes it."""
    index = tl.program_id(0)
    rule = rules + index * NUM_RULE_COLUMNS
    marks_row = tl.load(rule + 11)
    at = tl.maximum(marks_row, 0).to(tl.int64) * vocab
    mine, penalties = logits + index.to(tl.int64) * stride, (real(rule, 3), real(rule, 4), real(rule, 5))
    return rule, (mine, marks + at, biases + at, marks_row >= 0, penalties[0], penalties[1], penalties[2])


@triton.jit
def scores_of(row, ids, vocab):
    """Return logits as given, and with biases, penalties and bans applied; both are -inf past the vocabulary."""
    logits, marks, biases, is_marked, repetition, presence, frequency = row
    inside = ids < vocab
    given = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    x = given
    if is_marked:
        x += tl.load(biases + ids, mask=inside, other=0.0)
        mark = tl.load(marks + ids, mask=inside, other=0)
        x = tl.where(mark != 0, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
        count = mark & (PROMPT - 1)
        x -= frequency * count.to(tl.float32)
        x = tl.where(count > 0, x - presence, x)
        x = tl.where(mark >= BANNED, -float("inf"), x)
    return given, x


@triton.jit
def distance_of(scores, best, temperature):
    """Return how far scores are below the best, in temperatures from 0 to infinity, and its bits, which sort alike."""
    distance = tl.where(scores == best, 0.0, (best - scores) / temperature)
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def weight_of(distance):
    """Return the weight of tokens at a distance, in units of 2^-40."""
    return (tl.exp(-distance) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def bucket_of(distance, near):
    """Return the bucket of a distance with the bits `near`; it never falls as the distance grows."""
    # A product with a power of two is exact, so `least_bits` gives the same edges.
    even = (tl.minimum(distance, _EVEN_LIMIT) * _EVEN_PER_UNIT).to(tl.int32)
    return tl.where(distance < _EVEN_LIMIT, even, _EVEN_BUCKETS + (near >> 20) - _FIRST_OCTAVE)


@triton.jit
def least_bits(bucket):
    """Return the bits of the smallest distance of a bucket."""
    even = (bucket.to(tl.float32) * (1 / _EVEN_PER_UNIT)).to(tl.int32, bitcast=True)
    return tl.where(bucket < _EVEN_BUCKETS, even, (bucket - _EVEN_BUCKETS + _FIRST_OCTAVE) << 20)


@triton.jit
def limits_of(rule, vocab):
    """Return whether top_k and top_p drop any token, and the bits of the largest distance that min_p keeps."""
    top_k, min_p = tl.load(rule + 6), real(rule, 2)
    max_bits = tl.full([], INFINITY_BITS, tl.int32)
    if min_p > 0:
        max_bits = (-tl.log(tl.minimum(min_p, 1.0)) + 0.0).to(tl.int32, bitcast=True)
    return (top_k > 0) & (top_k < vocab), real(rule, 1) < 1, max_bits


@triton.jit
def best_of(bests, tokens, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return the row's best score, the first token that has it, and whether the row can sample at all."""
    t = tl.arange(0, TILES_PAD)
    at = tl.program_id(0) * TILES + t
    here = tl.load(bests + at, mask=t < TILES, other=-float("inf"))
    token = tl.load(tokens + at, mask=t < TILES, other=0)
    best = tl.max(here, 0)
    is_sound = (tl.min(token, 0) >= 0) & (best > -float("inf")) & (best < float("inf"))
    first = tl.min(tl.where(here == best, t, TILES_PAD), 0)
    return best, tl.sum(tl.where(t == first, token, 0), 0), is_sound
