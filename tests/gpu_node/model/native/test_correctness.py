"""The native decoder against transformers: as close to float32 as transformers' own bfloat16, for every shape.

Most of it runs on one thread: test_invariance.py shows that more give the same bits.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.cover import each_value, pairwise
from fakes.native import ISAS
from fakes.prompts import TEXT, mixed_prompts
from fakes.ties import num_departures
from fakes.transformers_logits import Logits, bfloat16_model, error_of, load_bfloat16_model, logits_of
from fixtures.matrices import kept
from fixtures.plans import logits_alone
from fixtures.random_families import FAMILIES, GROWN_BY_LENGTH, LOGITS_ONLY, WHOLE_FAMILIES
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.kernels.cpu.probe import best_isa, cpu_flags
from penstock.kernels.cpu.structs import Format
from penstock.kernels.reference.products import hadamard_rotation

Llama = Callable[..., Path]
Family = Callable[..., Path]
LoadNative = Callable[..., NativeRunner]

SHAPES: dict[str, dict[str, Any]] = {
    "groups of 1": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "groups of 3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    "groups of 4": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "groups of 7": {"hidden_size": 84, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 48},
    "groups of 8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 80},
    "groups of 9": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 1, "head_dim": 128},
    "heads of 256": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
    "sizes that fill no panel": {"hidden_size": 40, "intermediate_size": 33, "vocab_size": 257},
    "one more than a panel": {
        "hidden_size": 33,
        "intermediate_size": 65,
        "vocab_size": 33,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
    "tied head": {"tie_word_embeddings": True, "vocab_size": 1000},
    "llama3 rope": {"llama3_rope": True},
}
MAX_TIE_GAP = 0.5
"""What is a tie to bfloat16: logits, two apart from each other, err by a few hundredths."""
BEST_ISA = best_isa(cpu_flags()) or ISAS[0]
QUANTIZED = {"int8": Format.INT8, "int8_group": Format.INT8_GROUP, "int4": Format.INT4_GROUP}


def _tokens(vocab: int, count: int) -> list[int]:
    return random.Random(0).choices(range(vocab), k=count)


def _round_turned(model: Any) -> None:
    """Round each matrix in the Hadamard-rotated channels that it reads or writes, and rotate it back."""
    hidden, inner = (hadamard_rotation(size) for size in (model.config.hidden_size, model.config.intermediate_size))
    # A tied head has gains that the embedding has not.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for layer in model.model.layers:
        linears = dict(layer.self_attn.named_children()) | dict(layer.mlp.named_children())
        for norm, names in readers.items():
            for name in names:
                _round(linears[name].weight, columns=hidden, gains=getattr(layer, norm).weight)
            getattr(layer, norm).weight.fill_(1)
        _round(linears["o_proj"].weight, outputs=hidden)
        _round(linears["down_proj"].weight, columns=inner, outputs=hidden)
    _round(model.lm_head.weight, columns=hidden, gains=model.model.norm.weight)
    model.model.norm.weight.fill_(1)
    _round(model.model.embed_tokens.weight, Format.BF16, columns=hidden)


def _round(
    weight: Any,
    rounded: Format = Format.INT8,
    *,
    columns: NDArray[np.float32] | None = None,
    outputs: NDArray[np.float32] | None = None,
    gains: Any = 1.0,
) -> None:
    values = (weight * gains).numpy()
    columns = np.eye(values.shape[1], dtype=np.float32) if columns is None else columns
    outputs = np.eye(len(values), dtype=np.float32) if outputs is None else outputs
    weight.copy_(torch.from_numpy(outputs.T @ kept(rounded, outputs @ values @ columns.T) @ columns))


@cache
def _transformers_logits(folder: Path, token_ids: tuple[int, ...]) -> tuple[Logits, Logits]:
    """In float32 and in bfloat16: the same for every instruction set."""
    model, ids = bfloat16_model(folder, torch.float32), list(token_ids)
    return logits_of(model, ids), logits_of(model.to(torch.bfloat16), ids)


@pytest.mark.parametrize(
    ("isa", "name", "block_size"), pairwise(ISAS, SHAPES, [16, 32]), indirect=["isa"], scope="session"
)
def test_logits_err_no_more_than_transformers_bfloat16(
    llama: Llama, load_native: LoadNative, name: str, block_size: int
) -> None:
    folder = llama(**SHAPES[name])
    token_ids = _tokens(SHAPES[name].get("vocab_size", 131), 150)
    want, theirs = _transformers_logits(folder, tuple(token_ids))
    for num_threads in (1, 3):
        runner = load_native(folder, block_size=block_size, num_threads=num_threads)
        error = error_of(logits_alone(runner, token_ids, block_size), want)
        assert error <= error_of(theirs, want)


def test_buffers_of_another_model_on_the_same_thread_have_no_effect(llama: Llama, load_native: LoadNative) -> None:
    name = "sizes that fill no panel"
    small = load_native(llama(**SHAPES[name], initializer_range=0.1), quantization="int8")
    large = load_native(llama(), quantization="int8")
    said = []
    for count in (3, 40):
        logits_alone(large, _tokens(131, count))
        said.append(logits_alone(small, _tokens(257, 20)))
    np.testing.assert_array_equal(*said)


@pytest.mark.parametrize(
    ("isa", "name", "quantization", "kv_cache_dtype"),
    pairwise(
        ISAS, ["groups of 3", "sizes that fill no panel", "tied head"], QUANTIZED, ["bfloat16", "float16", "int8"]
    ),
    indirect=["isa"],
    scope="session",
)
def test_quantized_weights_agree_with_the_references(
    llama: Llama, load_native: LoadNative, name: str, quantization: str, kv_cache_dtype: str
) -> None:
    """Against float32 with each matrix rounded by the reference: what is left is the rounding of activations."""
    folder = llama(**SHAPES[name], initializer_range=0.1)
    model = bfloat16_model(folder, torch.float32)
    with torch.inference_mode():
        if quantization == "int8":
            _round_turned(model)
        else:
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.copy_(torch.from_numpy(kept(QUANTIZED[quantization], weight.numpy())))
    token_ids = _tokens(SHAPES[name].get("vocab_size", 131), 80)
    runner = load_native(folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    assert error_of(logits_alone(runner, token_ids), logits_of(model, token_ids)) < 0.035


def test_keys_in_int8_keep_their_precision_beside_channels_that_are_far_larger(
    llama: Llama, load_native: LoadNative, tmp_path: Path
) -> None:
    """Two channels of each key times 32, and of each query divided by it: no score changes but for rounding."""
    folder = llama(**SHAPES["groups of 4"], initializer_range=0.1)
    model, token_ids = bfloat16_model(folder, torch.bfloat16), _tokens(131, 80)
    with torch.inference_mode():
        for layer in model.model.layers:
            for linear, factor in ((layer.self_attn.k_proj, 32), (layer.self_attn.q_proj, 1 / 32)):
                # RoPE turns channel 5 of each head with channel 5 of its other half.
                linear.weight.view(-1, 2, 32, linear.in_features)[:, :, 5] *= factor
    shutil.copytree(folder, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    want = logits_of(bfloat16_model(folder, torch.float32), token_ids)
    # The errors are 0.010 and 0.017; 0.033 with keys that are not rotated.
    assert error_of(logits_alone(load_native(folder, kv_cache_dtype="int8"), token_ids), want) < 0.015
    assert error_of(logits_alone(load_native(tmp_path / "model", kv_cache_dtype="int8"), token_ids), want) < 0.025


@pytest.mark.parametrize("name", [name for name in FAMILIES | WHOLE_FAMILIES if name != "llama dynamic"])
def test_every_family_errs_no_more_than_transformers_bfloat16(
    family: Family, load_native: LoadNative, name: str
) -> None:
    token_ids = _tokens(384, 300)
    want, theirs = _transformers_logits(family(name), tuple(token_ids))
    got = logits_alone(load_native(family(name)), token_ids)
    assert error_of(got, want) <= error_of(theirs, want)


@pytest.mark.parametrize(
    ("isa", "name", "quantization"),
    pairwise(
        ISAS,
        ["llama", "mistral", "qwen2", "qwen3", "falcon 7b", "falcon rw", "gpt-neox", "granite", "gemma2", "qwen3 moe"],
        QUANTIZED,
    ),
    indirect=["isa"],
    scope="session",
)
def test_quantized_weights_of_every_family_agree_with_the_references(
    family: Family, load_native: LoadNative, name: str, quantization: str
) -> None:
    folder = family(name, initializer_range=0.1)
    model, turns = bfloat16_model(folder, torch.float32), name in ("llama", "mistral", "qwen2", "qwen3", "granite")
    with torch.inference_mode():
        if quantization == "int8" and turns:
            _round_turned(model)
        else:
            # Rows that cannot be turned have a scale for each group instead.
            rounded = Format.INT8_GROUP if quantization == "int8" else QUANTIZED[quantization]
            for path, weight in model.named_parameters():
                # The router of a mixture of experts is not rounded. transformers stacks the matrices of experts.
                matrices = {2: [weight], 3: weight}.get(weight.ndim, [])
                for matrix in () if path.endswith("mlp.gate.weight") else matrices:
                    matrix.copy_(torch.from_numpy(kept(rounded, matrix.numpy())))
    token_ids = _tokens(384, 80)
    got = logits_alone(load_native(folder, quantization=quantization), token_ids)
    assert error_of(got, logits_of(model, token_ids)) < 0.035


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype"), each_value(["none", *QUANTIZED], ["bfloat16", "float16", "int8"])
)
def test_choices_survive_preemption_and_prefix_hits_to_the_token(
    tiny_model: Path, best_library: Path, quantization: str, kv_cache_dtype: str
) -> None:
    plain = {
        "model": str(tiny_model),
        "runner": "native",
        "dtype": "bfloat16",
        "max_num_seqs": 16,
        "weight_cache": False,
    }
    arithmetic = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    greedy, drawn = (SamplingParams(temperature=t, max_tokens=20, seed=5, ignore_eos=True) for t in (0.0, 1.0))
    tokens = []
    for limits in (
        {"num_kv_blocks": 40, "max_num_batched_tokens": 48, "num_threads": 2},
        {"num_kv_blocks": 400, "max_num_batched_tokens": 512, "num_threads": 3, "enable_prefix_caching": False},
    ):
        engine = Engine(EngineConfig(**plain | arithmetic | limits))
        prompts = mixed_prompts(engine, 24)
        generations = engine.generate(prompts[:12], greedy) + engine.generate(prompts[12:], drawn)
        tokens.append([generation.choices[0].token_ids for generation in generations])
        stats = engine.stats()
        tight = limits["num_kv_blocks"] == 40
        assert (stats.num_preemptions > 0, stats.prefix_hit_tokens > 0) == (tight, tight)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES | WHOLE_FAMILIES if name not in (*GROWN_BY_LENGTH, *LOGITS_ONLY)]
)
def test_every_familys_tokens_survive_preemption_and_leave_transformers_path_at_ties_only(
    family: Family, best_library: Path, name: str
) -> None:
    plain = {
        "model": str(family(name)),
        "runner": "native",
        "dtype": "bfloat16",
        "max_num_seqs": 50,
        "weight_cache": False,
    }
    greedy, tokens = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), []
    for limits in (
        {"num_kv_blocks": 40, "num_swap_blocks": 64, "preemption": "swap", "max_num_batched_tokens": 96},
        {"num_kv_blocks": 1000, "enable_prefix_caching": False},
    ):
        engine = Engine(EngineConfig(**plain | limits))
        prompts = [prompt[:200] for prompt in mixed_prompts(engine, 14)]
        said = [generation.choices[0].token_ids for generation in engine.generate(prompts, greedy)]
        tokens.append(said)
        stats, tight = engine.stats(), "preemption" in limits
        assert (stats.num_swaps > 0, stats.prefix_hit_tokens > 0) == (tight, tight)
    assert tokens[0] == tokens[1]
    model = bfloat16_model(family(name), torch.float32)
    num_departures(model, zip(prompts, tokens[0], strict=True), max_gap=MAX_TIE_GAP)


def _greedy(folder: Path, count: int, **settings: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return prompts and an engine's next 16 tokens of each."""
    plain = {"dtype": "bfloat16", "kv_cache_tokens": 2048, "weight_cache": False}
    engine = Engine(EngineConfig(model=str(folder), **plain | settings))
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    generations = engine.generate(mixed_prompts(engine, count), params)
    return [(generation.prompt_token_ids, generation.choices[0].token_ids) for generation in generations]


