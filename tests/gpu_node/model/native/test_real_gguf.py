"""A real GGUF file of Gemma 3 with its large vocabulary: it answers as llama.cpp and as its dequantized weights do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.ties import num_departures

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig

PROMPTS = ["The capital of France is", "Water boils at a temperature of", "def fibonacci(n):\n", "Un, deux, trois,"]
LLAMA_CPP = {
    "The capital of France is": " the capital of the country of France. It is",
    "Water boils at a temperature of": (
        " 100 degrees Celsius.\n\nThe boiling point of water is 100 degrees Celsius.\n\nThe boiling point of water"
    ),
    "def fibonacci(n):\n": (
        "    if n == 0:\n        return 0\n    elif n == 1:\n        return 1\n    elif n == 2:\n        return 2\n"
    ),
    "Un, deux, trois,": " quatre, cinq, six, huit, neuf, dix, douze, quinze, vingt, trente, quarante, cinquante",
}
"""What llama.cpp continues greedily with (of October 2026, in xllamacpp 2026.10.11549), up to where two tokens nearly
tie: where our text becomes another one, the logarithms of its two probabilities are 0.2 and 0.4 apart."""
ROOT = Path(__file__).parents[4]
STRANGE = (
    "Ｆｕｌｌ　width, e\u0301 é, \u200b zero width,\r\n tabs\t\t and   spaces   , 日本語の文章。 Привет! "
    "مرحبا بالعالم \U0001f469\u200d\U0001f467 1234567 \x00"
)
LONGEST_RUN = 31
"""Spaces of the longest piece of spaces alone."""
MAX_TIE_GAP = 1.0
"""Activations are rounded to int8, and their logits err by some tenths."""


@pytest.fixture(scope="module")
def engine(gemma_gguf: Path) -> Engine:
    return Engine(EngineConfig(model=str(gemma_gguf), num_kv_blocks=64, max_model_len=256, num_threads=2))


@pytest.mark.slow
@pytest.mark.model
def test_greedy_tokens_of_gemma_leave_the_path_of_its_dequantized_weights_only_at_ties(
    engine: Engine, gemma_gguf: Path
) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

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


@pytest.mark.slow
@pytest.mark.model
def test_greedy_texts_of_gemma_are_those_of_llama_cpp_up_to_near_ties(engine: Engine) -> None:
    generations = engine.generate(list(LLAMA_CPP), SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    for (prompt, wanted), generation in zip(LLAMA_CPP.items(), generations, strict=True):
        assert generation.choices[0].text.startswith(wanted), prompt


@pytest.mark.slow
@pytest.mark.model
def test_ids_of_long_texts_are_those_of_transformers(engine: Engine, gemma_gguf: Path) -> None:
    from transformers import AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    theirs = auto_tokenizer.from_pretrained(gemma_gguf.parent, gguf_file=gemma_gguf.name)
    pages = [(ROOT / "docs" / name).read_text() for name in ("PROTOCOL.md", "MODELS.md")]
    for page in (*pages, Path(__file__).read_text(), STRANGE, STRANGE * 200):
        text = re.sub(f" {{{LONGEST_RUN + 1},}}", "", page)
        assert engine.tokenizer.encode(text, framed=False) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("num_spaces", "num_tokens"), [(3, 4), (31, 4), (62, 5), (66, 6), (93, 6), (124, 7)])
def test_long_runs_of_spaces_are_cut_as_llama_cpp_cuts_them(engine: Engine, num_spaces: int, num_tokens: int) -> None:
    """The counts are llama.cpp's. transformers merges such runs by pairs, into more tokens."""
    assert len(engine.tokenizer.encode("a" + num_spaces * " " + "│")) == num_tokens
