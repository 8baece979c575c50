"""Families from GGUF files: the logits of the model that the file was made of."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import write_gguf
from fixtures.plans import logits_alone
from transformers import AutoModelForCausalLM

from penstock.gpu_node.model.load import load_model
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
}
"""By family: the architecture that its GGUF files name, and settings that such a file implies."""
TORCH = runner_options(max_model_len=256, max_num_seqs=1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_has_the_logits_of_its_model(
    family: Callable[..., Path], load_native: Callable[..., NativeRunner], name: str, tmp_path: Path
) -> None:
    architecture, changes = ARCHITECTURES[name]
    folder = family(name, **changes)
    gguf, token_ids = write_gguf(folder, tmp_path / "m.gguf", architecture), random.Random(0).choices(range(384), k=100)
    # What is made of it is kept by content and time: the same from session to session.
    os.utime(gguf, (1, 1))
    runner: Any = load_model(str(gguf), TORCH, lambda stage, fraction: None).runner
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(folder).float()(torch.tensor([token_ids])).logits[0].numpy()
    np.testing.assert_allclose(logits_alone(runner, token_ids), want, rtol=0, atol=1e-4)
    # The same weights in another file give the same bits.
    native = logits_alone(load_native(folder, max_model_len=256), token_ids)
    np.testing.assert_array_equal(logits_alone(load_native(gguf, max_model_len=256), token_ids), native)
