"""Marks in a prompt, such as `{{plan.text}}`, and the texts that take their places.

All marks of a prompt are replaced at once. So a mark in what a model wrote stays as the model wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from penstock.contract.errors import RequestError

FILLED_FIELDS = ("messages", "prompt", "input", "instructions", "system")
"""Fields of a body in which marks are replaced: those that the model reads."""
MAX_FILLED_BYTES = 1 << 20
"""Bytes of all texts that take the places of marks in one row."""
ALL, ITEM = "*", "item"
"""What a mark may name beside a row or a job: all parents, and the entry of the list that made the row."""
_MARK = re.compile(r"\{\{[ \t]*([^{}\n]{1,600}?)[ \t]*\}\}")
_SOURCE = re.compile(r"(?P<name>.+?)\.(?:text|(?P<json>json)(?P<path>(?:\.[^.\[\]\s]+|\[\d{1,6}\])*))")
_STEP = re.compile(r"\.([^.\[\]\s]+)|\[(\d{1,6})\]")
_FENCED = re.compile(r"\s*```[a-zA-Z]*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark stands for: the text of a row or a job, or a part of that text, which is JSON then."""

    name: str
    path: tuple[str | int, ...] | None = None
    """Members and indexes from the outside inwards. None: the whole text, whether or not it is JSON."""

    def __str__(self) -> str:
        if self.path is None:
            return f"{self.name}.text"
        return f"{self.name}.json" + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in self.path)


def mark_of(text: str) -> Mark | None:
    """Return the mark that `text` writes, without braces: `a.text`, `a.json.list[0].name` or `item`. None: no mark."""
    if text == ITEM:
        return Mark(ITEM)
    found = _SOURCE.fullmatch(text)
    if found is None:
        return None
    if not found["json"]:
        return Mark(found["name"])
    steps = (int(one[2]) if one[1] is None else one[1] for one in _STEP.finditer(found["path"]))
    return Mark(found["name"], tuple(steps))


def marks_in(body: Mapping[str, Any]) -> Iterator[tuple[str, Mark]]:
    """Yield the marks of a body, each with the field that it is in."""
    for name, value in body.items():
        for text in _texts_in(value):
            for found in _MARK.finditer(text):
                if (mark := mark_of(found[1])) is not None:
                    yield name, mark


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value that may have marks."""
    if isinstance(value, str):
        if "{{" in value:
            yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts_in(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts_in(one)


def filled(body: Mapping[str, Any], text_of: Callable[[Mark], str]) -> dict[str, Any]:
    """Return the body with a text in place of each mark: what `text_of` returns, which is asked once for each place.

    Raises RequestError for too many bytes, and what `text_of` raises.
    """
    num_bytes = 0

    def text_for(found: re.Match[str]) -> str:
        nonlocal num_bytes
        mark = mark_of(found[1])
        if mark is None:
            return found[0]
        text = text_of(mark)
        num_bytes += len(text.encode(errors="surrogatepass"))
        if num_bytes > MAX_FILLED_BYTES:
            message = f"{{{{{mark}}}}}: the texts of the row's marks have more than {MAX_FILLED_BYTES} bytes"
            raise RequestError(message, code="filled_text_too_long", param="body")
        return text

    return replaced(body, _MARK, text_for)


def replaced(
    body: Mapping[str, Any], wanted: re.Pattern[str], text_for: Callable[[re.Match[str]], str]
) -> dict[str, Any]:
    """Return the body with `text_for` in place of what the pattern finds in its FILLED_FIELDS."""

    def change(value: Any) -> Any:
        if isinstance(value, str):
            return wanted.sub(text_for, value)
        if isinstance(value, list):
            return [change(one) for one in value]
        if isinstance(value, Mapping):
            return {name: change(one) for name, one in value.items()}
        return value

    return {name: change(value) if name in FILLED_FIELDS else value for name, value in body.items()}


def value_at(mark: Mark, text: str) -> Any:
    """Return the part of a text that a mark with a path names. Raises RequestError for a text without it."""
    fenced = _FENCED.fullmatch(text)
    try:
        value = from_json(text if fenced is None else fenced[1], allow_inf_nan=False)
    except ValueError:
        message = f"{{{{{mark}}}}}: the text of {mark.name} is not JSON"
        raise RequestError(message, code="path_not_found", param="body") from None
    return part_of(mark, value)


def part_of(mark: Mark, value: Any) -> Any:
    """Return the part of a value that the path of a mark names. Raises RequestError for a value without it."""
    for step in mark.path or ():
        try:
            if not isinstance(value, list if isinstance(step, int) else dict):
                raise LookupError
            value = value[step]  # type: ignore[index]  # both kinds of steps were told apart
        except LookupError:
            message = f"{{{{{mark}}}}}: there is no {step!r} in {mark.name}"
            raise RequestError(message, code="path_not_found", param="body") from None
    return value


def shown(value: Any) -> str:
    """Return a JSON value as the text of a prompt: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else to_json(value).decode()


def answer_text(body: Any) -> str | None:
    """Return the text of the answer of any endpoint; None if it has none, such as that of embeddings."""
    try:
        if "choices" in body:
            choice = body["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
        elif body.get("object") == "response":
            parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
            text = "".join(part["text"] for part in parts if part["type"] == "output_text") if parts else None
        elif body.get("type") == "message":
            parts = [part["text"] for part in body["content"] if part["type"] == "text"]
            text = "".join(parts) if parts else None
        else:
            text = None
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    return text if isinstance(text, str) else None
