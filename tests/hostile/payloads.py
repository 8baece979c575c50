"""Bodies whose processing costs far more than their size suggests, and bodies at a limit."""

from __future__ import annotations

import itertools
import json
import string
from typing import Any

MAX_BODY = 8 << 20
CONTEXT = 8192
WORDS = ["the", "gate", "opens", "by", "pressure", "and", "water", "stands", "high", "above", "it"]


def alternating_grammar(seed: int = 0, alternatives: int = 1000) -> str:
    """Return alternatives of `/[a-z]*xy[a-z]*/`, each with other letters, so that their numbers of states multiply."""
    triples = ("".join(one) for one in itertools.product(string.ascii_lowercase, repeat=3))
    chosen = itertools.islice(triples, seed * alternatives % 16_000, None)
    rules = [f"/[a-z]*{letters}[a-z]*/" for letters, _ in zip(chosen, range(alternatives), strict=False)]
    return f"start: ({' | '.join(rules)}) /[ .]{{1,4}}/".ljust(47_000)


def choice_with_one_beginning(number: int = 0, *, count: int = 1024, chars: int = 1024) -> list[str]:
    """Return texts that differ only in their last characters: 1 MB."""
    return [f"{number:04d}" + "a" * (chars - 10) + f"{i:06d}" for i in range(count)]


def prompt_of(num_tokens: int, number: int = 0) -> list[int]:
    """Return token ids without a common prefix with those of another number."""
    return [1000 + (number * 7919 + i * 31) % 40_000 for i in range(num_tokens)]


