"""What a gateway answers to public JSON schemas: valid answers, and refusals by reason.

    python -m bench.schemas --url http://127.0.0.1:8000 --folder jsonschemabench/data --write results/schemas.md

The folder has schemas as github.com/guidance-ai/jsonschemabench has under `data`. The package jsonschema checks each
whole answer. An answer that reached its token limit is no JSON yet, so it is counted, not checked.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

COUNT = 300
SEED = 18
MAX_TOKENS = 150
CONCURRENCY = 32
TIMEOUT_S = 300.0
_PROMPT = "Answer with a short JSON value that follows the schema. Leave out whatever may be left out."
_NUMBERS = re.compile(r"\d[\d.]*")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|/[^ ]*/| at [^ ]*:")


@dataclass(slots=True)
class SchemaAnswers:
    """The answers to all schemas."""

    num_schemas: int = 0
    max_tokens: int = MAX_TOKENS
    num_valid: int = 0
    num_cut: int = 0
    """Answers that reached the token limit."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Refused schemas (HTTP 4xx) by reason."""
    failures: list[str] = field(default_factory=list)
    """Invalid answers, and answers with another status than 200 or 4xx."""

    @property
    def num_refused(self) -> int:
        """Schemas that were refused."""
        return sum(self.refusals.values())

    def report(self) -> str:
        """Return the numbers as a table, with the reasons below."""
        share = self.num_refused / max(1, self.num_schemas)
        rows = [
            ("schemas", self.num_schemas),
            ("valid answers", self.num_valid),
            (f"answers cut at {self.max_tokens} tokens", self.num_cut),
            ("refused", f"{self.num_refused} ({share:.1%})"),
            ("invalid answers and other failures", len(self.failures)),
        ]
        lines = ["| what | number |", "|---|---|", *(f"| {name} | {number} |" for name, number in rows), ""]
        lines += ["| refused because | schemas |", "|---|---|"]
        lines += [f"| {reason.replace('|', '/')} | {number} |" for reason, number in self.refusals.most_common()]
        return "\n".join([*lines, *(f"\nfailure: {failure}" for failure in self.failures)]) + "\n"


def schemas_of(folder: Path, count: int = COUNT, seed: int = SEED) -> list[tuple[str, Any]]:
    """Return a random selection of a folder's schemas by file name; the same one every time."""
    files = sorted(folder.rglob("*.json"))
    chosen = random.Random(seed).sample(files, min(count, len(files)))
    return [(str(file.relative_to(folder)), json.loads(file.read_text())) for file in chosen]


def measure(url: str, schemas: Sequence[tuple[str, Any]], max_tokens: int = MAX_TOKENS) -> SchemaAnswers:
    """Ask the gateway for an answer to each schema."""
    found = SchemaAnswers(len(schemas), max_tokens)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(CONCURRENCY) as threads:
        model = client.get("/v1/models").json()["data"][0]["id"]
        answers = threads.map(lambda one: _ask(client, model, one[1], max_tokens), schemas)
        for (name, schema), answer in zip(schemas, answers, strict=True):
            _count(found, name, schema, answer)
    return found


def _ask(client: httpx.Client, model: str, schema: Any, max_tokens: int) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    return client.post("/v1/chat/completions", json=body)


def _count(found: SchemaAnswers, name: str, schema: Any, answer: httpx.Response) -> None:
    if HTTPStatus.BAD_REQUEST <= answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        found.refusals[_reason(answer.json()["error"]["message"])] += 1
        return
    if answer.status_code != HTTPStatus.OK:
        found.failures.append(f"{name}: HTTP {answer.status_code}: {answer.text[:300]}")
        return
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "length":
        found.num_cut += 1
    elif problem := problem_of(schema, choice["message"]["content"]):
        found.failures.append(f"{name}: {problem}")
    else:
        found.num_valid += 1


def problem_of(schema: Any, text: str) -> str:
    """Return why a text is not valid by a schema; an empty string if it is valid."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema, default=Draft202012Validator)(schema).validate(json.loads(text))
    except ValueError as error:
        return f"no JSON ({error}): {text[:200]}"
    except ValidationError as error:
        return f"{error.message[:200]}: {text[:200]}"
    return ""


def _reason(message: str) -> str:
    """Return a message without what differs between schemas of the same trouble."""
    message = message.partition("cannot be enforced: ")[2] or message
    return _NUMBERS.sub("N", _QUOTED.sub("", message))[:120]


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure, print the report, and write it if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the gateway")
    parser.add_argument("--folder", required=True, type=Path, help="JSON files, one schema each")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--write", type=Path, help="file for the report")
    options = parser.parse_args(None if arguments is None else list(arguments))
    schemas = schemas_of(options.folder, options.count, options.seed)
    report = measure(options.url, schemas, options.max_tokens).report()
    print(report)
    if options.write is not None:
        options.write.write_text(report)


if __name__ == "__main__":
    main()
