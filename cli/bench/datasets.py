"""Prompts from a file: ShareGPT's JSON, or JSON lines with `prompt` or `messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from penstock.cli.bench.records import Prompt
from penstock.contract.errors import RequestError

_TOKENS_PER_WORD = 4 / 3
"""Tokens per word of English prose, for an estimate of the length of a dataset's answers."""

Sample = tuple[Prompt, int | None]
"""A prompt, and how many tokens its answer has if the file says so."""


def read_dataset(path: Path) -> list[Sample]:
    """Return the samples of a file. Raises RequestError if there are none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"dataset_path: cannot read {path}: {error}", param="dataset_path") from error
    try:
        is_list = text.lstrip().startswith("[")
        samples = list(_conversations(json.loads(text)) if is_list else _lines(text))
    except ValueError as error:
        raise RequestError(f"dataset_path: {path}: {error}", param="dataset_path") from error
    if not samples:
        problem = "has no conversations of two messages" if is_list else "has no lines with `prompt` or `messages`"
        raise RequestError(f"dataset_path: {path} {problem}", param="dataset_path")
    return samples


def sampled(samples: list[Sample], num_prompts: int, random: Random) -> list[Sample]:
    """Return that many samples in random order; each is repeated only if there are too few."""
    chosen: list[Sample] = []
    while len(chosen) < num_prompts:
        chosen += random.sample(samples, min(len(samples), num_prompts - len(chosen)))
    return chosen


def _conversations(entries: list[Any]) -> Iterator[Sample]:
    for entry in entries:
        messages = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if isinstance(messages, list) and len(messages) >= 2:
            prompt, answer = (str(message.get("value", "")) for message in messages[:2])
            if prompt and answer:
                yield prompt, max(1, round(len(answer.split()) * _TOKENS_PER_WORD))


def _lines(text: str) -> Iterator[Sample]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        prompt = (entry.get("messages") or entry.get("prompt")) if isinstance(entry, dict) else None
        if not prompt:
            raise ValueError(f"line {number}: no `prompt` and no `messages`")
        num_tokens = entry.get("output_tokens", entry.get("max_tokens"))
        yield prompt, None if num_tokens is None else int(num_tokens)
