"""The paged cache and attention over it, against float64; what rounding may do to each weight is bounded by format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from fakes.cover import examples, pairwise
from fakes.single_kernels import MAX_QUERY_ROWS, Floats, Single, SingleCache
from fixtures.matrices import random_floats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.gpu_node.model.torch_common.positions import to_bf16
from penstock.kernels.cpu.structs import KvFormat
from penstock.kernels.reference.products import quantize_activations

CONTEXTS = (1, 15, 16, 17, 511, 512, 513, 1030)
HEAD_DIMS = (16, 32, 48, 64, 80, 128, 256)
CHUNK = 64
"""Tokens whose weights are quantized together over an int8 cache."""
KEY_GROUP = 32
"""Channels of keys and queries that are quantized together for an int8 cache."""


@dataclass
class Filled:
    """A cache of two heads that holds one sequence, and that sequence as the cache keeps it."""

    cache: SingleCache
    blocks: list[int]
    kept: KvFormat
    keys: Floats
    """[heads, context, head_dim]"""
    values: Floats


@dataclass(frozen=True)
class Shape:
    """Where each row's window begins, and what is added to its scores, [rows, context to whole chunks]."""

    firsts: Sequence[int] | None = None
    biases: Floats | None = None


PLAIN = Shape()
Wide = NDArray[np.float64]
NewCache = Callable[..., SingleCache]


