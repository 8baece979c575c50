"""Random schemas, grammars and expressions, and real schemas of packages and benchmarks with parts of them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SCHEMAS_PACKAGE = "check-jsonschema"
"""Brings a copy of schemas of schemastore.org: of CI services, build tools, manifests."""
SCHEMAS_FOLDER = "PENSTOCK_FUZZ_SCHEMAS"
"""A folder of more, as github.com/guidance-ai/jsonschemabench has under `data`."""
MAX_CHARS = 60_000
MAX_FILES = 20_000
_KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
TEXTS = ("a", "", "é", "👩‍🔧", "\u0000", "x" * 300, "\u202e", "$ref", '"', "\\", "</s>", "<|im_end|>", "ſ", "K", "\n")


@cache
def real_schemas() -> list[Any]:
    """Return real schemas and the schemas nested inside them, in a fixed order."""
    return [schema for path in _files() for schema in _parts(path)]


def _files() -> list[Path]:
    found: list[Path] = []
    try:
        files = importlib.metadata.files(SCHEMAS_PACKAGE) or []
        found += [Path(str(file.locate())) for file in files if "vendor" in str(file) and file.suffix == ".json"]
    except importlib.metadata.PackageNotFoundError:
        pass
    if folder := os.environ.get(SCHEMAS_FOLDER):
        found += sorted(Path(folder).rglob("*.json"))[:MAX_FILES]
    return found


def _parts(path: Path) -> Iterator[Any]:
    try:
        whole = json.loads(path.read_text())
    except ValueError:
        return
    whole = whole.get("json_schema", whole) if isinstance(whole, dict) else whole
    if not isinstance(whole, dict):
        return
    if len(json.dumps(whole)) <= MAX_CHARS:
        yield whole
    for key in ("definitions", "$defs", "properties"):
        for part in whole.get(key, {}).values() if isinstance(whole.get(key), dict) else ():
            if isinstance(part, dict) and len(json.dumps(part)) <= MAX_CHARS:
                yield part


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a random schema. Most are valid, few are sensible."""
    if rng.random() < 0.05:
        return rng.choice((True, False, {}, [], None, 1, "string", {"type": "nonsense"}, {"type": [1]}))
    schema: dict[str, Any] = {}
    if rng.random() < 0.8:
        schema["type"] = rng.choice(_KINDS) if rng.random() < 0.9 else rng.sample(_KINDS, rng.randrange(1, 4))
    for _ in range(rng.randrange(4)):
        schema.update(_keyword(rng, depth))
    return schema


def _keyword(rng: random.Random, depth: int) -> dict[str, Any]:
    def size() -> Any:
        return rng.choice((0, 1, 2, 7, 100, 10_000, 1 << 31, 1 << 63, 10**30, -1, 1.5, "1", None))

    def inner() -> Any:
        return random_schema(rng, depth - 1) if depth else {"type": "null"}

    names = [rng.choice(TEXTS) for _ in range(rng.randrange(4))]
    return rng.choice(
        (
            lambda: {"enum": [random_value(rng, 2) for _ in range(rng.choice((0, 1, 3, 200)))]},
            lambda: {"const": random_value(rng, 3)},
            lambda: {rng.choice(("minLength", "maxLength", "minItems", "maxItems", "minProperties")): size()},
            lambda: {rng.choice(("minimum", "maximum", "exclusiveMinimum", "multipleOf")): size()},
            lambda: {"pattern": random_regex(rng)},
            lambda: {"format": rng.choice(("date-time", "email", "uuid", "uri", "ipv6", "regex", "nonsense", 5))},
            lambda: {"properties": {name: inner() for name in names}},
            lambda: {"required": names},
            lambda: {"additionalProperties": inner()},
            lambda: {"patternProperties": {random_regex(rng): inner()}},
            lambda: {"items": inner()},
            lambda: {"prefixItems": [inner() for _ in range(rng.randrange(5))]},
            lambda: {rng.choice(("anyOf", "oneOf", "allOf")): [inner() for _ in range(rng.randrange(4))]},
            lambda: {rng.choice(("not", "if", "then", "else", "contains", "propertyNames")): inner()},
            lambda: {"$ref": rng.choice(("#", "#/$defs/a", "#/nowhere", "http://localhost/", "#/$defs/%", "", 5))},
            lambda: {"$defs": {"a": inner()}},
            lambda: {rng.choice(("$id", "$schema", "$anchor", "title", "x-own", "uniqueItems")): rng.choice(TEXTS)},
        )
    )()


def random_value(rng: random.Random, depth: int = 3) -> Any:
    """Return any JSON value."""
    if depth and rng.random() < 0.3:
        values = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return values if rng.random() < 0.5 else {rng.choice(TEXTS): value for value in values}
    numbers = (0, -1, 1, 1 << 31, 1 << 63, -(1 << 63) - 1, 10**40, 0.1, -0.0, 1e308, 1e-320)
    return rng.choice((None, True, False, *numbers, *TEXTS))


def random_regex(rng: random.Random, depth: int = 4) -> str:
    """Return a random expression. Most can be compiled."""
    atoms = (
        "a",
        ".",
        "[a-z]",
        "[^x]",
        r"\d",
        r"\w+",
        r"\s",
        r"\p{L}",
        "é",
        "^",
        "$",
        r"\b",
        "(?:",
        "(?i)x",
        "[",
        "{",
        "\\",
    )
    counts = ("*", "+", "?", "{3}", "{1,40}", "{0,}", "*?", "{200}", "{1000,2000}", "{2,1}", "**")
    text = rng.choice(atoms[:9]) if rng.random() < 0.93 else rng.choice(atoms)
    for _ in range(rng.randrange(depth + 1)):
        kind = rng.random()
        if kind < 0.4:
            text += random_regex(rng, depth - 1)
        elif kind < 0.6:
            text = f"({text}|{random_regex(rng, depth - 1)})"
        else:
            text = f"({text}){rng.choice(counts)}"
        if len(text) > 400:
            break
    return text


def random_grammar(rng: random.Random) -> str:
    """Return a random grammar in Lark's notation. Most derive some text."""
    names = [f"r{i}" for i in range(rng.randrange(1, 6))]
    terms = [f"T{i}" for i in range(rng.randrange(1, 4))]

    def symbol() -> str:
        return rng.choice((*names, *terms, *terms, '"x"', '"é"i', "/[a-z]{1,9}/", f"/{random_regex(rng, 2)}/", "start"))

    def side() -> str:
        alternatives = [" ".join(symbol() for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        alternatives = [f"({one}){rng.choice('*+?')}" if rng.random() < 0.2 else one for one in alternatives]
        return " | ".join(alternatives)

    odd = (
        "%import common.NUMBER",
        "%ignore /\\s+/",
        "start: nowhere",
        "%json {",
        "r0[max_tokens=1]: T0",
        ": :",
        "?r0: T0",
    )
    lines = [f"start: {side()}", *(f"{name}: {side()}" for name in names)]
    lines += [f"{term}: /{random_regex(rng, 2)}/" for term in terms]
    if rng.random() < 0.3:
        lines.insert(rng.randrange(len(lines)), rng.choice(odd))
    return "\n".join(lines)
