"""The values that do not satisfy a schema, for `not` and `if`, where other keywords can express them exactly."""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.engine.structured.schema.document import SchemaDocument
from penstock.gpu_node.engine.structured.schema.facts import FactReader, Facts, canonical, declared_types, listed_values

_ANNOTATIONS = frozenset(
    ("$comment", "title", "description", "default", "examples", "readOnly", "writeOnly", "deprecated")
)
_MAX_DEPTH = 6


class Negation:
    """Negates schemas of one document."""

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
