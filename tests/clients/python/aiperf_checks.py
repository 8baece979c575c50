"""aiperf: streams of chats, completions and responses."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

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

# With it, aiperf takes the name of a local folder for one of the hub.
os.environ.pop("HF_HUB_OFFLINE", None)


@check
def chats_succeed() -> None:
    every_request_succeeds("chat")


@check
def completions_succeed() -> None:
    every_request_succeeds("completions")


@check
def responses_succeed() -> None:
    every_request_succeeds("responses")


def every_request_succeeds(endpoint: str) -> None:
    options = {
        "--model": MODEL,
        "--tokenizer": MODEL_FOLDER,
        "--url": URL,
        "--endpoint-type": endpoint,
        "--request-count": NUM_REQUESTS,
        "--concurrency": CONCURRENCY,
        "--synthetic-input-tokens-mean": PROMPT_TOKENS,
        "--output-tokens-mean": OUTPUT_TOKENS,
        "--ui": "none",
        "--artifact-dir": "report",
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(text) for option in options.items() for text in option]
        run("aiperf", "profile", *arguments, "--streaming", folder=Path(folder))
        report = json.loads(only_file(Path(folder), "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
    assert not report.get("error_summary"), report["error_summary"]
    assert 0 < report["output_sequence_length"]["avg"] <= OUTPUT_TOKENS, report["output_sequence_length"]
    assert report["time_to_first_token"]["avg"] > 0


if __name__ == "__main__":
    main("aiperf")
