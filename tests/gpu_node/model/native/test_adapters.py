"""Adapters in native products: close to merged weights, and bit for bit the same in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.transformers_logits import bfloat16_model, error_of, logits_of
from fixtures.plans import Track, logits_of_step
from fixtures.random_adapters import make_adapter, merge
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.lora.library import read_adapter
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import NO_ADAPTER

LoadNative = Callable[..., NativeRunner]
VOCAB = 131
NUM_PLACES = 3
ODD: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 33, "initializer_range": 0.1}
"""Sizes that fill no panel."""


def _set(runner: NativeRunner, place: int, base: Any, folder: Path) -> None:
    spec_of = family_of({"architectures": base.config.architectures}).spec_of
    runner.set_adapter(place, read_adapter(folder, "a", "", spec_of(base.config.to_dict()), 64))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("odd llama", "none"),
        ("odd llama", "int8"),
        ("falcon 40b", "int4"),
        ("gpt-neox", "none"),
        ("phi3 with windows", "int8"),
    ],
)
def test_adapter_is_as_precise_as_merged_weights(
    llama: Callable[..., Path],
    family: Callable[..., Path],
    load_native: LoadNative,
    tmp_path: Path,
    name: str,
    quantization: str,
) -> None:
    """Quantized weights have an error of their own. An adapter, which is not quantized, does not add to it."""
    folder = llama(**ODD) if name == "odd llama" else family(name, initializer_range=0.1)
    base = bfloat16_model(folder)
    runner = load_native(folder, quantization=quantization, num_threads=2)
    ids = random.Random(0).choices(range(VOCAB), k=80)
    adapter = make_adapter(tmp_path / "adapter", base, rank=6, seed=1)
    _set(runner, 1, base, adapter)
    got, plain = logits_of_step(runner, [(Track(ids, range(1, 6), adapter=1), 80), (Track(ids, range(6, 11)), 80)])
    want = logits_of(merge(bfloat16_model(folder), adapter), ids)
    assert error_of(got, want) <= max(0.02, 1.5 * error_of(plain, logits_of(base, ids)))
    assert error_of(plain, want) > 0.5


@settings(max_examples=8)
@given(
    seed=st.integers(0, 1 << 32),
    chunk=st.sampled_from([1, 5, 33]),
    num_others=st.sampled_from([0, 1, 5]),
    num_threads=st.sampled_from([1, 3]),
    quantization=st.sampled_from(["none", "int8"]),
)
def test_logits_do_not_depend_on_the_adapters_of_other_rows(
    llama: Callable[..., Path],
    load_native: LoadNative,
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    chunk: int,
    num_others: int,
    num_threads: int,
    quantization: str,
) -> None:
    folder, rng = llama(), random.Random(seed)
    base = bfloat16_model(folder)
    runners = [load_native(folder, quantization=quantization, num_threads=threads) for threads in (1, num_threads)]
    for place in range(NUM_PLACES):
        only = ("", "up_proj", "v_proj")[place]
        adapter = make_adapter(
            tmp_path_factory.mktemp("adapters") / "a", base, rank=1 + 3 * place, seed=place, only=only
        )
        for runner in runners:
            _set(runner, place, base, adapter)
    sequences = [rng.choices(range(VOCAB), k=rng.randint(1, 40)) for _ in range(1 + num_others)]
    wearers = [rng.randint(NO_ADAPTER, NUM_PLACES - 1) for _ in sequences]
    alone = [
        logits_of_step(runners[0], [(Track(ids, (1, 2, 3), adapter=wearer), len(ids))])[0]
        for ids, wearer in zip(sequences, wearers, strict=True)
    ]
    tracks = [
        Track(ids, range(1 + 3 * i, 4 + 3 * i), adapter=wearer)
        for i, (ids, wearer) in enumerate(zip(sequences, wearers, strict=True))
    ]
    parts: list[list[NDArray[np.float32]]] = [[] for _ in tracks]
    while any(track.left for track in tracks):
        step = [(i, rng.randint(1, min(chunk, track.left))) for i, track in enumerate(tracks) if track.left]
        rng.shuffle(step)
        for (i, _), got in zip(step, logits_of_step(runners[1], [(tracks[i], n) for i, n in step]), strict=True):
            parts[i].append(got)
    for got, want in zip(parts, alone, strict=True):
        np.testing.assert_array_equal(np.concatenate(got), want)
