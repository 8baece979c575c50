"""The sampler's last kernel: the exact limits among the collected tokens, then the draw. See `sampling_passes`."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.launches import wait_for_kernel_ahead
from penstock.kernels.triton.sampling_passes import (
    FAILED,
    INFINITY_BITS,
    best_of,
    distance_of,
    least_bits,
    limits_of,
    real,
    row_of,
    scores_of,
    weight_of,
)


@triton.jit
def _amount_between(
    row, best, temperature, candidates, count, low, high, vocab,
    COLUMNS: tl.constexpr, COLLECTED: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Return how many tokens, or how much weight, have `low` <= bits < `high`, among the candidates or all logits."""
    amounts = tl.zeros([COLUMNS], tl.int64)
    i = tl.arange(0, COLUMNS)
    for start in range(0, count if COLLECTED else vocab, COLUMNS):
        if COLLECTED:
            near = tl.load(candidates + 2 * (start + i), mask=start + i < count, other=INFINITY_BITS)
        else:
            _given, scores = scores_of(row, start + i, vocab)
            _, near = distance_of(scores, best, temperature)
        amount = weight_of(near.to(tl.float32, bitcast=True)) if WEIGHED else tl.full([COLUMNS], 1, tl.int64)
        amounts += tl.where((near >= low) & (near < high), amount, 0)
    return tl.sum(amounts, 0)


