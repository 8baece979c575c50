"""Families from GGUF files: the logits of the model that the file was made of."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fakes.transformers_logits import error_of
from fixtures.gguf_file import write_gguf
from fixtures.plans import logits_alone
from transformers import AutoModelForCausalLM

from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native.runner import NativeRunner

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    # A GGUF file says the size of Qwen3's heads, transformers reads 128 all the same.
    "qwen3": ("qwen3", {"head_dim": 128}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    # GGUF files of Gemma 3 imply that every sixth layer has no window.
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32, "layer_types": None, "num_hidden_layers": 6}),
    "qwen3 moe": ("qwen3moe", {"norm_topk_prob": True}),
    "mixtral": ("llama", {}),
    # llama.cpp has this limit in its code.
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "gemma4 small": ("gemma4", {}),
    "gemma4": ("gemma4", {"attention_bias": False}),
    "gemma4 moe": ("gemma4", {}),
    # llama.cpp's GPT-2 does not scale scores by layer.
    "gpt2": ("gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    # Every fourth layer has no window, and projections have no biases.
    "cohere2": ("cohere2", {"attention_bias": False, "layer_types": None}),
}
"""By family: the architecture that its GGUF files name, and settings that such a file implies."""
TOKEN_IDS = random.Random(0).choices(range(384), k=100)
TORCH = runner_options(max_model_len=256, max_num_seqs=1)


@pytest.fixture(scope="session")
def gguf_of(family: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's model as a GGUF file, in a folder of its own."""

    @cache
    def write(name: str) -> Path:
        architecture, changes = ARCHITECTURES[name]
        gguf = write_gguf(family(name, **changes), tmp_path_factory.mktemp("gguf") / "m.gguf", architecture)
        # What is made of it is kept by content and time: the same from session to session.
        os.utime(gguf, (1, 1))
        return gguf

    return write


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_has_the_logits_of_its_model(
    family: Callable[..., Path], gguf_of: Callable[[str], Path], name: str
) -> None:
    runner: Any = load_model(str(gguf_of(name)), TORCH, lambda stage, fraction: None).runner
    # In bfloat16, transformers would round the factors of embeddings too.
    model = AutoModelForCausalLM.from_pretrained(family(name, **ARCHITECTURES[name][1]), dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    np.testing.assert_allclose(logits_alone(runner, TOKEN_IDS), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "granite", "gemma2", "mixtral", "gpt-oss", "gemma4 moe"])
def test_the_same_weights_in_another_file_give_the_same_bits(
    family: Callable[..., Path], gguf_of: Callable[[str], Path], load_native: Callable[..., NativeRunner], name: str
) -> None:
    folder = family(name, **ARCHITECTURES[name][1])
    native = logits_alone(load_native(folder, max_model_len=256), TOKEN_IDS)
    np.testing.assert_array_equal(logits_alone(load_native(gguf_of(name), max_model_len=256), TOKEN_IDS), native)


KEPT = {"q8_0": "int8_group", "q4_0": "q4_0", "q4_1": "int4_group", "bf16": "bf16"}
"""Formats of files, and what the native kernels keep each in."""


def test_experts_beside_an_mlp_stay_as_a_file_has_them(
    family: Callable[..., Path], best_library: Path, tmp_path: Path
) -> None:
    # With all experts of each token, no router decides by rounding.
    folder, errors = family("gemma4 moe", top_k_experts=6, moe_intermediate_size=64), {}
    native = runner_options(runner="native", dtype="bfloat16", max_model_len=256, max_num_seqs=1, weight_cache=False)
    for kind, kept in KEPT.items():
        file = write_gguf(folder, tmp_path / f"{kind}.gguf", "gemma4", kind)
        exact: Any = load_model(str(file), TORCH, lambda stage, fraction: None).runner
        loaded: Any = load_model(str(file), native, lambda stage, fraction: None)
        assert kept in loaded.arithmetic.split("-")[2].split("+")
        errors[kind] = error_of(logits_alone(loaded.runner, TOKEN_IDS), logits_alone(exact, TOKEN_IDS))
        loaded.runner.close()
    assert all(error < 4 * errors["bf16"] for error in errors.values()), errors
