"""`return_progress` with a real model: how far its prompt is computed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.engine import Engine, EngineConfig
from tests.gateway.conftest import Stack
from tests.gateway.test_waiting import events_of


@pytest.fixture(scope="module")
def real_model(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a small real model whose prompts are computed in chunks of 64 tokens."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    engine = Engine(
        EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=256, num_threads=1, max_num_batched_tokens=64)
    )
    stack.start_node(engine, model="acme/real", pool="real")
    return "acme/real"


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_long_prompt_of_a_real_model_shows_rising_progress_up_to_its_end(
    url: str, real_model: str, max_tokens: int
) -> None:
    prompt = f"{max_tokens} the gate opens " * 40
    body = {"model": real_model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    text = httpx.post(f"{url}/v1/completions", json={**body, "return_progress": True}, timeout=60).text
    progress = [one["prompt_progress"] for one in events_of(iter(text.splitlines())) if "prompt_progress" in one]
    processed = [one["processed"] for one in progress]
    total = progress[0]["total"]
    assert len(progress) > 2 and total > 128
    assert processed == sorted(set(processed)) and processed[-1] == total
    assert all(one["total"] == total and one["cache"] == 0 for one in progress)
