"""Alternatives that exclude each other: `oneOf` as an `anyOf` of which no value satisfies two branches."""

from __future__ import annotations

import math
from typing import Any

from penstock.gpu_node.engine.structured.schema.document import UnenforceableError
from penstock.gpu_node.engine.structured.schema.facts import FactReader, Facts

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
