"""The native decoder against transformers: as close to float32 as transformers' own bfloat16, for every shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.matrices import kept
from fakes.plans import logits_alone
from fakes.ties import num_departures
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.kernels.cpu.library import Format

Llama = Callable[..., Path]
LoadNative = Callable[..., NativeRunner]

TEXT = (
    "A penstock is the gated pipe that feeds a turbine. Requests stand in a reservoir, the gate opens by pressure, "
    "and the turbine never starves and never floods. Explain in a few words why that is so, and what happens when "
    "the water is low. "
)
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
QUANTISED = {"int8": Format.INT8, "int8_group": Format.INT8_GROUP, "int4": Format.INT4_GROUP}


def _tokens(vocab: int, count: int) -> list[int]:
    return random.Random(0).choices(range(vocab), k=count)


def _model(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(dtype)


@torch.inference_mode()
def _logits(model: Any, token_ids: list[int]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = model(torch.tensor([token_ids])).logits[0].float().numpy()
    return logits


def _error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """Root mean square of the differences, by that of the spread of what is wanted."""
    return float(np.sqrt(np.square(got - want).mean() / np.square(want - want.mean(-1, keepdims=True)).mean()))


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_err_no_more_than_transformers_bfloat16(
    llama: Llama, load_native: LoadNative, name: str, block_size: int
) -> None:
    folder = llama(**SHAPES[name])
    token_ids = _tokens(SHAPES[name].get("vocab_size", 131), 150)
    want, theirs = (_logits(_model(folder, dtype), token_ids) for dtype in (torch.float32, torch.bfloat16))
    for num_threads in (1, 3):
        runner = load_native(folder, block_size=block_size, num_threads=num_threads)
        error = _error(logits_alone(runner, token_ids, block_size), want)
        assert error <= _error(theirs, want)


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("quantization", QUANTISED)
@pytest.mark.parametrize("name", ["groups of 3", "sizes that fill no panel", "tied head"])
def test_quantised_weights_mean_what_the_references_say(
    llama: Llama, load_native: LoadNative, name: str, quantization: str, kv_cache_dtype: str
) -> None:
    """Against float32 with each matrix rounded by the reference: what is left is the rounding of activations."""
    folder = llama(**SHAPES[name], initializer_range=0.1)
    model = _model(folder, torch.float32)
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(kept(QUANTISED[quantization], weight.numpy())))
    token_ids = _tokens(SHAPES[name].get("vocab_size", 131), 80)
    runner = load_native(folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype, num_threads=2)
    assert _error(logits_alone(runner, token_ids), _logits(model, token_ids)) < 0.035


def _mixed_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Prompts of 4 to 110 tokens, a third of which begin alike."""
    rng = random.Random(1)
    words = TEXT.split()
    texts = [" ".join(rng.choices(words, k=rng.randrange(4, 50))) for _ in range(count)]
    return [engine.tokenizer.encode((TEXT if i % 3 == 0 else "") + text) for i, text in enumerate(texts)]


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("quantization", ["none", *QUANTISED])
def test_choices_survive_preemption_and_prefix_hits_to_the_token(
    tiny_model: Path, best_library: Path, quantization: str, kv_cache_dtype: str
) -> None:
    plain = {"model": str(tiny_model), "runner": "native", "dtype": "bfloat16", "max_num_seqs": 16}
    arithmetic = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    greedy, drawn = (SamplingParams(temperature=t, max_tokens=20, seed=5, ignore_eos=True) for t in (0.0, 1.0))
    tokens = []
    for limits in (
        {"num_kv_blocks": 40, "max_num_batched_tokens": 48, "num_threads": 2},
        {"num_kv_blocks": 400, "max_num_batched_tokens": 512, "num_threads": 3, "enable_prefix_caching": False},
    ):
        engine = Engine(EngineConfig(**plain | arithmetic | limits))
        prompts = _mixed_prompts(engine, 40)
        generations = engine.generate(prompts[:20], greedy) + engine.generate(prompts[20:], drawn)
        tokens.append([generation.choices[0].token_ids for generation in generations])
        stats = engine.stats()
        tight = limits["num_kv_blocks"] == 40
        assert (stats.num_preemptions > 0, stats.prefix_hit_tokens > 0) == (tight, tight)
    assert tokens[0] == tokens[1]


def test_greedy_tokens_leave_transformers_path_only_at_ties(tiny_model: Path, best_library: Path) -> None:
    """And the torch runner's: its bfloat16 knows the same ties."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model).to(torch.bfloat16).float()
    def tops(model, pairs):
        gaps=[]
        for prompt, output in pairs:
            with torch.inference_mode():
                l = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
            wrong=(l.argmax(-1) != torch.tensor(list(output))).nonzero()
            if len(wrong):
                b,c=l[wrong[0,0]].topk(2).values.tolist(); gaps.append(b-c)
        return sorted(gaps), float(l.std())
    for runner in ("native", "torch"):
        engine = Engine(EngineConfig(model=str(tiny_model), runner=runner, dtype="bfloat16", num_kv_blocks=256))
        generations = engine.generate(_mixed_prompts(engine, 40), SamplingParams(temperature=0.0, max_tokens=20))
        pairs = [(generation.prompt_token_ids, generation.choices[0].token_ids) for generation in generations]
        print(runner, num_departures(model, pairs, max_gap=100.0), tops(model, pairs))
