"""A model that several ranks compute gives the same bits as one rank. The ranks are threads of the test's process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cover import pairwise
from fakes.native import ISAS
from fakes.runners.thread_ranks import ranks_as_threads
from fakes.transformers_logits import bfloat16_model
from fixtures.gguf_file import write_gguf
from fixtures.plans import Track, logits_of_step, plan_of
from fixtures.quantized_checkpoint import LAYOUTS
from fixtures.random_adapters import make_adapter
from fixtures.random_families import FAMILIES
from fixtures.sampling import rows_of

from penstock.contract.errors import ConfigError, RequestError
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.lora.library import digest_of, read_adapter
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import PooledTokens, ScoredTokens, StepPlan, StepResult
from tests.gpu_node.model.conftest import Quantized

LoadNative = Callable[..., NativeRunner]
VOCAB = 131
UNEVEN: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
"""Three key/value heads for two ranks, as in the demo model."""
ODD: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 33, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Sizes that fill no panel."""
ARITHMETICS = pairwise(ISAS, ("none", "int8", "int8_group", "int4"), ("bfloat16", "float16", "int8"), (2, 3))
KINDS = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4", "bf16", "f16", "f32"),
)
"""Of blocks in GGUF files."""


def _often(names: Iterable[str], *chosen: str) -> list[Any]:
    """Every run tests the chosen ones; the others are slow."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


ONE_KV_HEAD = {name for name in FAMILIES if name == "falcon 7b"}


@pytest.fixture
def load_ranks(load_native: LoadNative) -> Iterator[LoadNative]:
    """Loads a model that two ranks compute, with as many threads each as one rank has."""

    def load(folder: Path, *, size: int = 2, threads: int = 1, **options: Any) -> NativeRunner:
        sizes = {"tensor_parallel_size": size, "num_threads": threads * size}
        return load_native(folder, **options, **sizes)

    with ranks_as_threads():
        yield load


def _tracks(seed: int, lengths: tuple[int, ...]) -> list[Track]:
    rng, free = random.Random(seed), list(range(1, 100))
    rng.shuffle(free)
    return [
        Track(rng.choices(range(VOCAB), k=length), [free.pop() for _ in range(-(-length // 16))]) for length in lengths
    ]


def _logits(runner: NativeRunner, seed: int, lengths: tuple[int, ...] = (70, 5, 33)) -> list[np.ndarray]:
    """Logits of prompts that are computed in chunks, one beside the other, and of one token after another."""
    tracks, found = _tracks(seed, lengths), list[np.ndarray]()
    for chunk in (7, 40, 17, 3, 1, 1, 1):
        if parts := [(track, min(chunk, track.left)) for track in tracks if track.left]:
            found += logits_of_step(runner, parts)
    return found


def _assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ONE_KV_HEAD])
@pytest.mark.parametrize("isa", ISAS[:1], indirect=True, scope="session")
def test_each_family_gives_the_same_logits(
    family: Callable[..., Path], load_native: LoadNative, load_ranks: LoadNative, name: str
) -> None:
    folder = family(name)
    ranks = load_ranks(folder)
    _assert_same(_logits(load_native(folder), 1), _logits(ranks, 1))


@pytest.mark.parametrize(("isa", "quantization", "kept", "size"), ARITHMETICS, indirect=["isa"], scope="session")
@pytest.mark.parametrize("shapes", [UNEVEN, ODD], ids=["uneven", "odd"])
def test_each_format_gives_the_same_logits(
    llama: Callable[..., Path],
    load_native: LoadNative,
    load_ranks: LoadNative,
    quantization: str,
    kept: str,
    size: int,
    shapes: dict[str, Any],
) -> None:
    folder = llama(**shapes)
    options = {"quantization": quantization, "kv_cache_dtype": kept}
    ranks = load_ranks(folder, size=size, threads=2, **options)
    _assert_same(_logits(load_native(folder, **options), 2), _logits(ranks, 2))


@pytest.mark.parametrize("layout", _often(LAYOUTS, "gptq int4 any order", "awq", "float8 in blocks"))
@pytest.mark.parametrize("isa", ISAS[:1], indirect=True, scope="session")
def test_each_layout_of_quantized_checkpoints_gives_the_same_logits(
    quantized: Quantized, load_native: LoadNative, load_ranks: LoadNative, layout: str
) -> None:
    folder, _ = quantized("llama", layout)
    ranks = load_ranks(folder, quantization="auto")
    _assert_same(_logits(load_native(folder, quantization="auto"), 6), _logits(ranks, 6))


@pytest.mark.parametrize("kind", _often(KINDS, "q4_k", "q8_0"))
@pytest.mark.parametrize("isa", ISAS[:1], indirect=True, scope="session")
def test_each_format_of_gguf_files_gives_the_same_logits(
    family: Callable[..., Path], load_native: LoadNative, load_ranks: LoadNative, kind: str, tmp_path: Path
) -> None:
    folder = family("llama", hidden_size=256, intermediate_size=256)
    file = write_gguf(folder, tmp_path / f"{kind}.gguf", "llama", kind)
    ranks = load_ranks(file, quantization="auto")
    _assert_same(_logits(load_native(file, quantization="auto"), 7), _logits(ranks, 7))


def _mixed_step(runner: NativeRunner) -> StepResult:
    """A step that samples by all rules, with log-probabilities; its prompt is scored and pooled."""
    tracks = _tracks(3, (90, 4, 30, 17, 1))
    none, seen = np.empty(0, np.int32), np.array([1, 2, 3, 2], np.int32)
    rows = rows_of(
        5,
        temperature=[0.0, 0.8, 1.2, 0.0, 0.0],
        top_k=[0, 5, 0, 0, 0],
        top_p=[1.0, 1.0, 0.9, 1.0, 1.0],
        repetition_penalty=[1.0, 1.0, 1.3, 1.0, 1.0],
        seen=(none, none, seen, none, none),
        num_seen_prompt=[0, 0, 2, 0, 0],
        mask=(None, None, None, np.arange(VOCAB) % 3 == 0, None),
    )
    rows = replace(rows, num_logprobs=np.array([-1, 4, -1, -1, 2], np.int32))
    plan: StepPlan = plan_of([(track, track.left) for track in tracks], rows, copies=[(1, 101), (101, 102)])
    scored = np.arange(80, dtype=np.int32)
    plan = replace(
        plan,
        scored=ScoredTokens(scored, scored + 1, np.full(80, 3, np.int32), np.zeros(80, np.int32)),
        pooled=PooledTokens(np.array([0, 3, 89, 100], np.int32), np.zeros(4, np.int32)),
    )
    return runner.submit(plan).result()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3 moe", "olmo2"])
@pytest.mark.parametrize("isa", ISAS, indirect=True, scope="session")
def test_all_that_a_step_returns_is_the_same(
    family: Callable[..., Path], load_native: LoadNative, load_ranks: LoadNative, name: str
) -> None:
    folder = family(name, vocab_size=VOCAB)
    one, other = _mixed_step(load_native(folder)), _mixed_step(load_ranks(folder))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    wanted = ((one.logprobs, other.logprobs, [1, 4]), (one.scores, other.scores, range(80)))
    for mine, theirs, rows in wanted:
        assert mine is not None
        assert theirs is not None
        np.testing.assert_array_equal(mine.values[rows, :3], theirs.values[rows, :3])
    np.testing.assert_array_equal(one.hidden, other.hidden)


@pytest.mark.parametrize("isa", ISAS[:1], indirect=True, scope="session")
def test_ranks_load_adapters(
    llama: Callable[..., Path], load_native: LoadNative, load_ranks: LoadNative, tmp_path: Path
) -> None:
    base, folder = llama(**UNEVEN), tmp_path / "a"
    make_adapter(folder, bfloat16_model(base), rank=6, seed=1)
    options: dict[str, Any] = {"lora_dir": tmp_path, "quantization": "int8"}
    results = []
    for runner in (load_native(base, **options), load_ranks(base, **options)):
        spec_of = family_of({"architectures": ["LlamaForCausalLM"]}).spec_of
        adapter = read_adapter(folder, "a", digest_of(folder), spec_of(read_object(base / "config.json")), 16)
        runner.set_adapter(1, adapter)
        tracks = _tracks(4, (40, 20))
        tracks[0].adapter = 1
        results.append(logits_of_step(runner, [(track, track.left) for track in tracks]))
    _assert_same(*results)
    with pytest.raises(RequestError, match="cannot be loaded by all ranks"):
        runner.set_adapter(0, replace(adapter, digest="0" * 32))
    for track in tracks:
        track.done = 0
    _assert_same(results[1], logits_of_step(runner, [(track, track.left) for track in tracks]))


@pytest.mark.parametrize("isa", ISAS[:1], indirect=True, scope="session")
def test_a_model_that_cannot_be_divided_is_refused(
    family: Callable[..., Path], load_ranks: LoadNative, load_native: LoadNative
) -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size 2: the native runner cuts by KV head, and the model has 1"
    ):
        load_ranks(family("falcon 7b"))
    with pytest.raises(ConfigError, match="tensor_parallel_size 2: the ranks have 1 threads together"):
        load_native(family("llama"), tensor_parallel_size=2, num_threads=1)
