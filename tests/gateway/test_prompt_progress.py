"""`return_progress` with a real model: how far its prompt is computed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.records import StepOutput
from tests.gateway.conftest import Stack
from tests.gateway.test_waiting import events_of

MODEL = "acme/real"


class PacedEngine(Engine):
    """Waits before a step until a reader has seen the progress of earlier ones: a late reader gets only the newest.

    Not every step makes progress, so a step waits no longer than `PATIENCE_S`.
    """

    PATIENCE_S = 0.25

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.seen = threading.Event()

    def step(self) -> list[StepOutput]:
        self.seen.wait(self.PATIENCE_S)
        self.seen.clear()
        return super().step()


@pytest.fixture(scope="module")
def engine_of_reader(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> PacedEngine:
    """The engine of a small real model whose prompts are computed in chunks of 64 tokens."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    engine = PacedEngine(
        EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=256, num_threads=1, max_num_batched_tokens=64)
    )
    stack.start_node(engine, model=MODEL, pool="real")
    return engine


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_long_prompt_of_a_real_model_shows_rising_progress_up_to_its_end(
    url: str, engine_of_reader: PacedEngine, max_tokens: int
) -> None:
    prompt = f"{max_tokens} the gate opens " * 40
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "return_progress": True}
    progress = list[dict[str, Any]]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for event in events_of(answer.iter_lines()):
            if "prompt_progress" in event:
                progress.append(event["prompt_progress"])
                engine_of_reader.seen.set()
    processed = [one["processed"] for one in progress]
    total = progress[0]["total"]
    assert len(progress) > 2 and total > 128
    assert processed == sorted(set(processed)) and processed[-1] == total
    assert all(one["total"] == total and one["cache"] == 0 for one in progress)