@pytest.fixture
def new_cache(kernels: Single) -> Iterator[NewCache]:
    made: list[SingleCache] = []

    def make(
        kept: KvFormat, head_dim: int, num_blocks: int, *, num_heads: int = 2, block_size: int = 16
    ) -> SingleCache:
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "block_size": block_size, "num_blocks": num_blocks}
        made.append(SingleCache(kernels, kept, **sizes))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def _slot(blocks: Sequence[int], position: int, block_size: int = 16) -> int:
    return blocks[position // block_size] * block_size + position % block_size


def _fill(
    new_cache: NewCache,
    kept: KvFormat,
    head_dim: int,
    context: int,
    *,
    block_size: int = 16,
    seed: int = 0,
    stale: tuple[float, float] = (99, 1e6),
) -> Filled:
    """Every cell of the cache first gets a `stale` key and value, which no result may depend on."""
    num_blocks = -(-context // block_size)
    cache = new_cache(kept, head_dim, num_blocks + 2, block_size=block_size)
    rng = np.random.default_rng(seed)
    stale_cell = [np.full(head_dim, number, np.float32) for number in stale]
    blocks = rng.permutation(num_blocks + 2)[:num_blocks].tolist()
    slots = [_slot(blocks, position, block_size) for position in range(context)]
    keys, values = random_floats(2, 2, context, head_dim, seed=seed)
    for head in range(2):
        cache.set(range((num_blocks + 2) * block_size), head, *stale_cell)
        cache.set(slots, head, keys[head], values[head])
        keys[head], values[head] = cache.get(slots, head)
    return Filled(cache, blocks, kept, keys, values)


def _expected(filled: Filled, queries: Floats, limits: Sequence[int], head: int, shape: Shape) -> tuple[Wide, Wide]:
    """The result, and how far rounded weights may move it; both [rows, head_dim]."""
    firsts, biases = shape.firsts or [0] * len(limits), shape.biases
    dim = queries.shape[1]
    if filled.kept is KvFormat.BF16:
        queries = to_bf16(queries)
    elif filled.kept is KvFormat.INT8:
        queries = _quantized(queries, KEY_GROUP)
    wants, bounds = [], []
    for i, (query, first, limit) in enumerate(zip(queries.astype(np.float64), firsts, limits, strict=True)):
        keys, values = (x[head, first:limit].astype(np.float64) for x in (filled.keys, filled.values))
        scores = keys @ query * dim**-0.5 + (0 if biases is None else biases[i, first:limit])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        wants.append(weights @ values)
        # What single precision does to a score moves its weight by as much as the score is large.
        slack = 1e-5 + 1e-6 * np.abs(keys * query).sum(-1).max() * dim**-0.5
        # Chunks begin where they do in the whole context.
        left_out = first % CHUNK, 0
        moved = _rounding(filled.kept, np.pad(weights, left_out), np.pad(values, (left_out, (0, 0))))
        bounds.append(slack * (weights @ np.abs(values)) + moved + 1e-30)
    return np.array(wants), np.array(bounds)


def _rounding(kept: KvFormat, weights: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """bfloat16 moves a weight by 2^-8 of itself, quantization by half a step of its chunk's largest, float16 not."""
    if kept is not KvFormat.INT8:
        moved: NDArray[np.float64] = (2.0**-8 if kept is KvFormat.BF16 else 0) * (weights @ np.abs(values))
        return moved
    moved = np.zeros(values.shape[1])
    for i in range(0, len(values), CHUNK):
        chunk, weight = values[i : i + CHUNK], weights[i : i + CHUNK]
        scale = np.abs(chunk).max(-1, keepdims=True) / 127
        step = (weight * scale[:, 0]).max() / 255
        moved += 0.5 * step * np.abs(chunk / np.maximum(scale, 1e-30)).sum(0)
    return moved


def _assert_close(
    filled: Filled, queries: Floats, limits: Sequence[int], head: int, shape: Shape = PLAIN, *, by_span: bool = False
) -> None:
    options = {"firsts": shape.firsts, "biases": shape.biases, "by_span": by_span}
    got = filled.cache.attend(queries, limits, filled.blocks, head, **options)
    want, bound = _expected(filled, queries, limits, head, shape)
    assert (np.abs(got - want) <= 1.02 * bound).all(), (np.abs(got - want) / bound).max()


@pytest.mark.parametrize(("kept", "head_dim", "block_size"), pairwise(KvFormat, HEAD_DIMS, [16, 32]))
def test_a_cell_keeps_what_was_set(new_cache: NewCache, kept: KvFormat, head_dim: int, block_size: int) -> None:
    cache = new_cache(kept, head_dim, 3, num_heads=3, block_size=block_size)
    cells = [(slot, head) for slot in range(3 * block_size) for head in range(3)]
    keys, values = random_floats(2, len(cells), head_dim)
    for (slot, head), key, value in zip(cells, keys, values, strict=True):
        cache.set(slot, head, key, value)
    for (slot, head), *both in zip(cells, keys, values, strict=True):
        for got, put, group in zip(cache.get(slot, head), both, (KEY_GROUP, head_dim), strict=True):
            np.testing.assert_array_equal(got, _as_kept(kept, put, group))


def _as_kept(kept: KvFormat, row: Floats, group: int) -> Floats:
    if kept is KvFormat.BF16:
        return to_bf16(row)
    return row.astype(np.float16).astype(np.float32) if kept is KvFormat.F16 else _quantized(row[None], group)[0]


def _quantized(rows: Floats, group: int) -> Floats:
    """Rows with a scale for each `group` numbers; the last group of a row may be smaller."""
    groups = np.split(rows, range(group, rows.shape[1], group), axis=1)
    return np.hstack([quantize_activations(numbers, numbers.shape[1]).values() for numbers in groups])


def test_float16_keeps_numbers_beyond_its_range_as_its_largest(new_cache: NewCache) -> None:
    cache = new_cache(KvFormat.F16, 16, 1)
    row = np.array([65504, 65519, 65520, 1e6, 3e38, -65504, -65520, -1e6, -3e38, 1, *[0] * 6], np.float32)
    cache.set(3, 1, row, -row)
    for got, put in zip(cache.get(3, 1), (row, -row), strict=True):
        np.testing.assert_array_equal(got, np.clip(put, -65504, 65504))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_float16_keeps_what_is_not_finite_as_nan(new_cache: NewCache, odd: float) -> None:
    cache = new_cache(KvFormat.F16, 16, 1)
    row = np.arange(16, dtype=np.float32)
    row[5] = odd
    cache.set(0, 0, row, row)
    for got in cache.get(0, 0):
        np.testing.assert_array_equal(got, np.where(np.isfinite(row), row, np.nan))


@pytest.mark.parametrize(
    ("kept", "odd", "context"), pairwise(KvFormat, [np.nan, np.inf, -np.inf], [1, 15, 16, 17, 40, 70])
)
def test_stale_cells_past_the_context_do_not_count(
    new_cache: NewCache, kept: KvFormat, odd: float, context: int
) -> None:
    """The model clears stale values in pages of 16 bits, because a weight of 0 does not mask NaN. It clears no keys."""
    filled = _fill(new_cache, kept, 64, context, stale=(odd, odd if kept is KvFormat.INT8 else 0.0))
    for rows in range(1, MAX_QUERY_ROWS + 1):
        _assert_close(filled, random_floats(rows, 64, seed=rows), [context] * rows, 1)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kept", KvFormat)
def test_attention_equals_the_reference_at_every_context(new_cache: NewCache, kept: KvFormat, context: int) -> None:
    filled = _fill(new_cache, kept, 64, context)
    for rows in range(1, MAX_QUERY_ROWS + 1):
        limits = [max(1, context - i) for i in range(rows)]
        _assert_close(filled, random_floats(rows, 64, seed=rows), limits, rows % 2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kept", KvFormat)
def test_attention_equals_the_reference_at_every_head_size(new_cache: NewCache, kept: KvFormat, head_dim: int) -> None:
    for block_size, context in ((16, 70), (32, 129)):
        filled = _fill(new_cache, kept, head_dim, context, block_size=block_size)
        for rows in range(1, MAX_QUERY_ROWS + 1):
            _assert_close(filled, random_floats(rows, head_dim, seed=rows), [context] * rows, 1)


@settings(max_examples=examples(25))
@given(
    kept=st.sampled_from(KvFormat),
    head_dim=st.sampled_from(HEAD_DIMS),
    limits=st.lists(st.integers(1, 200), min_size=1, max_size=MAX_QUERY_ROWS),
    size=st.sampled_from([0.01, 1.0, 20.0]),
    seed=st.integers(0, 1 << 32),
)
def test_each_row_sees_its_own_share_of_the_context(
    kernels: Single, kept: KvFormat, head_dim: int, limits: list[int], size: float, seed: int
) -> None:
    made: list[SingleCache] = []

    def new_cache(kept: KvFormat, head_dim: int, num_blocks: int, *, block_size: int) -> SingleCache:
        made.append(
            SingleCache(kernels, kept, num_heads=2, head_dim=head_dim, block_size=block_size, num_blocks=num_blocks)
        )
        return made[-1]

    filled = _fill(new_cache, kept, head_dim, max(limits), seed=seed)
    _assert_close(filled, random_floats(len(limits), head_dim, seed=seed + 1) * np.float32(size), limits, 0)
    made[0].close()


@pytest.mark.parametrize(
    ("kept", "limits", "window", "by_span"),
    pairwise(
        KvFormat,
        [[1, 40, 64, 65], [130, 100, 90, 200], [1030, 600, 513, 1029], [700, 699]],
        [1, 32, 90, 520],
        [False, True],
    ),
)
def test_windows_and_biases_equal_the_reference(
    new_cache: NewCache, kept: KvFormat, limits: list[int], window: int, by_span: bool
) -> None:
    filled = _fill(new_cache, kept, 48, max(limits))
    queries, num_biases = random_floats(len(limits), 48, seed=3), -(-max(limits) // CHUNK) * CHUNK
    firsts = [max(0, limit - window) for limit in limits]
    slopes = np.float32(0.1) * np.arange(len(limits), dtype=np.float32)[:, None]
    biases: Floats = slopes * np.arange(num_biases, dtype=np.float32)
    for shape in (Shape(firsts), Shape(biases=biases), Shape(firsts, biases)):
        _assert_close(filled, queries, limits, 1, shape, by_span=by_span)


@pytest.mark.parametrize("kept", KvFormat)
def test_a_windows_bits_do_not_depend_on_rows_beside_it_nor_on_what_it_does_not_see(
    new_cache: NewCache, kept: KvFormat
) -> None:
    filled = _fill(new_cache, kept, 64, 1200)
    queries, limits = random_floats(4, 64), [1200, 100, 570, 1100]
    firsts = [max(0, limit - 90) for limit in limits]
    together = filled.cache.attend(queries, limits, filled.blocks, 0, firsts=firsts)
    alone = [
        filled.cache.attend(queries[i : i + 1], limits[i : i + 1], filled.blocks, 0, firsts=firsts[i : i + 1])
        for i in range(4)
    ]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    poison = np.full(64, np.nan, np.float32)
    filled.cache.set([_slot(filled.blocks, position) for position in range(900)], 0, poison, poison)
    unseen = filled.cache.attend(queries[:1], limits[:1], filled.blocks, 0, firsts=firsts[:1])
    np.testing.assert_array_equal(unseen, together[:1])


@pytest.mark.parametrize("context", [513, 1030, 1600])
@pytest.mark.parametrize("kept", KvFormat)
def test_span_by_span_and_all_at_once_agree_to_the_bit(new_cache: NewCache, kept: KvFormat, context: int) -> None:
    filled = _fill(new_cache, kept, 64, context)
    queries, limits = random_floats(4, 64) * np.float32(3), [context, context - 1, 512, 5]
    whole = filled.cache.attend(queries, limits, filled.blocks, 0)
    np.testing.assert_array_equal(filled.cache.attend(queries, limits, filled.blocks, 0, by_span=True), whole)


@pytest.mark.parametrize("kept", KvFormat)
def test_a_rows_bits_do_not_depend_on_rows_beside_it_nor_on_its_blocks(new_cache: NewCache, kept: KvFormat) -> None:
    queries, limits = random_floats(MAX_QUERY_ROWS, 80), [600, 1, 577, 513, 64, 600]
    results = []
    for block_size, seed in ((16, 0), (32, 0)):
        filled = _fill(new_cache, kept, 80, 600, block_size=block_size, seed=seed)
        alone = [filled.cache.attend(queries[i : i + 1], limits[i : i + 1], filled.blocks, 1) for i in range(6)]
        results.append(np.concatenate(alone))
        for rows in range(2, MAX_QUERY_ROWS + 1):
            got = filled.cache.attend(queries[:rows], limits[:rows], filled.blocks, 1)
            np.testing.assert_array_equal(got, results[-1][:rows])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kept", KvFormat)
def test_nan_in_other_blocks_and_heads_is_not_seen(new_cache: NewCache, kept: KvFormat) -> None:
    filled = _fill(new_cache, kept, 64, 100)
    queries = random_floats(3, 64)
    before = filled.cache.attend(queries, [100, 99, 98], filled.blocks, 0)
    poison = np.full(64, np.nan, np.float32)
    for block in set(range(9)) - set(filled.blocks):
        filled.cache.set(range(block * 16, block * 16 + 16), 0, poison, poison)
    filled.cache.set(_slot(filled.blocks, 7), 1, poison, poison)
    np.testing.assert_array_equal(filled.cache.attend(queries, [100, 99, 98], filled.blocks, 0), before)


@pytest.mark.parametrize("kept", KvFormat)
def test_nonfinite_row_affects_no_other_row(new_cache: NewCache, kept: KvFormat) -> None:
    filled = _fill(new_cache, kept, 64, 100)
    queries = random_floats(3, 64)
    before = filled.cache.attend(queries, [100] * 3, filled.blocks, 0)
    queries[1, 5] = np.nan
    got = filled.cache.attend(queries, [100] * 3, filled.blocks, 0)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("in_keys", [True, False])
@pytest.mark.parametrize("kept", KvFormat)
def test_nan_in_the_context_reaches_every_row_that_sees_it(new_cache: NewCache, kept: KvFormat, in_keys: bool) -> None:
    filled = _fill(new_cache, kept, 64, 100)
    clean, poison = np.ones(64, np.float32), np.full(64, np.nan, np.float32)
    filled.cache.set(_slot(filled.blocks, 99), 0, *((poison, clean) if in_keys else (clean, poison)))
    got = filled.cache.attend(random_floats(2, 64), [100, 100], filled.blocks, 0)
    assert np.isnan(got).all()


@pytest.mark.parametrize("kept", KvFormat)
def test_large_scores_neither_overflow_nor_lose_the_best(new_cache: NewCache, kept: KvFormat) -> None:
    cache = new_cache(kept, 32, 4, num_heads=1)
    for position in range(60):
        key = np.full(32, 1000.0 if position == 37 else -1000.0, np.float32)
        cache.set(position, 0, key, np.full(32, position, np.float32))
    got = cache.attend(np.full((1, 32), 1000, np.float32), [60], [0, 1, 2, 3], 0)
    np.testing.assert_allclose(got, 37, rtol=0.01)