@triton.jit
def _limit(
    row, best, temperature, candidates, count, least, most, base, wanted, vocab,
    COLUMNS: tl.constexpr, COLLECTED: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Return the largest bits from `least` to `most` such that less than `wanted` is nearer; `base`: below `least`."""
    low, high = least, most
    while low < high:
        middle = low + (high - low + 1) // 2
        given = row, best, temperature, candidates, count, least, middle, vocab
        if (base + _amount_between(*given, COLUMNS, COLLECTED, WEIGHED)).to(tl.float64) < wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _exact_limit(
    row, best, temperature, rule, candidates, count, bounds, vocab, COLUMNS: tl.constexpr, BUCKETS: tl.constexpr,
    COLLECTED: tl.constexpr,
):  # fmt: skip
    """Return the bits of the largest distance that min_p, top_k and top_p keep."""
    is_k, is_p, max_bits = limits_of(rule, vocab)
    of_k, first, last = (
        tl.load(bounds).to(tl.int32),
        tl.load(bounds + 1).to(tl.int32),
        tl.load(bounds + 2).to(tl.int32),
    )
    below_k, below_p = tl.load(bounds + 4), tl.load(bounds + 5)
    given = row, best, temperature, candidates, count
    kept = below_k
    if is_k & (of_k < BUCKETS):
        least, wanted = least_bits(of_k), (tl.load(rule + 6).to(tl.int64) - tl.load(bounds + 3)).to(tl.float64)
        most, none = tl.minimum(max_bits, least_bits(of_k + 1) - 1), tl.full([], 0, tl.int64)
        max_bits = _limit(*given, least, most, none, wanted, vocab, COLUMNS, COLLECTED, False)
        if is_p:
            kept += _amount_between(*given, least, max_bits + 1, vocab, COLUMNS, COLLECTED, True)
    if is_p:
        wanted, most = kept.to(tl.float64) * real(rule, 1), tl.minimum(max_bits, least_bits(last + 1) - 1)
        max_bits = _limit(*given, least_bits(first), most, below_p, wanted, vocab, COLUMNS, COLLECTED, True)
    return max_bits


@triton.jit
def _add_kept(
    weights, row, best, temperature, candidates, count, max_bits, vocab,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, COLLECTED: tl.constexpr,
):  # fmt: skip
    """Add the kept candidates to the weights of their tiles, or compute the tiles' weights from the logits."""
    i = tl.arange(0, COLUMNS)
    if COLLECTED:
        for start in range(0, count, COLUMNS):
            inside = start + i < count
            near = tl.load(candidates + 2 * (start + i), mask=inside, other=INFINITY_BITS)
            tile = tl.load(candidates + 2 * (start + i) + 1, mask=inside, other=0) // COLUMNS
            weight = weight_of(near.to(tl.float32, bitcast=True))
            tl.atomic_add(weights + tile, weight, mask=inside & (near <= max_bits) & (weight > 0), sem="relaxed")
    else:
        for tile in range(TILES):
            _given, scores = scores_of(row, tile * COLUMNS + i, vocab)
            distance, near = distance_of(scores, best, temperature)
            tl.store(weights + tile, tl.sum(tl.where(near <= max_bits, weight_of(distance), 0), 0))
    # Other threads of this program read the sums.
    tl.debug_barrier()


@triton.jit
def _uniform(rule):
    """Return the row's random number in [0, 1): 53 of the 64 bits of Philox, as a fraction of 1."""
    seed = tl.load(rule + 9).to(tl.uint32, bitcast=True), tl.load(rule + 10).to(tl.uint32, bitcast=True)
    position, choice = tl.load(rule + 8).to(tl.uint32, bitcast=True), tl.load(rule + 7).to(tl.uint32, bitcast=True)
    zero = tl.full([], 0, tl.uint32)
    low, high, _, _ = tl.philox_impl(position, choice, zero, zero, seed[0], seed[1], 10)
    bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _token_of(row, best, temperature, max_bits, shares, uniform, vocab, COLUMNS: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return the first token, by id, at which the cumulative weight exceeds the share `uniform` of all kept weight.

    shares: [TILES_PAD], the kept weight of each tile.
    """
    t = tl.arange(0, TILES_PAD)
    target = uniform * tl.sum(shares, 0)
    reached = (tl.cumsum(shares, 0) > target) & (shares > 0)
    # Rounding may put the target past the last weight; then the last token with any weight is chosen.
    tile = tl.minimum(tl.min(tl.where(reached, t, TILES_PAD), 0), tl.max(tl.where(shares > 0, t, 0), 0))
    before = tl.sum(tl.where(t < tile, shares, 0.0), 0)
    ids = tile * COLUMNS + tl.arange(0, COLUMNS)
    _given, scores = scores_of(row, ids, vocab)
    distance, near = distance_of(scores, best, temperature)
    weights = tl.where((near <= max_bits) & (ids < vocab), weight_of(distance), 0)
    reached = (before + tl.cumsum(weights, 0).to(tl.float64) > target) & (weights > 0)
    first = tl.min(tl.where(reached, ids, vocab), 0)
    return tl.minimum(first, tl.max(tl.where(weights > 0, ids, 0), 0))


@triton.jit
def draw_tokens(
    chosen, candidates, found, weights, bounds, bests, tokens, logits, rules, marks, biases, vocab, stride,
    COLUMNS: tl.constexpr, BUCKETS: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    CAPACITY: tl.constexpr, FIELDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [rows]. Choose a tile by its weight, then a token of it."""
    wait_for_kernel_ahead(DEPENDENT)
    index = tl.program_id(0)
    rule, row = row_of(logits, rules, marks, biases, vocab, stride)
    temperature = real(rule, 0)
    best, token, is_sound = best_of(bests, tokens, TILES, TILES_PAD)
    if is_sound & (temperature > 0):
        is_k, is_p, max_bits = limits_of(rule, vocab)
        mine = weights + index * TILES
        is_limited, is_filtered = is_k | is_p, is_k | is_p | (max_bits < INFINITY_BITS)
        if is_limited:
            count = tl.load(found + index)
            own = candidates + index.to(tl.int64) * CAPACITY * 2
            bound = bounds + index * FIELDS
            if count <= CAPACITY:
                max_bits = _exact_limit(row, best, temperature, rule, own, count, bound, vocab, COLUMNS, BUCKETS, True)
                _add_kept(mine, row, best, temperature, own, count, max_bits, vocab, COLUMNS, TILES, True)
            else:
                max_bits = _exact_limit(row, best, temperature, rule, own, count, bound, vocab, COLUMNS, BUCKETS, False)
                _add_kept(mine, row, best, temperature, own, count, max_bits, vocab, COLUMNS, TILES, False)
        t = tl.arange(0, TILES_PAD)
        # Atomic additions bypass the first cache.
        shares = tl.load(mine + t, mask=t < TILES, other=0, cache_modifier=".cg").to(tl.float64)
        if is_filtered == 0:
            here = tl.load(bests + index * TILES + t, mask=t < TILES, other=-float("inf"))
            distance, _ = distance_of(here, best, temperature)
            shares *= tl.exp(-distance).to(tl.float64)
        token = _token_of(row, best, temperature, max_bits, shares, _uniform(rule), vocab, COLUMNS, TILES_PAD)
    tl.store(chosen + index, tl.where(is_sound, token, FAILED))
