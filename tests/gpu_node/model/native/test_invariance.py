"""A sequence's logits and tokens are the same bits, whatever else is computed with it and however it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakes.cover import pairwise
from fakes.native import ISAS
from fixtures.plans import Track, logits_alone, logits_of_step, tokens_of_step
from fixtures.sampling import SamplingCase, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_node.model.native.runner import NativeRunner

LoadNative = Callable[..., NativeRunner]
Llama = Callable[..., Path]

QUANTIZATIONS = ("none", "int8", "int8_group", "int4")
KV_CACHE_DTYPES = ("bfloat16", "float16", "int8")
VOCAB = 131
NUM_BLOCKS = 160
ARITHMETICS = pairwise(ISAS, QUANTIZATIONS, KV_CACHE_DTYPES)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB), k=count)


def _tracks(rng: random.Random, sequences: list[list[int]], block_size: int = 16) -> list[Track]:
    """Each sequence with blocks of its own, anywhere in the cache."""
    free = list(range(1, NUM_BLOCKS))
    rng.shuffle(free)
    return [Track(ids, [free.pop() for _ in range(-(-len(ids) // block_size))]) for ids in sequences]


def _logits_in_company(runner: NativeRunner, rng: random.Random, tracks: list[Track], chunk: int) -> np.ndarray:
    """The first track's logits, while all advance by up to `chunk` tokens in an order that changes."""
    parts = []
    while tracks[0].left:
        step = [(track, rng.randint(1, min(chunk, track.left))) for track in tracks if track.left]
        step = [part for part in step if part[0] is tracks[0] or rng.random() < 0.8]
        rng.shuffle(step)
        at = next(i for i, (track, _) in enumerate(step) if track is tracks[0])
        parts.append(logits_of_step(runner, step)[at])
    return np.concatenate(parts)


@pytest.mark.parametrize(("isa", "quantization", "kept"), ARITHMETICS, indirect=["isa"], scope="session")
@settings(max_examples=10)
@given(
    seed=st.integers(0, 1 << 32),
    length=st.integers(1, 70),
    chunk=st.sampled_from([1, 1, 5, 16, 33, 70]),
    num_others=st.sampled_from([0, 1, 3, 8, 14]),
    num_threads=st.sampled_from([1, 2, 3, 5]),
)
def test_logits_do_not_depend_on_batch_chunks_blocks_or_threads(
    llama: Llama,
    load_native: LoadNative,
    quantization: str,
    kept: str,
    seed: int,
    length: int,
    chunk: int,
    num_others: int,
    num_threads: int,
) -> None:
    rng, folder = random.Random(seed), llama()
    sequences = [_tokens(rng, length)] + [_tokens(rng, rng.randint(1, 70)) for _ in range(num_others)]
    options = {"quantization": quantization, "kv_cache_dtype": kept}
    want = logits_alone(load_native(folder, **options, num_threads=1), sequences[0])
    runner = load_native(folder, **options, num_threads=num_threads)
    got = _logits_in_company(runner, rng, _tracks(rng, sequences), chunk)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("isa", "quantization", "kept"), ARITHMETICS, indirect=["isa"], scope="session")
def test_long_contexts_give_the_same_bits_when_spans_are_shared_out(
    llama: Llama, load_native: LoadNative, quantization: str, kept: str
) -> None:
    rng, folder, options = random.Random(0), llama(), {"quantization": quantization, "kv_cache_dtype": kept}
    long = _tokens(rng, 1100)
    want = logits_alone(load_native(folder, **options, num_threads=1), long)
    for num_threads in (2, 5):
        runner = load_native(folder, **options, num_threads=num_threads)
        tracks = _tracks(rng, [long, *(_tokens(rng, 100) for _ in range(8))])
        for first, count in ((0, 500), (500, 580), (1080, 6)):
            (got,) = logits_of_step(runner, [(tracks[0], count)])
            np.testing.assert_array_equal(got, want[first : first + count])
        logits_of_step(runner, [(track, 80) for track in tracks[1:]])
        for position in range(1086, 1100):
            company = tracks[1:] if position % 2 else []
            got = logits_of_step(runner, [*((track, 1) for track in company), (tracks[0], 1)])[-1]
            np.testing.assert_array_equal(got, want[position : position + 1])


@pytest.mark.parametrize(
    ("isa", "name", "kept"),
    pairwise(
        ISAS,
        ["mistral", "qwen3", "falcon 40b", "falcon rw", "gpt-neox", "gemma2", "olmo2", "mixtral", "gemma4 moe"],
        KV_CACHE_DTYPES,
    ),
    indirect=["isa"],
    scope="session",
)
def test_logits_of_every_family_do_not_depend_on_batch_chunks_blocks_or_threads(
    family: Callable[..., Path], load_native: LoadNative, name: str, kept: str
) -> None:
    rng, folder = random.Random(0), family(name)
    sequences = [_tokens(rng, count) for count in (600, 90, 5, 33, 40)]
    want = logits_alone(load_native(folder, kv_cache_dtype=kept, num_threads=1), sequences[0])
    for num_threads in (2, 3):
        runner = load_native(folder, kv_cache_dtype=kept, num_threads=num_threads)
        got = _logits_in_company(runner, rng, _tracks(rng, sequences), chunk=90)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("kept", KV_CACHE_DTYPES)
