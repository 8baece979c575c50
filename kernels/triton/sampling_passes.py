"""The sampler's kernels: at most three passes over the logits with one program per tile, and the draw.

1. `scan_tiles`: each tile's best token and its weight. It is all that greedy and plain rows need.
2. `count_buckets`: rows with top_k or top_p count tokens, and add up weights, in buckets by distance from the best
   score. `bound_limits` then finds the buckets in which the limits lie.
3. `collect_candidates`: the weight that a tile surely keeps, and the few tokens of those buckets.
4. `draw_tokens` finds the exact limits among the collected tokens, chooses a tile by its weight, and reads that tile to
   choose a token.

This is a radix selection (Alabi et al., "Fast k-selection algorithms for graphics processing units", 2012) with buckets
that are even in the distance.

Weights are integers in units of 2^-40, so their sums do not depend on the order of atomic additions. A weight below one
unit counts as 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.launches import wait_for_kernel_ahead

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


COLUMNS = 2048
"""Tokens of a tile."""
BUCKETS = 2048
"""1,024 buckets of 1/64 temperature each, then 8 for each power of two up to infinity, and padding."""
MAX_CANDIDATES = 8192
"""Tokens of a row's bounding buckets. If there are more, `draw_tokens` reads the logits repeatedly instead."""
BOUND_FIELDS = 6
"""Per row: buckets of top_k, first and last of top_p; tokens and weight nearer than the former, weight nearer than
the latter."""


