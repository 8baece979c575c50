"""What is known about the values that schemas allow: enough to prove that no value satisfies two of them.

Facts may leave out constraints. They then describe more values than the schemas allow, and every proof still holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gpu_node.engine.structured.schema.document import Draft, SchemaDocument

ALL_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_NUMERIC = frozenset(("integer", "number"))
_MAX_DEPTH = 6
"""Deepest nesting of references and alternatives that facts look into."""
_PROPERTY_DEPTH = 3
_LISTED_TYPES: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
_Range = tuple[float, float]
_ANY: _Range = (-math.inf, math.inf)
_BOUNDS = {
    "minLength": ("string", 0),
    "maxLength": ("string", 1),
    "minItems": ("array", 0),
    "maxItems": ("array", 1),
    "minimum": ("number", 0),
    "maximum": ("number", 1),
}


@dataclass(slots=True)
class Facts:
    """Facts about the values that satisfy all of some schemas."""

    types: frozenset[str] = ALL_TYPES
    values: dict[str, Any] | None = None
    """All values by their canonical text, if the schemas list them."""
    required: set[str] = field(default_factory=set)
    # Of one request.
    properties: dict[str, list[Any]] = field(default_factory=dict)
    """The schemas that apply to a property."""
    names: frozenset[str] | None = None
    """The only names that properties may have, if the schemas list them."""
    # Of one request.
    ranges: dict[str, _Range] = field(default_factory=dict)
    """Bounds of a string's characters, an array's items, or a number."""


def canonical(value: Any) -> str:
    """Return one text for all values that are equal as JSON: 1 equals 1.0, but not true."""
    return json.dumps(_with_whole_numbers(value), sort_keys=True)


def types_of(value: Any) -> frozenset[str]:
    """Return the types that a value may count as. A whole number counts as both kinds of number."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return _NUMERIC
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset((names[type(value)],))