def test_cached_prefix_gives_the_same_bits(llama: Llama, load_native: LoadNative, kept: str, block_size: int) -> None:
    rng = random.Random(1)
    runner = load_native(llama(), kv_cache_dtype=kept, block_size=block_size, num_threads=2)
    prefix = _tokens(rng, 64)
    first, second = (prefix + _tokens(rng, 30) for _ in range(2))
    want = logits_alone(runner, second, block_size)
    shared = list(range(20, 20 + 64 // block_size))
    tracks = [Track(first, [*shared, 40, 41]), Track(second, [*shared, 42, 43], done=64)]
    # In the same step: the second sees blocks that only the first one fills.
    got = logits_of_step(runner, [(tracks[1], 20), (tracks[0], len(first))])[0]
    np.testing.assert_array_equal(got, want[64:84])
    np.testing.assert_array_equal(logits_of_step(runner, [(tracks[1], 10)])[0], want[84:])


@pytest.mark.parametrize(("isa", "quantization", "kept"), ARITHMETICS, indirect=["isa"], scope="session")
def test_preempted_sequence_continues_with_the_same_bits(
    llama: Llama, load_native: LoadNative, quantization: str, kept: str
) -> None:
    rng = random.Random(2)
    runner = load_native(llama(), quantization=quantization, kv_cache_dtype=kept, num_threads=2)
    sequence, other = _tokens(rng, 60), _tokens(rng, 48)
    want = logits_alone(runner, sequence)
    begun = Track(sequence, [7, 8, 9, 10])
    logits_of_step(runner, [(begun, 40)])
    # Another one takes its blocks, and it starts again in what that one leaves.
    taken = Track(other, [9, 7, 8])
    logits_of_step(runner, [(taken, 48)])
    again = Track(sequence, [8, 11, 9, 7])
    got = [logits_of_step(runner, [(again, count)])[0] for count in (41, 1, 1, 17)]
    np.testing.assert_array_equal(np.concatenate(got), want)


@pytest.mark.parametrize(
    ("isa", "quantization", "num_threads"),
    pairwise(ISAS, QUANTIZATIONS, [1, 2, 3, 5]),
    indirect=["isa"],
    scope="session",
)
def test_tokens_are_the_samplers_of_the_logits_alone_and_together(
    llama: Llama, load_native: LoadNative, quantization: str, num_threads: int
) -> None:
    rng = random.Random(num_threads)
    runner = load_native(llama(), quantization=quantization, num_threads=num_threads)
    count = 12
    sequences = [_tokens(rng, rng.randint(1, 40)) for _ in range(count)]
    columns = {
        "temperature": np.resize([0.0, 0.7, 1.0], count),
        "top_k": np.resize([0, 0, 9, 0], count),
        "top_p": np.resize([1.0, 0.8], count),
        "repetition_penalty": np.resize([1.0, 1.0, 1.3, 1.0, 0.8], count),
        "frequency_penalty": np.resize([0.0, 0.4, 0.0, 0.0], count),
        "seed": np.arange(count),
    }
    seen = [np.array(ids, np.int32) for ids in sequences]
    banned = [np.array(_tokens(rng, 3 * (i % 2)), np.int32) for i in range(count)]
    rows = rows_of(count, seen=seen, banned=banned, num_seen_prompt=2, **columns)
    tracks = _tracks(rng, sequences)
    together = tokens_of_step(runner, [(track, track.left) for track in tracks], rows)
    last = np.stack([logits_alone(runner, ids)[-1] for ids in sequences])
    assert SamplingCase(last, rows).disagreements(together) == []
    for i, track in enumerate(_tracks(rng, sequences)):
        one = {name: column[i] for name, column in columns.items()} | {"position": i, "num_seen_prompt": 2}
        row = rows_of(1, seen=[seen[i]], banned=[banned[i]], **one)
        assert tokens_of_step(runner, [(track, track.left)], row).tolist() == [together[i]]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_greedy_rows_take_the_lowest_of_equal_logits(llama: Llama, load_native: LoadNative, num_threads: int) -> None:
    """Which thread sees which of them makes no difference."""
    runner = load_native(llama(equal_logits=True), num_threads=num_threads)
    tracks = [Track([3, 4, 5], [1 + i]) for i in range(5)]
    tokens = tokens_of_step(runner, [(track, 3) for track in tracks], rows_of(5, temperature=0.0))
    assert tokens.tolist() == [0] * 5


@pytest.mark.parametrize("kept", KV_CACHE_DTYPES)
def test_a_block_is_read_in_the_step_that_fills_it(llama: Llama, load_native: LoadNative, kept: str) -> None:
    """The reader comes first in the plan, where its keys would be missing if they were stored on the way."""
    folder = llama()
    ids = _tokens(random.Random(3), 17)
    options = {"quantization": "none", "kv_cache_dtype": kept, "num_threads": 1}
    want = logits_alone(load_native(folder, **options), ids)
    runner = load_native(folder, **options)
    filler, reader = Track(ids[:16], [5]), Track(ids, [5, 6])
    logits_of_step(runner, [(filler, 15)])
    reader.done = 16
    got = logits_of_step(runner, [(reader, 1), (filler, 1)])[0]
    assert np.array_equal(got[0], want[16])
