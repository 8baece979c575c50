"""The rewriting of a whole schema: a walk that treats each keyword by its rule.

Rules keep what is valid: an answer that satisfies the result satisfies the given schema. They read the given schema
only, because a rewritten part may allow less than the given one.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.gpu_node.engine.structured.schema.document import MAX_DEPTH, SchemaDocument, UnenforceableError
from penstock.gpu_node.engine.structured.schema.facts import (
    ALL_TYPES,
    FactReader,
    Facts,
    Negation,
    declared_types,
    listed_values,
)
from penstock.gpu_node.engine.structured.schema.formats import ENFORCED_FORMATS, PATTERNS
from penstock.gpu_node.engine.structured.schema.look_ahead import without_look_ahead
from penstock.gpu_node.engine.structured.schema.numbers import (
    check_listed,
    check_steps,
    with_held_numbers,
    with_held_sizes,
)
from penstock.gpu_node.engine.structured.schema.objects import rust_pattern, rust_patterns, with_names, without_size

MAX_DISTINCT_VALUES = 4
"""Most values that the items of an array with `uniqueItems` may have. Every order of every choice is an alternative."""


def distinct_items(reader: FactReader, given: dict[str, Any], path: str) -> list[Any]:
    """Return what must hold for `uniqueItems: true` besides the other keywords of an array's schema.

    Raises UnenforceableError for items of many possible values, because a grammar does not remember earlier items.
    """
    low, high = given.get("minItems", 0), given.get("maxItems")
    if isinstance(high, int) and high <= 1:
        return []
    values = None if "prefixItems" in given else listed_values(reader.of(given.get("items")))
    if values is None or len(values) > MAX_DISTINCT_VALUES or not isinstance(low, int):
        reason = f"items can be kept distinct only if a schema lists at most {MAX_DISTINCT_VALUES} values for them"
        raise UnenforceableError("uniqueItems", path, reason)
    top = min(len(values), high) if isinstance(high, int) else len(values)
    arrays = [order for size in range(max(0, low), top + 1) for order in itertools.permutations(values.values(), size)]
    others = sorted(declared_types(given) & (ALL_TYPES - {"array"}))
    return [{"anyOf": [*map(_exactly, arrays), *([{"type": others}] if others else [])]}]


def _exactly(items: tuple[Any, ...]) -> dict[str, Any]:
    size = {"type": "array", "minItems": len(items), "maxItems": len(items)}
    # llguidance takes this form in all drafts, and `const` in later ones only.
    return {**size, "items": [{"enum": [value]} for value in items], "additionalItems": False} if items else size


MAX_ALTERNATIVES = 256
"""Most combinations of alternatives that one branch may become."""
_SINGLE_VALUED = frozenset(("null", "boolean"))
"""Types that may be left out of a branch as a whole, because the other branch has all of their values."""


def exclusive_branches(reader: FactReader, base: dict[str, Any], path: str) -> list[list[list[dict[str, Any]]]]:
    """Return for each branch of `base`'s `oneOf` what must hold besides, so that no other branch is satisfied.

    That is a list of lists of alternatives. Raises UnenforceableError for two branches that cannot be told apart.
    """
    others = {keyword: value for keyword, value in base.items() if keyword != "oneOf"}
    facts = [reader.of(others, branch) for branch in base["oneOf"]]
    found: list[list[list[dict[str, Any]]]] = [[] for _ in facts]
    for i, one in enumerate(facts):
        for j, other in enumerate(facts):
            if i == j or reader.are_disjoint(one, other):
                continue
            alternatives = _exclusions(reader, one, other)
            if not alternatives:
                low, high = sorted((i, j))
                reason = f"its branches {low} and {high} may match the same value, so they need anyOf"
                raise UnenforceableError("oneOf", path, reason)
            if alternatives not in found[i]:
                found[i].append(alternatives)
        if math.prod(map(len, found[i])) > MAX_ALTERNATIVES:
            raise UnenforceableError("oneOf", path, "its branches differ in too many ways to tell them apart")
    return found


def _exclusions(reader: FactReader, one: Facts, other: Facts) -> list[dict[str, Any]]:
    """Return alternatives that restrict `one` to values which do not satisfy `other`; none if that is impossible."""
    if one.values is not None:
        kept = [value for value in one.values.values() if reader.is_refused(value, other)]
        return [{"enum": kept}] if kept else []
    shared = {kind for kind in one.types & other.types if not reader.are_disjoint_as(kind, one, other)}
    scalars = shared - {"object"}
    if not scalars <= _SINGLE_VALUED or (other.values is not None and scalars):
        return []
    rest = sorted(one.types - scalars)
    limit: dict[str, Any] = {"type": rest} if scalars else {}
    if "object" not in shared:
        return [limit] if rest else []
    ways: list[dict[str, Any]] = [{"properties": {name: False}} for name in sorted(other.required - one.required)]
    ways += [
        {"required": [name]}
        for name in one.properties
        if name not in one.required and reader.has_no_value(name, one, other)
    ]
    return [limit | way for way in ways]


OPTIONS_KEYWORD = "x-guidance"
"""llguidance's own options inside a schema. They could switch the enforcement off."""
_MAPS = frozenset(("properties", "definitions", "$defs"))
_LISTS = frozenset(("allOf", "anyOf", "prefixItems"))
_SINGLE = frozenset(("additionalProperties", "additionalItems"))
_OF_ARRAYS = frozenset(("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"))
_OF_OBJECTS = frozenset(
    ("propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties")
)