def tool_history(num_calls: int = 112_000) -> dict[str, Any]:
    """Return a chat with this many tool calls, 8 MB by default."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    ids = iter(range(num_calls))
    while numbers := list(itertools.islice(ids, 128)):
        turns.append({"role": "assistant", "tool_calls": [{"id": str(i), **call} for i in numbers]})
    return {"messages": [*turns, {"role": "user", "content": "go on"}], "max_tokens": 1}


def regexes() -> list[str]:
    """Expressions whose automata are large, or on which a backtracking matcher is slow."""
    return [
        "(a?){2000}a{2000}",
        "(x+x+)+y",
        "((a{1,100}){1,100}){1,100}",
        "(.|\\n){0,5000}z",
        r"(\p{L}|\d){1,4000}[^\p{N}]{1,4000}",
        "|".join(f"[a-z]*{a}{b}[a-z]*" for a in "abcdefghijklmnop" for b in string.ascii_lowercase)[:8192],
        "(" * 500 + "a" + ")*" * 500,
        "(a|b|ab)*" * 900,
        ".*" * 4000 + "x",
        "[^a]{1,9}" * 900,
        r"(\w+\s?)*[A-Z]{2000}",
        "(?i:" + "kſ" * 2000 + ")",
    ]


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for i in range(depth):
        schema = {"type": "object", "properties": {f"p{i}": schema}, "required": [f"p{i}"]}
    return schema


def _wide_refs() -> dict[str, Any]:
    """Return definitions that each refer twice to the next: 2^60 nodes if references are copied."""
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "ab"}, "required": ["a"]}
        for i in range(60)
    }
    return {"$defs": {**defs, "d60": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _all_of() -> dict[str, Any]:
    """Return a conjunction of disjunctions: 4^12 cases if it is expanded."""
    of = [{"anyOf": [{"properties": {f"k{i}{j}": {"const": j}}} for j in range(4)]} for i in range(12)]
    return {"type": "object", "allOf": of}


def schemas() -> list[dict[str, Any]]:
    """Schemas that become large when they are expanded."""
    texts = [f"value-{i:05d}-{'x' * (i % 7)}" for i in range(2800)]
    patterns = {
        f"^[a-z]*{a}{b}[0-9]+$": {"type": "integer"} for a in string.ascii_lowercase for b in "abcdefghijklmnop"
    }
    return [
        {"enum": texts},
        {"type": "array", "items": {"enum": texts[:2000]}, "uniqueItems": False, "minItems": 100_000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000, "maxItems": 1_000_000_000},
        {"type": "string", "minLength": 1_000_000, "maxLength": 1_000_000_000},
        {"type": "string", "pattern": "^" + "(a|aa)*" * 500 + "b$"},
        {"type": "object", "patternProperties": patterns, "additionalProperties": False},
        {"type": "integer", "minimum": 10**18 - 1, "maximum": 10**18 + 10**17, "multipleOf": 99_991},
        {"type": "number", "minimum": 1.000000001, "maximum": 9.99999999e300},
        {"oneOf": [{"type": "object", "properties": {f"p{i}": {"enum": texts[:20]}}} for i in range(100)]},
        {"properties": {f"p{i}": {"type": "string", "maxLength": 1000} for i in range(1000)}},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]},
        _nested(300),
        _wide_refs(),
        _all_of(),
        {"not": {"not": {"not": {"enum": texts[:500]}}}},
        {"type": "object", "propertyNames": {"pattern": "^(x+x+)+$"}, "minProperties": 5000},
        {"type": "array", "prefixItems": [{"enum": texts[:3]} for _ in range(1500)], "items": False},
        {"type": "array", "contains": {"type": "integer"}, "minContains": 1000, "uniqueItems": True},
    ]


def options_at_limits() -> dict[str, Any]:
    """The options that cost time for each token in a sampler or detokenizer."""
    return {
        "stop": ["z" * 255 + chr(97 + i) for i in range(16)],
        "stop_token_ids": list(range(2000, 2064)),
        "logit_bias": {str(i): 100 - i % 200 for i in range(1024)},
        "bad_words": ["b" * 255 + chr(97 + i % 26) for i in range(64)],
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "frequency_penalty": -2.0,
        "min_p": 0.0001,
        "top_k": 49_151,
        "n": 16,
        "max_tokens": 200,
    }


def broken_json() -> list[bytes]:
    """Bodies near the size limit that are expensive to parse or to refuse."""
    fill = MAX_BODY - 200
    head = b'{"model": "m", "prompt": "x", '
    return [
        b"[" * fill,
        b'{"a":' * (fill // 5),
        head + b'"metadata": {"a": ' + b"[" * 3_000_000 + b"]" * 3_000_000 + b"}}",
        head + b'"metadata": {"a": [' + b"1," * (fill // 2 - 50) + b"1]}}",
        head + b'"seed": ' + b"9" * (fill - 50) + b"}",
        head + b'"temperature": 1e' + b"9" * (fill - 50) + b"}",
        head + b'"user": "' + b"\\u0000" * (fill // 6 - 20) + b'"}',
        head + b'"user": "' + b"\\ud800" * (fill // 6 - 20) + b'"}',
        head + b",".join(b'"k%d": 1' % i for i in range(550_000)) + b"}",
        head + b",".join([b'"n": 1'] * 900_000) + b"}",
        b'{"model": "m", "prompt": [' + b"1," * (fill // 2 - 50) + b"1]}",
        b'{"model": "m", "prompt": [' + b"-1," * (fill // 3 - 50) + b"1]}",
        head + b'"stop": [' + b'"a",' * (fill // 4 - 50) + b'"a"]}',
        head + b'"logit_bias": {' + b",".join(b'"%d": 101' % i for i in range(500_000)) + b"}}",
        b" " * fill + b"{}",
        b"\xff" * fill,
        b'{"model": "m", "messages": [' + b'{"role":"user","content":""},' * (fill // 30) + b"{}]}",
        b'{"model": "m", "structured_outputs": {"json": ' + b'{"properties":{"a":' * 300_000 + b"}}",
        b'{"model": "m", "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ['
        + b'"x",' * (fill // 4 - 50)
        + b'"x"]}}}}',
    ]


def odd_texts() -> list[str]:
    """Texts on which tokenizers and normalizers are slow."""
    return [
        "\u0301" * 20_000,
        "a\u0300\u0316" * 10_000,
        "👩‍👩‍👧‍👦" * 3000,
        "\u202e" + "abc" * 5000,
        "\x00" * 7000,
        "ﷺ" * 7000,
        " " * 60_000,
        "a" * 60_000,
        "1234567890" * 5000,
        "\U000e0001" * 7000,
        "<|im_end|>" * 7000,
        "ａ１" * 10_000,
        "".join(map(chr, range(0x20, 0xD7FF)))[:30_000],
    ]


def as_body(model: str, **fields: Any) -> bytes:
    """A completion's body."""
    return json.dumps({"model": model, **fields}).encode()
