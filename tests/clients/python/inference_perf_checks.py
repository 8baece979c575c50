"""inference-perf: streams of chats and of completions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from clients.python.checks import MODEL, URL, check, main
from clients.python.load_tool import MODEL_FOLDER, NUM_REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS, only_file, run

STAGE_S = 4
RATE = NUM_REQUESTS // STAGE_S


@check
def chats_succeed() -> None:
    every_request_succeeds("chat")


@check
def completions_succeed() -> None:
    every_request_succeeds("completion")


def every_request_succeeds(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yml"
        config.write_text(json.dumps(config_of(kind)))  # JSON is YAML too.
        run("inference-perf", "--config_file", str(config), folder=Path(folder))
        report = json.loads(only_file(Path(folder), "summary_lifecycle_metrics.json").read_text())
    assert report["failures"]["count"] == 0, report["failures"]
    assert report["successes"]["count"] == NUM_REQUESTS, report["successes"]
    assert report["successes"]["latency"]["time_to_first_token"]["mean"] > 0


def config_of(kind: str) -> dict[str, Any]:
    prompts = {"num_groups": 2, "num_prompts_per_group": NUM_REQUESTS // 2, "system_prompt_len": PROMPT_TOKENS}
    lengths = {"question_len": PROMPT_TOKENS, "output_len": OUTPUT_TOKENS}
    return {
        "api": {"type": kind, "streaming": True},
        "data": {"type": "shared_prefix", "shared_prefix": prompts | lengths},
        "load": {"type": "constant", "stages": [{"rate": RATE, "duration": STAGE_S}], "num_workers": 1},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": MODEL_FOLDER},
        "storage": {"local_storage": {"path": "report"}},
        "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": False}},
    }


if __name__ == "__main__":
    main("inference-perf")
