"""A named shape is served with random weights, over HTTP and without a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from fakes.served_model import served


# What torch computes with them is in tests/gpu_node/model/checkpoint/test_dummy.py.
@pytest.mark.parametrize("runner", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_shape_without_weights_answers_over_http(runner: str) -> None:
    with served(Path("tiny"), load_format="dummy", runner=runner, num_kv_blocks=64, num_threads=1) as url:
        body = {"model": "tiny", "prompt": "naïve 水", "max_tokens": 12, "ignore_eos": True, "seed": 7}
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [12, 12]
        # A token is a byte of the prompt.
        assert answers[0]["usage"]["prompt_tokens"] == len("naïve 水".encode())
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat, timeout=60) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert json.loads(events[0])["choices"]
