"""Arrays whose items must differ."""

from __future__ import annotations

import itertools
from typing import Any

from penstock.gpu_node.engine.structured.schema.document import UnenforceableError
from penstock.gpu_node.engine.structured.schema.facts import ALL_TYPES, FactReader, declared_types, listed_values

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