class _Target(NamedTuple):
    """A schema that is being rewritten: the given one, its result so far, and what must hold besides."""

    given: dict[str, Any]
    result: dict[str, Any]
    besides: list[Any]
    path: str
    depth: int


_Rule = Callable[["_Rewriter", _Target, str, Any], None]


def rewritten(text: str) -> str:
    """Return the text of a schema that llguidance enforces.

    Raises UnenforceableError for a constraint that cannot be enforced, ValueError for text that is no schema.
    """
    try:
        root = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(root, dict):
        return text
    if OPTIONS_KEYWORD in root:
        raise UnenforceableError(OPTIONS_KEYWORD, "#", "it is not supported; remove it")
    try:
        result = _Rewriter(SchemaDocument(root)).schema(root, "#", 0)
        check_steps(result)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except (TypeError, AttributeError):
        raise ValueError("it is not a JSON schema: the value of a keyword has the wrong type") from None
    try:
        return json.dumps(result, allow_nan=False)
    except ValueError:
        raise ValueError("a number of the schema is too large for a double") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


class _Rewriter:
    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self.reader = FactReader(document)
        self.negation = Negation(document, self.reader)
        self._targets = {id(target) for target in _referenced(document)}
        """Schemas that references name. They may stand at any place of the document."""

    def schema(self, given: Any, path: str, depth: int) -> Any:
        """Return a schema rewritten."""
        self.document.visit()
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested more deeply than {MAX_DEPTH} levels")
        if not isinstance(given, dict):
            return given
        types = declared_types(given)
        given, besides = with_held_numbers(with_held_sizes(given), path)
        if "object" in types:
            if "propertyNames" in given and self.document.is_known("propertyNames"):
                given = with_names(self.document, given, path)
            given, of_size = without_size(given)
            besides = [*besides, *of_size]
        place = _Target(given, {}, besides, path, depth + 1)
        for keyword, value in given.items():
            if (keyword in _OF_ARRAYS and "array" not in types) or (keyword in _OF_OBJECTS and "object" not in types):
                continue  # It has no effect on values of other types.
            rule = _RULES.get(keyword) if self.document.is_known(keyword) else None
            if rule is not None:
                rule(self, place, keyword, value)
            else:
                place.result[keyword] = self._part(keyword, value, f"{path}/{keyword}", depth + 1)
        if place.besides:
            place.result["allOf"] = [*place.result.get("allOf", ()), *place.besides]
        return place.result

    def all_of(self, given: Any, path: str, depth: int) -> Any:
        """Return a list of schemas rewritten."""
        if not isinstance(given, list):
            return given
        return [self.schema(one, f"{path}/{i}", depth) for i, one in enumerate(given)]

    def by_name(self, given: Any, path: str, depth: int) -> Any:
        """Return schemas by name rewritten."""
        if not isinstance(given, dict):
            return given
        return {name: self.schema(one, f"{path}/{name}", depth) for name, one in given.items()}

    def _part(self, keyword: str, value: Any, path: str, depth: int) -> Any:
        if keyword in _MAPS:
            return self.by_name(value, path, depth)
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            return self.all_of(value, path, depth)
        if keyword in _SINGLE or keyword == "items":
            return self.schema(value, path, depth)
        if keyword in ("enum", "const"):
            return value  # In a draft without the keyword.
        return self._foreign(value, path, depth) if self._targets else value

    def _foreign(self, value: Any, path: str, depth: int) -> Any:
        """Return the value of an unknown keyword, with the schemas in it that references name rewritten."""
        if depth > MAX_DEPTH:
            return value
        if isinstance(value, dict):
            if id(value) in self._targets:
                return self.schema(value, path, depth)
            return {name: self._foreign(one, f"{path}/{name}", depth + 1) for name, one in value.items()}
        return [self._foreign(one, path, depth + 1) for one in value] if isinstance(value, list) else value


