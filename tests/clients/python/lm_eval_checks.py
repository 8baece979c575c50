"""lm-evaluation-harness: the tasks of examples/lm_eval, from local files, over completions."""

from __future__ import annotations

import json
import math
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from clients.python.checks import API, MODEL, check, main
from clients.python.load_tool import MODEL_FOLDER, only_file, run

TASKS = Path(__file__).resolve().parents[3] / "examples" / "lm_eval"
ROWS = [json.loads(line) for line in (TASKS / "rivers.jsonl").read_text().splitlines()]


def evaluated(task: str, **model_args: object) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the metrics of a task and its samples."""
    given = {"base_url": f"{API}/completions", "model": MODEL, "num_concurrent": 4, **model_args}
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    with tempfile.TemporaryDirectory() as out:
        options = ["--model_args", arguments, "--output_path", out, "--log_samples"]
        run("lm_eval", "--model", "local-completions", "--include_path", ".", "--tasks", task, *options, folder=TASKS)
        results = json.loads(only_file(Path(out), "results_*.json").read_text())["results"][task]
        samples = only_file(Path(out), "samples_*.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in samples]


def logprob_of(text: str, start: int) -> float:
    """Return the log-probability of a text from the character `start` on."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{API}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]
    pairs = zip(found["text_offset"], found["token_logprobs"], strict=True)
    return float(sum(value for at, value in pairs if start <= at < len(text)))


@check
def choices_have_the_log_probabilities_of_the_server() -> None:
    results, samples = evaluated("rivers_choice", tokenizer=MODEL_FOLDER)
    assert len(samples) == len(ROWS)
    num_right = 0
    for sample in samples:
        row, values = sample["doc"], [float(pair[0]) for pair in sample["filtered_resps"]]
        prompt = f"Question: {row['question']}\nAnswer:"
        for choice, value in zip(row["choices"], values, strict=True):
            expected = logprob_of(f"{prompt} {choice}", len(prompt))
            assert math.isclose(value, expected, abs_tol=0.02), (row, choice, value, expected)
        num_right += values.index(max(values)) == row["answer"]
    assert math.isclose(results["acc,none"], num_right / len(ROWS)), results


@check
def greedy_answers_need_no_tokenizer() -> None:
    results, samples = evaluated("rivers_text", tokenizer_backend=None)
    assert len(samples) == len(ROWS) and all(sample["filtered_resps"][0] for sample in samples)
    assert 0 <= results["exact_match,none"] <= 1, results


if __name__ == "__main__":
    main("lm-eval")
