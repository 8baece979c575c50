"""guidellm: concurrent streams of chats and of completions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from clients.python.checks import MODEL, URL, check, main
from clients.python.load_tool import (
    CONCURRENCY,
    MODEL_FOLDER,
    NUM_REQUESTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    only_file,
    run,
)


@check
def chats_succeed() -> None:
    every_request_succeeds("/v1/chat/completions")


@check
def completions_succeed() -> None:
    every_request_succeeds("/v1/completions")


def every_request_succeeds(route: str) -> None:
    backend = {"kind": "openai_http", "target": URL, "model": MODEL, "request_format": route}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    options: list[tuple[str, dict[str, Any]]] = [
        ("--backend", backend),
        ("--profile", {"kind": "concurrent", "streams": CONCURRENCY}),
        ("--constraint", {"kind": "max_requests", "count": NUM_REQUESTS}),
        ("--tokenizer", {"kind": "huggingface_auto", "model": MODEL_FOLDER}),
        ("--data", data),
        ("--output", {"kind": "json", "path": "report.json"}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [text for name, value in options for text in (name, json.dumps(value))]
        run("guidellm", "run", *arguments, "--disable-console-interactive", folder=Path(folder))
        [benchmark] = json.loads(only_file(Path(folder), "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert tokens["mean"] == OUTPUT_TOKENS, tokens
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


if __name__ == "__main__":
    main("guidellm")
