"""Closing of objects: what a schema names stays valid, what it does not name is not, and compositions stay possible."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.tools import closed

NAMED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": {"type": "string"}}}


def is_valid(schema: Any, value: Any, root: Any = None) -> bool:
    """A small reference of JSON Schema for objects: properties, required, compositions and local references."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    named = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    if isinstance(value, dict):
        if not all(is_valid(named.get(name, others), one, root) for name, one in value.items()):
            return False
        if not all(name in value for name in schema.get("required", [])):
            return False
    if "type" in schema and not isinstance(value, {"object": dict, "string": str}[schema["type"]]):
        return False
    if "$ref" in schema and not is_valid(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root):
        return False
    return (
        all(is_valid(one, value, root) for one in schema.get("allOf", []))
        and ("anyOf" not in schema or any(is_valid(one, value, root) for one in schema["anyOf"]))
        and ("oneOf" not in schema or sum(is_valid(one, value, root) for one in schema["oneOf"]) == 1)
    )


@pytest.mark.parametrize(
    "schema",
    [
        NAMED,
        {"type": "object", "properties": {}},
        {"properties": {"a": {"type": "string"}}},
        {"type": ["object", "null"], "properties": {"a": {}}},
        {"anyOf": [NAMED, OTHER]},
        {"$defs": {"x": NAMED}, "$ref": "#/$defs/x"},
        {"allOf": [NAMED]},
        {"type": "array", "items": NAMED},
        {"type": "object", "properties": {"deep": NAMED, "list": {"items": {"items": OTHER}}}},
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: dict[str, Any]) -> None:
    given, result = copy.deepcopy(schema), closed(schema)
    assert schema == given

    def open_objects(one: Any) -> list[Any]:
        if isinstance(one, list):
            return [found for item in one for found in open_objects(item)]
        if not isinstance(one, dict):
            return []
        own = [one] if isinstance(one.get("properties"), dict) and one.get("additionalProperties") is not False else []
        return own + [found for item in one.values() for found in open_objects(item)]

    assert result != schema
    assert open_objects(result) == []
    assert closed(result) == result


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "string"}},
        NAMED | {"additionalProperties": True},
        NAMED | {"patternProperties": {"^x": {}}},
        NAMED | {"unevaluatedProperties": False},
        NAMED | {"required": ["a", "not named"]},
        NAMED | {"minProperties": 2},
        {"allOf": [NAMED, OTHER]},
        NAMED | {"anyOf": [OTHER, {"required": ["a"]}]},
        NAMED | {"if": OTHER, "then": {"properties": {"c": {}}}},
        {"if": OTHER},
        {"not": NAMED},
        {"$defs": {"x": NAMED, "y": OTHER}, "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
        {"$defs": {"x": NAMED}, "$ref": "#/$defs/x", "properties": {"b": {}}},
        {"enum": [{"properties": {"a": 1}}]},
        {"type": "object", "additionalProperties": {"type": "string"}, "default": {"properties": {}}},
    ],
)
def test_maps_and_compositions_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_composition_stays_open_and_what_is_inside_its_properties_is_closed() -> None:
    schema = {"allOf": [{"properties": {"in": NAMED}}, OTHER]}
    assert closed(schema) == {"allOf": [{"properties": {"in": NAMED | {"additionalProperties": False}}}, OTHER]}


def test_a_property_that_is_named_like_a_keyword_is_a_property() -> None:
    members: dict[str, dict[str, Any]] = {"properties": NAMED, "enum": OTHER}
    inside = closed({"type": "object", "properties": members})["properties"]
    assert inside == {one: value | {"additionalProperties": False} for one, value in members.items()}


NAMES = st.sampled_from("abc")
LEAVES = st.sampled_from([{"type": "string"}, {}, {"type": "object"}])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain = st.fixed_dictionaries(
        {"properties": st.dictionaries(NAMES, inner, max_size=3)},
        optional={"type": st.just("object"), "required": st.lists(NAMES, max_size=1)},
    )
    lists = st.lists(inner, min_size=1, max_size=2)
    composed = st.fixed_dictionaries(
        {}, optional={"allOf": lists, "anyOf": lists, "oneOf": lists, "properties": st.dictionaries(NAMES, inner)}
    )
    return plain | composed | st.just({"$ref": "#/$defs/x"})


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=8)
VALUES = st.recursive(st.just("s"), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)


def has_one_of(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and "oneOf" in value) or any(has_one_of(one) for one in inside)


@given(SCHEMAS, LEAVES | objects(LEAVES), VALUES)
def test_a_closed_schema_allows_nothing_that_the_given_one_forbids(schema: Any, target: Any, value: Any) -> None:
    if "$ref" in target or has_one_of([schema, target]):
        return  # A closed alternative of a oneOf may exclude what made two alternatives valid.
    root = schema | {"$defs": {"x": target}}
    if is_valid(closed(root), value):
        assert is_valid(root, value)