def declared_types(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema's own `type` allows."""
    given = schema.get("type")
    if not isinstance(given, str | list):
        return ALL_TYPES  # llguidance refuses any other value.
    names = frozenset(name for name in ([given] if isinstance(given, str) else given) if isinstance(name, str))
    return names | {"integer"} if "number" in names else names


def listed_values(facts: Facts) -> dict[str, Any] | None:
    """Return all values by their canonical text, if the schemas list them or allow only null and booleans."""
    if facts.values is None and facts.types <= _LISTED_TYPES.keys():
        return {canonical(value): value for kind in sorted(facts.types) for value in _LISTED_TYPES[kind]}
    return facts.values


class FactReader:
    """Reads facts from the schemas of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document

    def of(self, *schemas: Any, depth: int = _MAX_DEPTH) -> Facts:
        """Return facts about the values that satisfy all of the schemas."""
        facts = Facts()
        for schema in schemas:
            self._add(facts, schema, depth)
        return facts

    def are_disjoint(self, one: Facts, other: Facts, depth: int = _PROPERTY_DEPTH) -> bool:
        """Whether certainly no value satisfies both."""
        for some, rest in ((one, other), (other, one)):
            if some.values is not None:
                return all(self.is_refused(value, rest, depth) for value in some.values.values())
        return all(self.are_disjoint_as(kind, one, other, depth) for kind in one.types & other.types)

    def are_disjoint_as(self, kind: str, one: Facts, other: Facts, depth: int = _PROPERTY_DEPTH) -> bool:
        """Whether certainly no value of one type satisfies both."""
        if kind == "object":
            return any(self.has_no_value(name, one, other, depth) for name in one.required | other.required)
        name = "number" if kind in _NUMERIC else kind
        (low, high), (other_low, other_high) = one.ranges.get(name, _ANY), other.ranges.get(name, _ANY)
        return max(low, other_low) > min(high, other_high)

    def has_no_value(self, name: str, one: Facts, other: Facts, depth: int = _PROPERTY_DEPTH) -> bool:
        """Whether certainly no object that satisfies both has this property."""
        if not depth:
            return False
        if any(facts.names is not None and name not in facts.names for facts in (one, other)):
            return True
        own, its = (self.of(*facts.properties.get(name, ())) for facts in (one, other))
        return self.are_disjoint(own, its, depth - 1)

    def is_refused(self, value: Any, facts: Facts, depth: int = _PROPERTY_DEPTH) -> bool:
        """Whether a value certainly does not satisfy."""
        kinds = types_of(value)
        if not kinds & facts.types:
            return True
        if facts.values is not None and canonical(value) not in facts.values:
            return True
        if isinstance(value, dict):
            return depth > 0 and self._is_object_refused(value, facts, depth)
        kind = "number" if kinds <= _NUMERIC else next(iter(kinds))
        size = value if kinds == _NUMERIC else len(value) if isinstance(value, str | list) else 0
        low, high = facts.ranges.get(kind, _ANY)
        return not low <= size <= high

    def _is_object_refused(self, value: dict[str, Any], facts: Facts, depth: int) -> bool:
        if facts.required - value.keys() or (facts.names is not None and value.keys() - facts.names):
            return True
        known = [(one, facts.properties[name]) for name, one in value.items() if name in facts.properties]
        return any(self.is_refused(one, self.of(*schemas), depth - 1) for one, schemas in known)

    def _add(self, facts: Facts, schema: Any, depth: int) -> None:
        self._document.visit()
        if schema is False:
            facts.types = frozenset()
        if not isinstance(schema, dict) or depth <= 0:
            return
        if schema.get("$schema", self._document.name) != self._document.name:
            return  # Another draft applies.
        if "$ref" in schema:
            self._add(facts, self._document.resolve(schema["$ref"]), depth - 1)
            if self._document.draft <= Draft.DRAFT_7:
                return  # These drafts ignore the keywords beside a reference.
        facts.types &= declared_types(schema)
        self._add_values(facts, schema)
        self._add_object(facts, schema)
        self._add_bounds(facts, schema)
        self._add_parts(facts, schema, depth - 1)

    def _add_parts(self, facts: Facts, schema: dict[str, Any], depth: int) -> None:
        for part in _list(schema.get("allOf")):
            self._add(facts, part, depth)
        for keyword in ("anyOf", "oneOf"):
            if parts := _list(schema.get(keyword)):
                facts.types &= frozenset().union(*(self.of(part, depth=depth).types for part in parts))

    def _add_values(self, facts: Facts, schema: dict[str, Any]) -> None:
        for keyword in ("enum", "const"):
            if keyword not in schema or not self._document.is_known(keyword):
                continue
            values = [schema[keyword]] if keyword == "const" else _list(schema[keyword])
            known = {canonical(value): value for value in values}
            if facts.values is not None:
                known = {text: value for text, value in known.items() if text in facts.values}
            facts.values = known
            facts.types &= frozenset().union(*map(types_of, known.values()))

    def _add_object(self, facts: Facts, schema: dict[str, Any]) -> None:
        facts.required.update(name for name in _list(schema.get("required")) if isinstance(name, str))
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        for name, own in properties.items():
            facts.properties.setdefault(name, []).append(own)
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            names = frozenset(name for name, own in properties.items() if own is not False)
            facts.names = names if facts.names is None else facts.names & names

    def _add_bounds(self, facts: Facts, schema: dict[str, Any]) -> None:
        for keyword, (kind, side) in _BOUNDS.items():
            bound = schema.get(keyword)
            if isinstance(bound, int | float) and not isinstance(bound, bool):
                low, high = facts.ranges.get(kind, _ANY)
                facts.ranges[kind] = (low, min(high, bound)) if side else (max(low, bound), high)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    return {name: _with_whole_numbers(one) for name, one in value.items()} if isinstance(value, dict) else value


_ANNOTATIONS = frozenset(
    ("$comment", "title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated")
)


class Negation:
    """Negates schemas of one document, for `not` and `if`, where other keywords express the same values exactly."""

    def __init__(self, document: SchemaDocument, reader: FactReader) -> None:
        self._document = document
        self._reader = reader

    def of(self, schema: Any, base: Facts, depth: int = _MAX_DEPTH) -> list[Any] | None:
        """Return alternatives: a value of `base` satisfies one of them exactly if it does not satisfy the schema.

        None if they cannot be expressed.
        """
        self._document.visit()
        if isinstance(schema, bool):
            return [] if schema else [True]
        if not isinstance(schema, dict) or not depth:
            return None
        found: list[Any] = []
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS:
                continue
            parts = self._of_keyword(keyword, value, schema, base, depth - 1)
            if parts is None:
                return None
            found += parts
        return found

    def _of_keyword(
        self, keyword: str, value: Any, schema: dict[str, Any], base: Facts, depth: int
    ) -> list[Any] | None:
        if keyword == "type":
            return _other_types(declared_types(schema), base)
        if keyword in ("enum", "const") and self._document.is_known(keyword):
            return _other_values(value if keyword == "enum" else [value], base)
        if keyword == "required" and isinstance(value, list):
            return [{"type": "object", "properties": {name: False}} for name in value]
        if keyword == "properties" and isinstance(value, dict):
            return self._other_properties(value, base, depth)
        if keyword == "$ref" and len(schema) == 1:
            return self.of(self._document.resolve(value), base, depth)
        if keyword == "allOf" and isinstance(value, list):
            parts = [self.of(part, base, depth) for part in value]
            return None if None in parts else [one for part in parts for one in part or ()]
        if keyword == "anyOf" and isinstance(value, list):
            parts = [self.of(part, base, depth) for part in value]
            return None if None in parts else [{"allOf": [{"anyOf": part} if part else False for part in parts]}]
        return None

    def _other_properties(self, properties: dict[str, Any], base: Facts, depth: int) -> list[Any] | None:
        found: list[Any] = []
        for name, own in properties.items():
            others = self.of(own, self._reader.of(*base.properties.get(name, ())), depth)
            if others is None:
                return None
            found += [{"type": "object", "required": [name], "properties": {name: one}} for one in others]
        return found


def _other_types(types: frozenset[str], base: Facts) -> list[Any] | None:
    if "integer" in types and "number" not in types and "number" in base.types:
        return None  # No keyword stands for numbers that are not whole.
    rest = base.types - types
    return [{"type": sorted(rest)}] if rest else []


def _other_values(values: list[Any], base: Facts) -> list[Any] | None:
    known = listed_values(base)
    if known is None:
        return None
    excluded = set(map(canonical, values))
    kept = [value for text, value in known.items() if text not in excluded]
    return [{"enum": kept}] if kept else []
