"""Traces: files that say when requests arrive and how long they are.

JSON lines have `timestamp` in ms (Mooncake's format) or `arrival_s`; `prompt`, `messages` or `input_length`, with
optional `hash_ids`; and `output_length` or `max_tokens`. CSV files have the columns of Azure's traces (TIMESTAMP as a
date, ContextTokens, GeneratedTokens) or BurstGPT's (Timestamp in seconds, Request tokens, Response tokens).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.cli.bench.records import Prompt
from penstock.contract.errors import RequestError

_CSV_COLUMNS = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Timestamp", "Request tokens", "Response tokens"))


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A line of a trace. Its prompt is given, or else has `num_prompt_tokens` tokens."""

    arrival_s: float
    num_output_tokens: int
    num_prompt_tokens: int = 0
    prompt: Prompt | None = None
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, most: int | None) -> list[TracedRequest]:
    """Return the first `most` requests of a trace in order of arrival, which counts from the first of them.

    Lines without an output are left out: a trace has them for requests that failed. Raises RequestError.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _from_csv if path.suffix.lower() == ".csv" else _from_json_lines
            found = list(islice((one for one in read(file, path) if one.num_output_tokens > 0), most))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"trace: cannot read {path}: {error}", param="trace") from error
    if not found:
        raise RequestError(f"trace: {path} has no requests", param="trace")
    first_s = min(one.arrival_s for one in found)
    moved = (
        TracedRequest(one.arrival_s - first_s, one.num_output_tokens, one.num_prompt_tokens, one.prompt, one.hash_ids)
        for one in found
    )
    return sorted(moved, key=lambda one: one.arrival_s)


def _from_json_lines(file: Iterator[str], path: Path) -> Iterator[TracedRequest]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield _of_json(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"trace: {path}, line {number}: {_problem_of(error)}", param="trace") from error


def _of_json(line: Any) -> TracedRequest:
    if not isinstance(line, dict):
        raise TypeError("not a JSON object")
    arrival_s = float(line["arrival_s"]) if "arrival_s" in line else float(line["timestamp"]) / 1000
    num_output = int(line["output_length"] if "output_length" in line else line["max_tokens"])
    prompt = line.get("messages") or line.get("prompt")
    if prompt is not None:
        return TracedRequest(arrival_s, num_output, prompt=prompt)
    hash_ids = tuple(map(int, line.get("hash_ids") or ()))
    return TracedRequest(arrival_s, num_output, int(line["input_length"]), hash_ids=hash_ids)


def _from_csv(file: Iterator[str], path: Path) -> Iterator[TracedRequest]:
    rows = csv.DictReader(file)
    names = next((names for names in _CSV_COLUMNS if set(names) <= set(rows.fieldnames or ())), None)
    if names is None:
        known = " or ".join(", ".join(columns) for columns in _CSV_COLUMNS)
        raise RequestError(f"trace: {path} needs the columns {known}", param="trace")
    for row in rows:
        try:
            yield _of_row(row, names)
        except (ValueError, TypeError) as error:
            raise RequestError(f"trace: {path}, line {rows.line_num}: {_problem_of(error)}", param="trace") from error


def _of_row(row: Mapping[str, str], names: tuple[str, str, str]) -> TracedRequest:
    arrival, num_prompt, num_output = (row[name] for name in names)
    try:
        arrival_s = float(arrival)
    except ValueError:
        # Azure writes seven digits after the seconds, of which Python reads six.
        seconds, _, fraction = arrival.partition(".")
        arrival_s = datetime.fromisoformat(seconds).timestamp() + float(f"0.{fraction.partition('+')[0] or 0}")
    return TracedRequest(arrival_s, int(float(num_output)), int(float(num_prompt)))


def _problem_of(error: Exception) -> str:
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)
