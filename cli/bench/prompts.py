"""Prompts of a load: of wanted lengths, from files, and from traces. Also the records of a request."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

from penstock.contract.errors import RequestError

Prompt = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the load: when it is due, in seconds after the start, and what it asks for."""

    due_s: float
    prompt: Prompt
    max_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """The measurements of one request. Times are seconds after the start of the load; 0 until they are known."""

    due_s: float
    ready_s: float = 0.0
    """When the load generator turned to the request; the difference to `due_s` is its own lateness."""
    sent_s: float = 0.0
    """When the request was sent. It is later than `ready_s` by the wait for one of `--max-concurrency` slots."""
    token_events_s: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text arrived."""
    end_s: float = 0.0
    """When the last event of the answer's choices arrived."""
    prompt_tokens: int | None = None
    usage_tokens: int | None = None
    """Tokens of the answer by the server's usage; None if it reported none."""
    is_over: bool = False
    """Whether it was answered or failed; not while it runs, and not if it never started."""
    finish_reason: str = ""
    error: str = ""
    """Why the request failed, in words that are the same for all failures of a kind."""
    detail: str = ""
    """The server's message beside `error`."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as the server counted them, else its events with text."""
        return len(self.token_events_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token, from sending the request."""
        return self.token_events_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time from sending the request to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one; None if there is only one."""
        num_more = self.output_tokens - 1
        return (self.end_s - self.token_events_s[0]) / num_more if num_more > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between consecutive events with text."""
        events = self.token_events_s
        return [after - before for before, after in pairwise(events)]


# --- prompts of a wanted number of tokens, without a tokenizer

HASH_BLOCK_TOKENS = 512
"""Tokens of a prompt that one of a trace's `hash_ids` stands for, as in Mooncake's traces."""
_FREQUENT_WORDS = """
time people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story
fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face
level office door health person art war history party result change morning reason research girl moment air
teacher force education foot boy age policy music market sense nation plan college interest death course
experience effect
"""
"""Words of which each is one token in most vocabularies, together with the space before it."""
_WORDS = tuple(_FREQUENT_WORDS.split())


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """How a prompt of these words becomes tokens: a server's chat template adds `overhead`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenRatio:
        """Return the ratio that two prompts show; each is (words, tokens by the server's usage)."""
        (few_words, few_tokens), (many_words, many_tokens) = few, many
        slope = (many_tokens - few_tokens) / (many_words - few_words)
        # A server that cuts prompts, or counts them otherwise, shows no usable slope.
        if slope <= 0:
            return cls()
        return cls(slope, few_tokens - slope * few_words)

    def num_words(self, num_tokens: int) -> int:
        """Return how many words make a prompt of about that many tokens, at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def words(random: Random, num_words: int) -> str:
    """Return that many random words."""
    return " ".join(random.choices(_WORDS, k=num_words))


def hashed_words(hash_ids: Sequence[int], num_words: int, words_per_block: int) -> str:
    """Return a prompt whose blocks depend on a trace's hash ids alone, so that equal prefixes are equal texts."""
    blocks = (words(Random(block), words_per_block) for block in hash_ids[: -(-num_words // words_per_block)])
    found = " ".join(blocks).split(" ")[:num_words]
    missing = num_words - len(found)
    return " ".join([*found, words(Random(hash_ids[-1] + 1), missing)] if missing else found)


def random_lengths(mean: int, range_ratio: float, num_lengths: int, random: Random) -> list[int]:
    """Return lengths with a uniform distribution from mean × (1 - ratio) to mean × (1 + ratio), at least 1."""
    low, high = max(1, round(mean * (1 - range_ratio))), max(1, round(mean * (1 + range_ratio)))
    return [random.randint(low, high) for _ in range(num_lengths)]


# --- prompts from a file: ShareGPT's JSON, or JSON lines with `prompt` or `messages`

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


# --- traces: files that say when requests arrive and how long they are
#
# JSON lines have `timestamp` in ms (Mooncake's format) or `arrival_s`; `prompt`, `messages` or `input_length`, with
# optional `hash_ids`; and `output_length` or `max_tokens`. CSV files have the columns of Azure's traces (TIMESTAMP as
# a date, ContextTokens, GeneratedTokens) or BurstGPT's (Timestamp in seconds, Request tokens, Response tokens).

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
