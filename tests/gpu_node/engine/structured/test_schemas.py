"""JSON schemas as tools write them: each is enforced, or refused by the unsupported keyword."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile.grammars import real_schemas

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.sampling import MAX_SCHEMA_CHARS
from penstock.gpu_node.engine import Engine, EngineConfig

NUM_ANSWERS = 12
SHORT = {"type": "string", "maxLength": 3}
YES_NO = {"enum": ["yes", "no"]}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def names_match(pattern: str) -> Callable[[Any], bool]:
    return lambda value: all(re.search(pattern, name) for name in value)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(
        EngineConfig(model=str(tiny_model), runner="native", dtype="bfloat16", weight_cache=False, num_kv_blocks=800)
    )


def answers_to(engine: Engine, schema: dict[str, Any], max_tokens: int = 120) -> list[Any]:
    """Return the complete ones of some random answers."""
    params = SamplingParams(
        structured_outputs={"json": schema}, temperature=1.0, max_tokens=max_tokens, n=NUM_ANSWERS, seed=1
    )
    (answer,) = engine.generate(["the gate"], params)
    assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    return [json.loads(choice.text) for choice in answer.choices if choice.finish_reason == "stop"]


def refusal_of(engine: Engine, schema: dict[str, Any] | str) -> str:
    with pytest.raises(RequestError) as caught:
        engine.prepare(SamplingParams(structured_outputs={"json": schema}))
    assert caught.value.param == "structured_outputs.json_schema"
    return caught.value.message


CAT = closed({"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}})
DOG = closed({"kind": {"const": "dog"}, "is_loud": {"type": "boolean"}}, required=["is_loud"])
PAIR = {"a": YES_NO, "b": YES_NO, "c": YES_NO}
ENFORCED: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "uniqueItems that is false": (
        {"items": YES_NO, "type": "array", "maxItems": 4, "uniqueItems": False},
        lambda value: {*value} <= {"yes", "no"},
    ),
    "uniqueItems of a single item": (
        {"type": "array", "items": SHORT, "maxItems": 1, "uniqueItems": True},
        lambda value: len(value) <= 1,
    ),
    "uniqueItems of listed values": (
        {"type": "array", "items": {"enum": [1, "1", True, None]}, "uniqueItems": True, "minItems": 2},
        lambda value: len(value) >= 2 and len({json.dumps(one) for one in value}) == len(value),
    ),
    "an unknown format": ({"type": "string", "format": "slug", "maxLength": 4}, lambda value: len(value) <= 4),
    "a known format": (
        {"type": "string", "format": "date"},
        lambda value: bool(re.fullmatch(r"\d{4}-\d\d-\d\d", value)),
    ),
    "names by a pattern": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[ab]{1,2}$"},
            "additionalProperties": YES_NO,
            "minProperties": 1,
            "maxProperties": 2,
        },
        names_match("^[ab]{1,2}$"),
    ),
    "listed names": (
        {"type": "object", "propertyNames": {"enum": ["x.y", "b"]}, "additionalProperties": YES_NO, "maxProperties": 2},
        names_match(r"^(x\.y|b)$"),
    ),
    "names by length": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": YES_NO, "maxProperties": 2},
        names_match("^.{0,2}$"),
    ),
    "names that exclude a property": (
        closed({"long": YES_NO, "ok": YES_NO}, propertyNames={"maxLength": 2}),
        lambda value: value.keys() <= {"ok"},
    ),
    "names without a limit": (closed({"a": YES_NO}, propertyNames={"type": "string"}), lambda value: True),
    "a property that requires others": (
        closed(PAIR, dependentRequired={"a": ["b", "c"]}),
        lambda value: "a" not in value or value.keys() >= {"b", "c"},
    ),
    "a property that requires a schema, in an old draft": (
        closed(PAIR, dependencies={"a": {"required": ["b"]}}) | {"$schema": "http://json-schema.org/draft-04/schema#"},
        lambda value: "a" not in value or "b" in value,
    ),
    "oneOf by required": (
        closed(PAIR, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        lambda value: ("a" in value) != ("b" in value),
    ),
    "oneOf by a tag that may be missing": (
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": {"Cat": CAT, "Dog": DOG}},
        lambda value: ("is_loud" in value) == (value.get("kind", "dog") == "dog" and "lives" not in value),
    ),
    "oneOf of values that overlap": (
        {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c", 1.0]}]},
        lambda value: value in ("a", "c", 1),
    ),
    "oneOf of nullable types": (
        {"oneOf": [{"type": ["boolean", "null"]}, {"type": ["null", "integer"], "minimum": 1, "maximum": 9}]},
        lambda value: value is not None,
    ),
    "not of required": (
        closed(PAIR, **{"not": {"required": ["a", "b"]}}),
        lambda value: not value.keys() >= {"a", "b"},
    ),
    "not of listed values": ({"enum": ["a", 1, True], "not": {"enum": [1.0]}}, lambda value: value in ("a", True)),
    "if of a listed value": (
        closed(
            PAIR,
            **{
                "if": {"properties": {"a": {"const": "yes"}}, "required": ["a"]},
                "then": {"required": ["b"]},
                "else": {"required": ["c"]},
            },
        ),
        lambda value: ("b" if value.get("a") == "yes" else "c") in value,
    ),
    "at least one of some properties": (
        {"type": "object", "properties": PAIR, "additionalProperties": YES_NO, "minProperties": 1},
        lambda value: len(value) >= 1,
    ),
    "a reference into an unknown keyword": (
        {"$ref": "#/components/schemas/T", "components": {"schemas": {"T": SHORT | {"format": "slug"}}}},
        lambda value: len(value) <= 3,
    ),
    "a keyword of a later draft": (
        closed(PAIR) | {"$schema": "http://json-schema.org/draft-04/schema#", "propertyNames": {"maxLength": 0}},
        lambda value: value.keys() <= PAIR.keys(),
    ),
    "a class with a bracket": (
        {"type": "string", "pattern": "^[[a&&b]{2}$"},
        lambda value: bool(re.fullmatch(r"[\[ab&]{2}", value)),
    ),
    "a class of nothing": ({"type": "string", "pattern": "^(b|[]a])$"}, lambda value: value == "b"),
    "a class of everything": ({"type": "string", "pattern": "^[^]{2}$"}, lambda value: len(value) == 2),
    "any character but line ends": (
        {"type": "string", "pattern": "^x.$", "enum": ["x\r", "x\u2028", "x\u2029", "xa"]},
        lambda value: value == "xa",
    ),
    "patterns that are equal once translated": (
        {
            "type": "object",
            "patternProperties": {"^[[]$": {"enum": ["a", "b"]}, "^[\\[]$": {"enum": ["b", "c"]}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        lambda value: value == {"[": "b"},
    ),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_a_schema_is_enforced(engine: Engine, name: str) -> None:
    schema, is_valid = ENFORCED[name]
    answers = answers_to(engine, schema)
    assert answers and all(map(is_valid, answers)), answers


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": (
        {"properties": {"tags": {"type": "array", "uniqueItems": True}}},
        "uniqueItems at #/properties/tags",
    ),
    "oneOf": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "branches 0 and 1"),
    "oneOf in one branch of values": ({"oneOf": [{"enum": ["a"]}, {"type": "string"}]}, "branches 0 and 1"),
    "not": ({"type": "string", "not": {"pattern": "a"}}, "keyword not at #"),
    "if": ({"if": {"pattern": "a"}, "then": {"maxLength": 1}}, "keyword if at #"),
    "contains": ({"type": "array", "contains": {"type": "null"}}, "keyword contains at #"),
    "propertyNames": ({"type": "object", "propertyNames": {"format": "uri"}}, "propertyNames at #: format"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties at #"),
    "$dynamicRef": ({"properties": {"a": {"$dynamicRef": "#x"}}}, "$dynamicRef at #/properties/a"),
    "another document": ({"$ref": "http://localhost/x"}, "leads out of the schema"),
    "library options": ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance at #"),
    "no type": ({"type": "text"}, "'text' is not a JSON type"),
    "no number": ({"type": "string", "minLength": "a"}, "minLength must be a non-negative integer"),
    "no value": (closed({}, required=["a"]), "no value can satisfy it"),
    "a flag": ({"type": "string", "pattern": "^(?is:a.)$"}, "the flag s in the pattern '^(?is:a.)$'"),
    "a type that is no text": ({"properties": {"a": {"type": None}}}, "type must be a string or array of strings"),
    "an enum that is no list": ({"enum": ["a"], "not": {"enum": 5}}, "not a JSON schema"),
    "a name that is no text": ({"not": {"required": [["a"]]}}, "not a JSON schema"),
    "an allOf that is no list": ({"allOf": 5, "if": {"required": ["a"]}, "then": {}}, "not a JSON schema"),
    "a wrong pattern": ({"type": "string", "pattern": "(a"}, "invalid regular expression: unclosed group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(engine: Engine, name: str) -> None:
    schema, reason = REFUSED[name]
    num_costly = engine.stats().grammar_costly_refusals
    assert reason in refusal_of(engine, schema)
    assert engine.stats().grammar_costly_refusals == num_costly


def test_many_optional_properties_are_enforced(engine: Engine) -> None:
    schema = closed({f"key{i}": YES_NO for i in range(1000)})
    for answer in answers_to(engine, schema):
        assert answer.keys() <= schema["properties"].keys() and set(answer.values()) <= {"yes", "no"}


def test_too_many_optional_properties_are_refused_with_the_limit(engine: Engine) -> None:
    message = refusal_of(engine, closed({f"key{i}": True for i in range(9000)}))
    assert "too costly" in message


def test_a_large_schema_is_enforced(engine: Engine) -> None:
    described = {f"p{i}": {"type": "boolean", "description": "d" * 1000} for i in range(200)}
    schema = closed(described, required=["p0"])
    assert 200_000 < len(json.dumps(schema)) < MAX_SCHEMA_CHARS
    assert all("p0" in answer for answer in answers_to(engine, schema))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: nothing", 'line 1, column 8: unknown name: "nothing"'),
        ('root ::= "a" b', "it is no grammar of llama.cpp's notation: Rule 'b' not found"),
        ('root ::= "a', "it is no grammar of llama.cpp's notation: Unexpected end of input at line 1"),
        ("start: /(a/", "line 1, column 8: invalid regular expression: unclosed group"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_place(engine: Engine, grammar: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.prepare(SamplingParams(structured_outputs={"grammar": grammar}))
    assert caught.value.param == "structured_outputs.grammar"
    assert reason in caught.value.message and "\n" not in caught.value.message


def test_a_wrong_expression_is_refused_without_a_grammar_that_the_caller_did_not_write(engine: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        engine.prepare(SamplingParams(structured_outputs={"regex": "(a"}))
    assert caught.value.message == (
        "structured_outputs.regex: cannot be enforced: invalid regular expression: unclosed group"
    )


@pytest.mark.skipif(not real_schemas(), reason="the package check-jsonschema is not installed")
def test_real_schemas_are_prepared_or_refused_by_a_named_error(engine: Engine) -> None:
    for schema in real_schemas()[::40]:
        try:
            engine.prepare(SamplingParams(structured_outputs={"json": schema}))
        except RequestError as error:
            assert "\n" not in error.message and "Traceback" not in error.message
