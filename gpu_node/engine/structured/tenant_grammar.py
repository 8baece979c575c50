"""A tenant's grammar as the node knows it: its text, its trial, what it has cost since, and why it was refused."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import dataclass, field
from typing import Literal

from penstock.contract.errors import PenstockError

MAX_REASON_CHARS = 500


_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Unimplemented keys: \[(.*)\]", r"keywords that cannot be enforced: \1"),
        (r"oneOf constraints are not supported", "the branches of a oneOf may match the same value; use anyOf"),
        (r"Resource '(.*?)' is not present in a registry", r"$ref '\1' leads out of the schema"),
        (r"(?:Pointer|Anchor) '(.*?)' (?:does not exist|not found)", r"$ref '\1' leads nowhere"),
        (r"recursion limit exceeded", "it is nested too deeply"),
        (
            r"Unsatisfiable schema: Regex is empty",
            "no value can satisfy it: no text has its format, pattern and length",
        ),
        (
            r"Unable to determine if regex is empty",
            "whether a text has its format, pattern and length takes too long to find out",
        ),
        (r"Unsatisfiable schema: (.*)", r"no value can satisfy it: \1"),
        (r"Invalid type: (.*)", r"'\1' is not a JSON type"),
        (r"Expected positive integer for '(.*?)', got (.*)", r"\1 must be a non-negative integer, not \2"),
        (r"Expected (\w+) for '(.*?)', got (.*)", r"\2 must be of type \1, not \3"),
        (
            r"min/maxProperties only supported",
            "minProperties and maxProperties need every property in properties to be required",
        ),
        (
            r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
            r"the patternProperties /\1/ and /\2/ may match the same name",
        ),
        (
            r"circular references with sibling keys are not supported: (.*)",
            r"the circular $ref '\1' has other keywords beside it",
        ),
        (r"Current row has (\d+) items; max is (\d+)", r"\1 parser items at one character; the limit is \2"),
    )
)


_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
"""llguidance's line and column in a grammar."""


_REGEX_ERROR = re.compile(r"^error: (.*)", re.MULTILINE)


_INVALID_REGEX = re.compile(r"^invalid regex .*")


def reason_of(kind: Kind, problem: str) -> str:
    """Return a problem that llguidance found, in our words; a message without a translation as it is."""
    first, regex_error = problem.partition("\n")[0], _REGEX_ERROR.search(problem)
    place = _PLACE.match(first)
    if place is not None:
        first = place[3]
    if regex_error is not None:
        found = _INVALID_REGEX.sub("", first) if kind == "lark" else ""
        first = f"{found or 'invalid regular expression'}: {regex_error[1]}"
    if place is not None and kind == "lark":
        first = f"line {place[1]}, column {place[2]}: {first}"
    return _in_our_words(first)[:MAX_REASON_CHARS]


def _in_our_words(message: str) -> str:
    for pattern, words in _WORDS:
        if (found := pattern.search(message)) is not None:
            return found.expand(words)
    return message


Kind = Literal["lark", "regex", "json", "calls"]
"""`calls` is Lark's notation with JSON schemas in rules of their own, as `CallGrammar` writes it."""


_numbers = itertools.count(1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A tenant's grammar that passed its trial. Guides keep it alive, even after the cache has dropped it.

    Two tenants with the same text have two of these, with numbers, accounts and refusals of their own.
    """

    kind: Kind
    text: str
    field_name: str
    """The request's field, for error messages."""
    is_costly: bool
    """Whether the worker for costly grammars serves it."""
    number: int = field(default_factory=lambda: next(_numbers))
    num_guides: int = 0
    """Number of choices that use it now."""
    memory: int = 0
    """Bytes that its worker grew by during its tasks."""
    num_slow_masks: int = 0
    """Masks that took longer than a cheap grammar's may."""
    num_masks: int = 0
    """Masks computed since `memory` was 0."""
    num_kills: int = 0
    """Workers that were killed from outside during its tasks."""
    refusal: PenstockError | None = None
    """Why no choice may continue with it."""
    refused_s: float | None = None
    """When it was refused, on the monotonic clock."""
    account_s: float = field(default_factory=time.monotonic)
    """When its account began: memory, masks and kills. After a while another one begins."""

    def refuse(self, error: PenstockError) -> None:
        """Let no choice continue with it. The first reason stays."""
        if self.refusal is None:
            self.refusal, self.refused_s = error, time.monotonic()

    def begin_account(self, now_s: float) -> None:
        """Begin another account."""
        self.account_s = now_s
        self.memory = self.num_masks = self.num_slow_masks = self.num_kills = 0

    @property
    def size(self) -> int:
        """Bytes that the cache counts for it."""
        return len(self.text.encode()) + 512


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial: the error, if any, and the index of the text at fault."""

    problem: str = ""
    part: int = 0
    is_costly: bool = False
    is_too_costly: bool = False
    """Whether a limit is the reason. Without a `problem`, the limit killed the trial's worker."""
    is_killed: bool = False
    """Whether its workers were killed from outside too often. Another trial may succeed later."""
