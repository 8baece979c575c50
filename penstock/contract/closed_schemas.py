"""Closing of objects in a JSON schema that a caller sends for tools or a response format.

JSON Schema allows properties that a schema does not name. Callers who describe a function's arguments mean exactly the
named ones, and a small model that may write others writes nothing else. So an object that names its properties is
closed, as OpenAI's strict mode demands it, unless the schema itself says what else the object may hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_LISTS = ("allOf", "anyOf", "oneOf")
_OWN = ("properties", "patternProperties", "additionalProperties")
_CONDITIONS = ("if", "then", "else", "not")
_OPEN_BESIDE = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies"),
        *_CONDITIONS,
    )
)
"""Keywords that say what else an object may hold. An object with one of them stays as it is."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))
"""Keywords with schemas by name."""
_VALUES = frozenset(("enum", "const", "default", "examples"))
"""Keywords with values, in which nothing is a schema."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` in each object that names its properties.

    Open stay: objects without properties (maps), objects that say what else they hold, and the parts of a composition,
    because each part would forbid the properties of the others. The alternatives of an `anyOf` or `oneOf` that stands
    alone are no such parts.
    """
    parts = _parts_of_compositions(schema)
    changed = {id(one): one | {"additionalProperties": False} for one in _schemas(schema) if _may_close(one, parts)}
    try:
        whole: dict[str, Any] = _replaced(schema, changed) if changed else schema
    except RecursionError:
        return schema  # It is refused later, by the limit of depth.
    return whole


def _may_close(one: dict[str, Any], parts: set[int]) -> bool:
    properties, kinds = one.get("properties"), one.get("type", "object")
    if id(one) in parts or not isinstance(properties, dict) or _OPEN_BESIDE & one.keys():
        return False
    required, least = one.get("required", []), one.get("minProperties", 0)
    is_possible = isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return is_possible and is_object and isinstance(least, int) and least <= len(properties)


def _parts_of_compositions(root: dict[str, Any]) -> set[int]:
    """Return the ids of the schemas that apply to the same object as another schema, references included."""
    parts: set[int] = set()
    for one in _schemas(root):
        groups = list(_applied_with(one, root))
        is_alone = len(groups) == 1 and not any(name in one for name in _OWN)
        if is_alone and (groups[0][0] in ("anyOf", "oneOf", "$ref") or len(groups[0][1]) == 1):
            continue
        waiting = [member for _, members in groups for member in members]
        while waiting:
            member = waiting.pop()
            if id(member) not in parts:
                parts.add(id(member))
                waiting += [part for _, members in _applied_with(member, root) for part in members]
    return parts


def _applied_with(one: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the schemas that apply to the same value as this one, by keyword."""
    for keyword in _LISTS:
        if isinstance(one.get(keyword), list):
            yield keyword, [member for member in one[keyword] if isinstance(member, dict)]
    conditions = [one[name] for name in _CONDITIONS if isinstance(one.get(name), dict)]
    if conditions:
        # A condition alone is a composition too: closed, it would hold in other cases.
        yield "if", [*conditions, {}]
    dependent = one.get("dependentSchemas", one.get("dependencies"))
    if isinstance(dependent, dict):
        yield "dependentSchemas", [*(member for member in dependent.values() if isinstance(member, dict)), {}]
    target = _resolved(one.get("$ref"), root)
    if target is not None:
        yield "$ref", [target]


def _resolved(reference: object, root: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        found = found.get(unquote(part).replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every schema of the document. The walk needs no stack of calls."""
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            for name, one in value.items():
                if name in _MAPS and isinstance(one, dict):
                    waiting += one.values()
                elif name not in _VALUES:
                    waiting.append(one)
        elif isinstance(value, list):
            waiting += value


def _replaced(value: Any, changed: dict[int, dict[str, Any]]) -> Any:
    if isinstance(value, dict):
        own, result = changed.get(id(value), value), {}
        for name, one in own.items():
            if name in _MAPS and isinstance(one, dict):
                result[name] = {key: _replaced(member, changed) for key, member in one.items()}
            else:
                result[name] = one if name in _VALUES else _replaced(one, changed)
        return result
    return [_replaced(one, changed) for one in value] if isinstance(value, list) else value