def _referenced(document: SchemaDocument) -> list[Any]:
    """Return the targets of all local references."""
    found, waiting = list[Any](), list[Any]([document.root])
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if (target := document.resolve(value.get("$ref"))) is not None:
                found.append(target)
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


def _format(_: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    if not isinstance(value, str) or value in ENFORCED_FORMATS:
        place.result[keyword] = value
        if isinstance(value, str) and value in PATTERNS:
            # A `pattern` of the same schema stays what it is. Both must match.
            place.besides.append({"pattern": PATTERNS[value]})


def _listed(_: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    place.result[keyword] = check_listed(keyword, value, f"{place.path}/{keyword}")


def _pattern(_: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    if isinstance(value, str):
        value, besides = without_look_ahead(value)
        value = rust_pattern(value)
        place.besides.extend({keyword: rust_pattern(one)} for one in besides)
    place.result[keyword] = value


def _pattern_properties(rewriter: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    place.result[keyword] = rust_patterns(rewriter.by_name(value, f"{place.path}/{keyword}", place.depth))


def _refuse(_: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    raise UnenforceableError(keyword, place.path, "it cannot be enforced")


def _drop(_: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    """Leave out a keyword that has no effect of its own."""


def _unevaluated(_: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    if value is not True and value != {}:
        raise UnenforceableError(keyword, place.path, "it cannot be enforced")


def _unique(rewriter: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    if value is True:
        place.besides.extend(distinct_items(rewriter.reader, place.given, place.path))
    elif value is not False:
        place.result[keyword] = value


def _one_of(rewriter: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        place.result[keyword] = value
        return
    branches = rewriter.all_of(value, f"{place.path}/oneOf", place.depth)
    limits = exclusive_branches(rewriter.reader, place.given, place.path)
    exclusive = [
        {"allOf": [branch, *({"anyOf": ways} if len(ways) > 1 else ways[0] for ways in limit)]} if limit else branch
        for branch, limit in zip(branches, limits, strict=True)
    ]
    if "anyOf" in place.given:
        place.besides.append({"anyOf": exclusive})
    else:
        place.result["anyOf"] = exclusive


def _not(rewriter: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    others = {name: one for name, one in place.given.items() if name != "not"}
    ways = rewriter.negation.of(value, rewriter.reader.of(others))
    if ways is None:
        reason = "only a not of type, required and properties, or of listed values, can be enforced"
        raise UnenforceableError(keyword, place.path, reason)
    place.besides.append({"anyOf": ways} if ways else False)


def _if(rewriter: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    given = place.given
    if "then" in given:
        others = {name: one for name, one in given.items() if name not in ("if", "then", "else")}
        ways = rewriter.negation.of(value, rewriter.reader.of(others))
        if ways is None:
            reason = "only a condition on type, required and properties with listed values can be enforced"
            raise UnenforceableError(keyword, place.path, reason)
        then = rewriter.schema(given["then"], f"{place.path}/then", place.depth)
        place.besides.append({"anyOf": [*ways, then]})
    if "else" in given:
        condition = rewriter.schema(value, f"{place.path}/if", place.depth)
        place.besides.append({"anyOf": [condition, rewriter.schema(given["else"], f"{place.path}/else", place.depth)]})


def _dependencies(rewriter: _Rewriter, place: _Target, keyword: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise UnenforceableError(keyword, place.path, "it must be an object")
    required = place.given.get("required")
    for name, needed in value.items():
        at = f"{place.path}/{keyword}/{name}"
        then = {"required": needed} if isinstance(needed, list) else rewriter.schema(needed, at, place.depth)
        if isinstance(required, list) and name in required:
            place.besides.append(then)
        else:
            place.besides.append({"anyOf": [{"properties": {name: False}}, then]})


_RULES: dict[str, _Rule] = {
    "enum": _listed,
    "const": _listed,
    "default": _drop,
    "examples": _drop,
    "format": _format,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "then": _drop,
    "else": _drop,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "contains": _refuse,
    "minContains": _drop,
    "maxContains": _drop,
    "unevaluatedItems": _unevaluated,
    "unevaluatedProperties": _unevaluated,
    "$dynamicRef": _refuse,
    "$recursiveRef": _refuse,
    "$dynamicAnchor": _drop,
    "$recursiveAnchor": _drop,
}