def test_greedy_tokens_leave_transformers_path_at_ties_and_no_more_often_than_torch(
    tiny_model: Path, best_library: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model).to(torch.bfloat16).float()
    ours, theirs = (
        num_departures(model, _greedy(tiny_model, 40, runner=runner, quantization="none"), max_gap=MAX_TIE_GAP)
        for runner in ("native", "torch")
    )
    assert ours <= theirs + 3


@cache
def _demo_logits(folder: Path, dtype: torch.dtype) -> tuple[list[int], Logits]:
    """A text's tokens, and transformers' logits behind them: the same for every instruction set."""
    token_ids = Tokenizer(folder).encode(TEXT * 3)
    return token_ids, logits_of(load_bfloat16_model(folder).to(dtype), token_ids)


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_model_errs_no_more_than_transformers_bfloat16(demo_model: Path, load_native: LoadNative) -> None:
    (token_ids, want), (_, theirs) = (_demo_logits(demo_model, dtype) for dtype in (torch.float32, torch.bfloat16))
    runner = load_native(demo_model, num_threads=2)
    got = logits_alone(runner, token_ids)
    assert error_of(got, want) <= error_of(theirs, want)
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= 0.97


@pytest.mark.parametrize(
    "isa", [isa if isa == BEST_ISA else pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS], indirect=True
)
@pytest.mark.model
def test_stored_blocks_of_the_demo_model_agree_with_its_dequantized_weights(
    demo_gguf: Path, demo_model: Path, load_native: LoadNative
) -> None:
    """Rows of heads in GGUF's order, blocks as they are: activations are rounded to int8 and nothing else is."""
    token_ids, want = _demo_logits(demo_model, torch.float32)
    got = logits_alone(load_native(demo_gguf, quantization="auto"), token_ids)
    assert error_of(got, want) < 0.12
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= 0.95


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_models_greedy_tokens_leave_transformers_path_only_at_ties(
    demo_model: Path, best_library: Path
) -> None:
    pairs = _greedy(demo_model, 6, runner="native", quantization="none", max_num_seqs=4)
    assert num_departures(load_bfloat16_model(demo_model).to(torch.float32), pairs, max_gap=0.2) <= 2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_beside_an_mlp_are_rounded_as_all_other_matrices(
    family: Family, load_native: LoadNative, quantization: str
) -> None:
    # Every token has all experts: otherwise rounding chooses others near a tie of the router's scores.
    folder, token_ids = family("gemma4 moe", top_k_experts=6), _tokens(384, 80)
    model, rounded = bfloat16_model(folder, torch.float32), {"int8": Format.INT8_GROUP, "int4": Format.INT4_GROUP}
    plain = error_of(logits_alone(load_native(folder), token_ids), logits_of(model, token_ids))
    with torch.inference_mode():
        for path, weight in model.named_parameters():
            matrices = {2: [weight], 3: weight}.get(weight.ndim, [])
            for matrix in () if path.endswith("router.proj.weight") else matrices:
                matrix.copy_(torch.from_numpy(kept(rounded[quantization], matrix.numpy())))
    got = logits_alone(load_native(folder, quantization=quantization), token_ids)
    # Activations in int8 add 2.6 times the error of those in bfloat16, as in Gemma 3 and the dense Gemma 4.
    assert error_of(got, logits_of(model, token_ids)) < 3.5 * plain
