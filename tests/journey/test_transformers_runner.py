"""A model that no family describes is served through the front door, by transformers' module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch
from fakes.served_model import served
from fakes.ties import num_departures
from fixtures.small_transformers import quiet, write_small
from fixtures.tiny_model import write_tokenizer
from transformers import AutoTokenizer


def test_a_model_without_a_family_answers_over_http_as_transformers_does(tmp_path: Path) -> None:
    folder, log = tmp_path / "small", tmp_path / "log.txt"
    with quiet():
        module = write_small("BambaForCausalLM", folder)
    write_tokenizer(folder, 384)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = "The gate opens by pressure, and the turbine never starves."
    with log.open("w") as written, served(folder, written, num_kv_blocks=64, dtype="float32") as url:
        body = {"model": "small", "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120).json()
        chat = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        said = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=120).json()
    assert said["usage"]["completion_tokens"] > 0
    prompt = tokenizer.encode(text)
    with torch.inference_mode():
        assert num_departures(module, [(prompt, answer["choices"][0]["token_ids"])]) <= 1
    assert "no family of ours is BambaForCausalLM" in log.read_text()
