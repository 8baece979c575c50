"""A real GGUF file of Gemma 3, whose vocabulary is large: it answers, and as its dequantized weights do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.ties import num_departures

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig

PROMPTS = ["The capital of France is", "Water boils at a temperature of", "def fibonacci(n):\n", "Un, deux, trois,"]
MAX_TIE_GAP = 1.0
"""Activations are rounded to int8, and their logits err by some tenths."""


@pytest.mark.slow
@pytest.mark.model
def test_greedy_tokens_of_gemma_leave_the_path_of_its_dequantized_weights_only_at_ties(gemma_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    engine = Engine(EngineConfig(model=str(gemma_gguf), num_kv_blocks=64, max_model_len=256, num_threads=2))
    generations = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    assert "capital" in generations[0].choices[0].text
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(
        gemma_gguf.parent,
        gguf_file=gemma_gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    pairs = [(one.prompt_token_ids, one.choices[0].token_ids) for one in generations]
    assert all(prompt[0] == 2 for prompt, _ in pairs)
    assert num_departures(model, pairs, max_gap=MAX_TIE_GAP) <= 3
