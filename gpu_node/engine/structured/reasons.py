"""Why a grammar was refused: llguidance's messages in penstock's words."""

from __future__ import annotations

import re

from penstock.gpu_node.engine.structured.grammar import Kind

MAX_REASON_CHARS = 500
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Unimplemented keys: \[(.*)\]", r"keywords that cannot be enforced: \1"),
        (r"oneOf constraints are not supported", "the branches of a oneOf may match the same value; use anyOf"),
        (r"Resource '(.*?)' is not present in a registry", r"$ref '\1' leads out of the schema"),
        (r"(?:Pointer|Anchor) '(.*?)' (?:does not exist|not found)", r"$ref '\1' leads nowhere"),
        (r"recursion limit exceeded", "it is nested too deeply"),
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
_EBNF = "::="


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
        if _EBNF in problem:
            first += "; a grammar must be in Lark's notation, where a rule is written name: …"
    return _in_our_words(first)[:MAX_REASON_CHARS]


def _in_our_words(message: str) -> str:
    for pattern, words in _WORDS:
        if (found := pattern.search(message)) is not None:
            return found.expand(words)
    return message
