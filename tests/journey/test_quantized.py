"""Quantized checkpoints and adapters of the real model, as a user serves them: `penstock serve`, then HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fakes.served_model import served
from fixtures.quantized_checkpoint import LAYOUTS, write_quantized
from fixtures.random_adapters import make_adapter, merge
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig, Generation

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "A penstock is a pipe that carries",
    "1, 2, 3, 4, 5,",
    "def add(a, b):\n    return",
)
NUM_TOKENS = 24
MAX_GAP = 0.6
"""Of two logits, the lower of which a kernel that rounds activations may take; logits spread ten times as far."""


def _asked(url: str, model: str) -> list[str]:
    body = {"model": model, "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]


def _meant(folder: Path, weights: dict[str, Tensor]) -> Any:
    """Return transformers' model with the values that a quantized checkpoint stores."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    return model


@torch.inference_mode()
def _gaps(model: Any, generations: list[Generation]) -> Tensor:
    """Return how far each token's logit is below the largest one at its position, [prompts * NUM_TOKENS]."""
    gaps = []
    for generation in generations:
        prompt, output = generation.prompt_token_ids, generation.choices[0].token_ids
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits.amax(-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0])
    return torch.cat(gaps)


@pytest.mark.parametrize("layout", ["gptq int4 groups of 32", "packed int4", "int8 by row"])
def test_served_tokens_equal_those_of_transformers_with_the_dequantized_weights(
    demo_folder: Path, tmp_path: Path, layout: str
) -> None:
    quantized, adapters = tmp_path / "quantized", tmp_path / "adapters"
    model = _meant(demo_folder, write_quantized(demo_folder, LAYOUTS[layout], quantized))
    tuned = make_adapter(adapters / "tuned", model, rank=8, seed=1, lora_alpha=2.0)
    with served(quantized, lora_dir=adapters) as url:
        said = {name: _asked(url, name) for name in ("quantized", "tuned")}
    engine = Engine(EngineConfig(model=str(quantized), lora_dir=adapters))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for name, texts in said.items():
        generations = engine.generate(PROMPTS, params, adapters=None if name == "quantized" else name)
        # The same arithmetic, so the same tokens to the last one.
        assert [generation.choices[0].text for generation in generations] == texts
        if name == "tuned":
            assert _gaps(model, generations).max() > MAX_GAP
            merge(model, tuned)
        gaps = _gaps(model, generations)
        assert gaps.max() < MAX_GAP and (gaps == 0).float().mean() > 0.9
