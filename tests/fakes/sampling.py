"""Sampling rows made up for tests, and whether a sampler chose what the reference chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import SamplingRows, TokenMasks
from penstock.kernels.reference.philox import sampling_uniform
from penstock.kernels.reference.sampler import NO_BIASES, NO_TOKENS, SamplingRow, choose, uniform_of

MAX_SHIFT = 1e-6
"""A sampler's sums are rounded: its random number may fall on the other side of a boundary this close to it."""
MAX_LIMIT_SHIFT = 1e-5
"""The same for what `top_p` and `min_p` are compared with."""
NUM_DRAWS = 16


def rows_of(count: int, **columns: Any) -> SamplingRows:
    """Rows that sample plainly at positions 0, 1, 2, …; `columns` overrides, scalars for all rows."""
    plain: dict[str, tuple[Any, Any]] = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "repetition_penalty": (1.0, np.float32),
        "presence_penalty": (0.0, np.float32),
        "frequency_penalty": (0.0, np.float32),
        "seed": (11, np.uint64),
        "choice": (0, np.int32),
        "position": (np.arange(count), np.int32),
        "num_seen_prompt": (0, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(columns.pop(name, value), dtype), (count,)).copy()
        for name, (value, dtype) in plain.items()
    }
    ragged = {name: tuple(columns.pop(name, (NO_TOKENS,) * count)) for name in ("seen", "banned", "biased")}
    biases = tuple(columns.pop("biases", (NO_BIASES,) * count))
    masks = _masks_of(columns.pop("mask", (None,) * count))
    assert not columns
    return SamplingRows(**arrays, **ragged, biases=biases, masks=masks)


def _masks_of(allowed: Sequence[NDArray[np.bool_] | None]) -> TokenMasks | None:
    """Written masks of the rows that have one, each [vocab]."""
    if all(one is None for one in allowed):
        return None
    vocab = next(len(one) for one in allowed if one is not None)
    masks = TokenMasks(np.array([one is not None for one in allowed]), vocab)
    for row, one in zip(masks.rows, allowed, strict=True):
        if one is not None:
            bits = np.zeros(masks.words.shape[1] * 32, np.uint8)
            bits[:vocab] = one
            masks.words[row] = np.packbits(bits, bitorder="little").view(np.uint32)
    masks.finish()
    return masks


def row_of(rows: SamplingRows, i: int) -> SamplingRow:
    """Row i as the reference takes it."""
    columns = {field.name: getattr(rows, field.name)[i] for field in fields(SamplingRow) if field.name != "mask"}
    masked = rows.masks is not None and rows.masks.rows[i] >= 0
    return SamplingRow(**columns, mask=rows.masks.words[rows.masks.rows[i]] if masked else None)


@dataclass(frozen=True, eq=False)
class SamplingCase:
    """A step's logits, [rows, vocab], and how its rows choose."""

    logits: NDArray[np.float32]
    rows: SamplingRows

    def disagreements(self, tokens: NDArray[np.int32]) -> list[int]:
        """Rows whose token is not the reference's, nor could be with other rounding."""
        return [i for i, token in enumerate(tokens) if not _agrees(token, self.logits[i], row_of(self.rows, i))]


def _agrees(token: int, logits: NDArray[np.float32], row: SamplingRow) -> bool:
    uniform = uniform_of(row)
    below, above = max(uniform - MAX_SHIFT, 0.0), min(uniform + MAX_SHIFT, np.nextafter(1, 0))
    for p_shift, min_p_shift in product((0, -MAX_LIMIT_SHIFT, MAX_LIMIT_SHIFT), repeat=2):
        top_p = max(row.top_p + p_shift, 1e-9) if row.top_p < 1 else 1.0
        moved = replace(row, top_p=top_p, min_p=min(row.min_p * np.exp(min_p_shift), 1.0))
        if choose(logits, moved, below) <= token <= choose(logits, moved, above):
            return True
    return False


