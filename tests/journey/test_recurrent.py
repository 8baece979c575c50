"""A model with recurrent layers through the front door: from a folder, and from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fakes.served_model import served
from fakes.ties import num_departures
from fixtures.gguf_file import write_gguf
from fixtures.random_families import make_family_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "The gate opens by pressure, and the turbine never starves. " * 3


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_hybrid_model_answers_over_http_as_transformers_does(tmp_path: Path, kind: str) -> None:
    folder = make_family_model(tmp_path / "small", "qwen3.5", "bfloat16")
    path = write_gguf(folder, tmp_path / "small.gguf", "qwen35") if kind == "file" else folder
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    options = {"runner": "native", "num_kv_blocks": 64, "max_num_seqs": 2, "max_model_len": 256}
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with served(path, **options) as url:
        body["model"] = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=120).json() for _ in range(2)]
    cold, warm = (answer["choices"][0]["token_ids"] for answer in answers)
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    prompt = tokenizer.encode(TEXT)
    with torch.inference_mode():
        assert num_departures(module, [(prompt, cold)], max_gap=0.05) <= 1
    assert warm == cold
