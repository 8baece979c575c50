"""The language rules: what they find in a passage, by the lists of `rules.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from language.passages import ROOT, Passage, files, names_of, passages_of

RULES_FILE = Path(__file__).with_name("rules.toml")
RULES = ("people", "long", "spelling", "names")
"""Rules that must hold."""
ADVICE = "advice"
"""What `make language` prints beside them: sentences that are long, but not too long."""
NAMED = (".py", ".lua", ".js")
"""Suffixes of the files whose identifiers are read."""
_CODE = re.compile(r"``.*?``|`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<![.\s][a-zA-Z])(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)[.!?;][*_)\"'”]*(?=\s|$)")


@dataclass(frozen=True)
class Finding:
    """One violation: its place, its rule, and the text."""

    passage: Passage
    rule: str
    said: str

    def __str__(self) -> str:
        return f"{self.passage.path.relative_to(ROOT)}:{self.passage.line}: {self.rule}: {self.said}"


@dataclass(frozen=True)
class Rules:
    """The lists of `rules.toml`, compiled."""

    max_words: int
    advised_words: int
    people: re.Pattern[str]
    allowed: re.Pattern[str]
    allowed_files: frozenset[str]
    spelling: tuple[tuple[re.Pattern[str], str], ...]
    names: tuple[tuple[re.Pattern[str], str], ...]


@cache
def rules() -> Rules:
    """Return the rules of `rules.toml`."""
    return rules_from(tomllib.loads(RULES_FILE.read_text()))


def rules_from(lists: dict[str, Any]) -> Rules:
    """Return the rules of the given lists."""
    people = lists["people"]
    return Rules(
        max_words=lists["sentences"]["max_words"],
        advised_words=lists["sentences"]["advised_words"],
        people=_any_of(people["words"]),
        allowed=_any_of(people["allowed_phrases"]),
        allowed_files=frozenset(people["allowed_files"]),
        spelling=tuple((_any_of([words]), instead) for words, instead in lists["spelling"].items()),
        names=tuple((re.compile(words), instead) for words, instead in lists["retired_names"].items()),
    )


def _any_of(patterns: list[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b", re.IGNORECASE)


def findings_of(passage: Passage, by: Rules) -> Iterator[Finding]:
    """Return the violations in a passage."""
    text = _LINK.sub(r"\1", _CODE.sub("code", passage.text))
    for sentence in sentences_of(text):
        num_words = sum(any(map(str.isalnum, word)) for word in sentence.split())
        if num_words > by.advised_words:
            rule = "long" if num_words > by.max_words else ADVICE
            yield Finding(passage, rule, f"{num_words} words: {sentence[:70]}…")
    if str(passage.path.relative_to(ROOT)) not in by.allowed_files:
        for match in by.people.finditer(by.allowed.sub("", text)):
            yield Finding(passage, "people", match[0])
    for pattern, instead in by.spelling:
        for match in pattern.finditer(text):
            yield Finding(passage, "spelling", f"{match[0]} → {instead}")


def wrong_name(name: Passage, by: Rules) -> Iterator[Finding]:
    """Whether a name contains a retired word. A leading underscore does not count."""
    for pattern, instead in by.names:
        if pattern.fullmatch(name.text.lstrip("_")):
            yield Finding(name, "names", f"{name.text} → {instead}")


def sentences_of(text: str) -> Iterator[str]:
    """Return the sentences of a paragraph. A full stop within a number, a name or an abbreviation ends none.

    A semicolon ends one too: it separates the entries of a list, or sentences.
    """
    begin = 0
    for match in _SENTENCE_END.finditer(text):
        yield text[begin : match.end()].strip()
        begin = match.end()
    if text[begin:].strip():
        yield text[begin:].strip()


@cache
def all_findings() -> tuple[Finding, ...]:
    """Return the violations in the whole repository, file by file."""
    found: list[Finding] = []
    for path in files():
        for passage in passages_of(path):
            found += findings_of(passage, rules())
        if path.suffix in NAMED:
            found += [finding for name in names_of(path) for finding in wrong_name(name, rules())]
    return tuple(found)