@st.composite
def sampling_cases(draw: st.DrawFn, max_kinds: int = 3) -> SamplingCase:
    """Rows of every option beside each other, over logits with and without ties and with what is not finite.

    Each kind of row comes NUM_DRAWS times, at other positions, because one token says little about what was kept.
    """
    vocab = draw(st.sampled_from([1, 3, 5, 8, 33, 700]))
    kinds = draw(st.lists(_columns(vocab), min_size=1, max_size=max_kinds))
    columns = {name: [kind[name] for kind in kinds for _ in range(NUM_DRAWS)] for name in kinds[0]}
    logits = np.repeat([draw(_logits(vocab)) for _ in kinds], NUM_DRAWS, axis=0)
    return SamplingCase(logits, rows_of(len(logits), **columns))


def _columns(vocab: int) -> st.SearchStrategy[dict[str, Any]]:
    tokens = st.integers(0, vocab - 1)
    penalties = st.just(0.0) | st.floats(-2, 2)
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 1e-30, 1.0, 1.0, 1.0]) | st.floats(0.3, 3),
            "top_k": st.sampled_from([0, 0, 0, 0, 1, vocab, vocab + 9]) | st.integers(1, 12),
            "top_p": st.sampled_from([1.0, 1.0, 1.0, 1e-6, 0.9, 0.999]) | st.floats(0.1, 1),
            "min_p": st.sampled_from([0.0, 0.0, 0.0, 1.0]) | st.floats(0, 0.5),
            "repetition_penalty": st.sampled_from([0.1, 1.0, 10.0]) | st.floats(0.3, 3),
            "presence_penalty": penalties,
            "frequency_penalty": penalties,
            "seed": st.integers(0, (1 << 64) - 1),
            "choice": st.integers(0, 15),
            "num_seen_prompt": st.integers(0, 4),
            "seen": st.just(NO_TOKENS) | _ids(tokens, min_size=4, max_size=16),
            "banned": st.just(NO_TOKENS) | _ids(tokens, min_size=0, max_size=3),
            "bias": st.just({}) | st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=4),
            "mask": st.none() | st.lists(st.booleans(), min_size=vocab, max_size=vocab).map(np.array),
        }
    ).map(_with_biases)


def _with_biases(columns: dict[str, Any]) -> dict[str, Any]:
    bias = columns.pop("bias")
    biased, biases = np.array([*bias], np.int32), np.array([*bias.values()], np.float32)
    return columns | {"biased": biased, "biases": biases}


def _ids(tokens: st.SearchStrategy[int], *, min_size: int, max_size: int) -> st.SearchStrategy[NDArray[np.int32]]:
    return st.lists(tokens, min_size=min_size, max_size=max_size).map(lambda ids: np.array(ids, np.int32))


@st.composite
def _logits(draw: st.DrawFn, vocab: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    logits = rng.standard_normal(vocab) * draw(st.sampled_from([0.01, 1.0, 4.0, 30.0]))
    grid = draw(st.sampled_from([0.0, 0.5, 3.0]))
    if grid:
        logits = np.round(logits / grid) * grid
    odd = draw(st.sampled_from([0.0] * 7 + [-np.inf, -np.inf, -np.inf, np.inf, np.nan]))
    logits[draw(st.integers(0, vocab - 1))] += odd
    return logits.astype(np.float32)


def level_draws(count: int = 12, vocab: int = 4096) -> tuple[SamplingCase, list[int]]:
    """Rows whose tokens are all alike, so that each chooses by its random number alone; and what they choose."""
    rng = np.random.default_rng(0)
    names: dict[str, Any] = {
        "seed": rng.integers(0, 1 << 64, count, dtype=np.uint64),
        "choice": rng.integers(0, 16, count),
        "position": rng.integers(0, 1 << 20, count),
    }
    rows = rows_of(count, **names)
    uniform = sampling_uniform(rows.seed, rows.choice, rows.position)
    return SamplingCase(np.zeros((count, vocab), np.float32), rows), (uniform * vocab).astype(int).tolist()