@triton.jit
def scan_tiles(
    bests, tokens, weights, counts, masses, found, logits, rules, marks, biases, vocab, stride,
    CLEARED: tl.constexpr, COLUMNS: tl.constexpr, BUCKETS: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [rows, tiles]. Pass 1: best score and token, weight relative to this tile's best; clears the buckets.

    The token is -1 if a logit or score of the tile is NaN or a logit is infinite.
    """
    wait_for_kernel_ahead(DEPENDENT)
    index, tile = tl.program_id(0), tl.program_id(1)
    rule, row = row_of(logits, rules, marks, biases, vocab, stride)
    ids = tile * COLUMNS + tl.arange(0, COLUMNS)
    given, scores = scores_of(row, ids, vocab)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, ids, vocab), 0)
    is_bad = (given != given) | (scores != scores) | (given == float("inf"))
    at = index * TILES + tile
    tl.store(bests + at, best)
    tl.store(tokens + at, tl.where(tl.sum(is_bad.to(tl.int32), 0) > 0, FAILED, token))
    temperature = real(rule, 0)
    if temperature > 0:
        distance, _ = distance_of(scores, best, temperature)
        tl.store(weights + at, tl.sum(weight_of(distance), 0))
        is_k, is_p, _ = limits_of(rule, vocab)
        if is_k | is_p:
            b = tile * CLEARED + tl.arange(0, CLEARED)
            tl.store(counts + index * BUCKETS + b, tl.zeros([CLEARED], tl.int32), mask=b < BUCKETS)
            tl.store(masses + index * BUCKETS + b, tl.zeros([CLEARED], tl.int64), mask=b < BUCKETS)
            if tile == 0:
                tl.store(found + index, 0)


@triton.jit
def _least_of_top_k(bests, rule, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return a score that at least top_k tokens reach: those of the best tiles. -inf if there are fewer tiles."""
    least, top_k = tl.full([], -float("inf"), tl.float32), tl.load(rule + 6)
    if top_k <= TILES:
        t = tl.arange(0, TILES_PAD)
        here = tl.load(bests + tl.program_id(0) * TILES + t, mask=t < TILES, other=-float("inf"))
        num_better = tl.sum((here[None, :] > here[:, None]).to(tl.int32), 1)
        least = tl.min(tl.where((t < TILES) & (num_better < top_k), here, float("inf")), 0)
    return least


@triton.jit
def _total_weight(bests, weights, best, temperature, TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return 0.99 of the weight of a row's tokens, where the best one weighs 1: rounding may enlarge it."""
    t = tl.arange(0, TILES_PAD)
    at = tl.program_id(0) * TILES + t
    distance, _ = distance_of(tl.load(bests + at, mask=t < TILES, other=-float("inf")), best, temperature)
    relative = tl.load(weights + at, mask=t < TILES, other=0).to(tl.float64) / WEIGHT_UNIT
    return 0.99 * tl.sum(relative * tl.exp(-distance).to(tl.float64), 0)


@triton.jit
def count_buckets(
    counts, masses, weights, bests, tokens, logits, rules, marks, biases, vocab, stride,
    COLUMNS: tl.constexpr, BUCKETS: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [rows, tiles]. Pass 2: the tokens of each bucket for top_k, their weight for top_p.

    Each token costs an atomic addition, so tokens that surely lie beyond a limit are left out. The weight of those
    that top_p surely drops is added to the last bucket, which has no token.
    """
    wait_for_kernel_ahead(DEPENDENT)
    index = tl.program_id(0)
    rule, row = row_of(logits, rules, marks, biases, vocab, stride)
    temperature = real(rule, 0)
    is_k, is_p, max_bits = limits_of(rule, vocab)
    if (is_k | is_p) & (temperature > 0):
        best, _token, is_sound = best_of(bests, tokens, TILES, TILES_PAD)
        if is_sound:
            ids = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            _given, scores = scores_of(row, ids, vocab)
            distance, near = distance_of(scores, best, temperature)
            # Tokens at an infinite distance weigh nothing, so they may stay whatever their number.
            kept = (near <= max_bits) & (near < INFINITY_BITS)
            at = index * BUCKETS + tl.where(kept, bucket_of(distance, near), 0)
            if is_k:
                kept = kept & (scores >= _least_of_top_k(bests, rule, TILES, TILES_PAD))
                tl.atomic_add(counts + at, 1, mask=kept, sem="relaxed")
            if is_p:
                # Of the best token's weight, which is one unit of 1, at least.
                total = tl.full([], 1.0, tl.float64)
                if (is_k == 0) & (max_bits == INFINITY_BITS):
                    total = _total_weight(bests, weights, best, temperature, TILES, TILES_PAD)
                # All tokens lighter than this weigh at most half of what top_p drops.
                least = (1.0 - real(rule, 1)).to(tl.float64) * total / (2 * vocab) * WEIGHT_UNIT
                weight = weight_of(distance)
                is_light = kept & (weight.to(tl.float64) < least)
                tl.atomic_add(masses + at, weight, mask=kept & (is_light == 0) & (weight > 0), sem="relaxed")
                light = tl.sum(tl.where(is_light, weight, 0), 0)
                if light > 0:
                    tl.atomic_add(masses + index * BUCKETS + BUCKETS - 1, light, sem="relaxed")


@triton.jit
def bound_limits(
    bounds, counts, masses, rules, vocab, BUCKETS: tl.constexpr, FIELDS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid [rows]. Find the buckets in which the limits lie; BUCKETS where there is no limit."""
    wait_for_kernel_ahead(DEPENDENT)
    index = tl.program_id(0)
    rule = rules + index * NUM_RULE_COLUMNS
    is_k, is_p, _ = limits_of(rule, vocab)
    if (is_k | is_p) & (real(rule, 0) > 0):
        b = tl.arange(0, BUCKETS)
        of_k = tl.full([], BUCKETS, tl.int32)
        nearer = tl.full([], 0, tl.int32)
        if is_k:
            count = tl.load(counts + index * BUCKETS + b)
            of_k = tl.sum((tl.cumsum(count, 0) < tl.load(rule + 6)).to(tl.int32), 0)
            nearer = tl.sum(tl.where(b < of_k, count, 0), 0)
        first, last = of_k, of_k
        below_k, below_p = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        if is_p:
            mass = tl.load(masses + index * BUCKETS + b)
            through, top_p = tl.cumsum(mass, 0).to(tl.float64), real(rule, 1).to(tl.float64)
            # top_k keeps between all and none of its own bucket.
            below_k = tl.sum(tl.where(b < of_k, mass, 0), 0)
            most = tl.sum(tl.where(b <= of_k, mass, 0), 0)
            first = tl.sum((through < below_k.to(tl.float64) * top_p).to(tl.int32), 0)
            last = tl.sum((through < most.to(tl.float64) * top_p).to(tl.int32), 0)
            below_p = tl.sum(tl.where(b < first, mass, 0), 0)
        to = bounds + index * FIELDS
        tl.store(to, of_k.to(tl.int64))
        tl.store(to + 1, first.to(tl.int64))
        tl.store(to + 2, last.to(tl.int64))
        tl.store(to + 3, nearer.to(tl.int64))
        tl.store(to + 4, below_k)
        tl.store(to + 5, below_p)


@triton.jit
def collect_candidates(
    candidates, found, weights, bounds, bests, tokens, logits, rules, marks, biases, vocab, stride,
    COLUMNS: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    CAPACITY: tl.constexpr, FIELDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [rows, tiles]. Pass 3: a tile's weight that limits surely keep; distances and ids of doubtful tokens."""
    wait_for_kernel_ahead(DEPENDENT)
    index, tile = tl.program_id(0), tl.program_id(1)
    rule, row = row_of(logits, rules, marks, biases, vocab, stride)
    temperature = real(rule, 0)
    is_k, is_p, max_bits = limits_of(rule, vocab)
    is_limited = is_k | is_p
    if (is_limited | (max_bits < INFINITY_BITS)) & (temperature > 0):
        best, _token, is_sound = best_of(bests, tokens, TILES, TILES_PAD)
        if is_sound:
            ids = tile * COLUMNS + tl.arange(0, COLUMNS)
            _given, scores = scores_of(row, ids, vocab)
            distance, near = distance_of(scores, best, temperature)
            sure = (near <= max_bits) & (near < INFINITY_BITS)
            if is_limited:
                of_k = tl.load(bounds + index * FIELDS)
                first, last = tl.load(bounds + index * FIELDS + 1), tl.load(bounds + index * FIELDS + 2)
                bucket = bucket_of(distance, near)
                is_candidate = sure & ((bucket == of_k) | ((bucket >= first) & (bucket <= last)))
                sure = sure & (bucket < tl.minimum(first, of_k))
                chosen = is_candidate.to(tl.int32)
                count = tl.sum(chosen, 0)
                if count > 0:
                    slot = tl.atomic_add(found + index, count, sem="relaxed") + tl.cumsum(chosen, 0) - 1
                    to = candidates + (index.to(tl.int64) * CAPACITY + slot) * 2
                    is_stored = is_candidate & (slot < CAPACITY)
                    tl.store(to, near, mask=is_stored)
                    tl.store(to + 1, ids, mask=is_stored)
            tl.store(weights + index * TILES + tile, tl.sum(tl.where(sure, weight_of(distance), 0), 0))


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
