"""A JSON schema document: its draft, its local references, and how it is refused."""

from __future__ import annotations

from enum import IntEnum
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 120
"""Deepest nesting of a schema. llguidance's own JSON parser ends at 128 levels."""
MAX_WORK = 50_000
"""Schemas that one rewriting may look at. llguidance has the same limit for its own work."""
_SHOWN_CHARS = 200


class UnenforceableError(ValueError):
    """A constraint that cannot be enforced. The message names the keyword and its JSON pointer."""

    def __init__(self, keyword: str, path: str, reason: str) -> None:
        shown = path if len(path) <= _SHOWN_CHARS else f"{path[:_SHOWN_CHARS]}…"
        super().__init__(f"the keyword {keyword} at {shown}: {reason}")


class TooComplexError(ValueError):
    """A schema that takes too much work to rewrite."""


class Draft(IntEnum):
    """The drafts of JSON Schema that llguidance knows. Any other `$schema` counts as the latest."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019 = 2019
    DRAFT_2020 = 2020


_DRAFTS = {
    "http://json-schema.org/draft-04/schema": Draft.DRAFT_4,
    "http://json-schema.org/draft-06/schema": Draft.DRAFT_6,
    "http://json-schema.org/draft-07/schema": Draft.DRAFT_7,
    "https://json-schema.org/draft/2019-09/schema": Draft.DRAFT_2019,
}
_FIRST_DRAFT = {
    **dict.fromkeys(("const", "contains", "propertyNames"), Draft.DRAFT_6),
    **dict.fromkeys(("if", "then", "else"), Draft.DRAFT_7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), Draft.DRAFT_2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "prefixItems"), Draft.DRAFT_2019),
    **dict.fromkeys(("$recursiveRef", "$recursiveAnchor"), Draft.DRAFT_2019),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor"), Draft.DRAFT_2020),
}


class SchemaDocument:
    """A parsed schema with the work that was spent on it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.name = root.get("$schema")
        known = _DRAFTS.get(self.name.rstrip("#")) if isinstance(self.name, str) else None
        self.draft = Draft.DRAFT_2020 if known is None else known
        self._num_visits = 0

    def visit(self) -> None:
        """Count one look at a schema. Raises TooComplexError after too many."""
        self._num_visits += 1
        if self._num_visits > MAX_WORK:
            raise TooComplexError(f"the schema is too complex: it takes more than {MAX_WORK} steps to read")

    def is_known(self, keyword: str) -> bool:
        """Whether the document's draft has a keyword. It ignores keywords of later drafts."""
        return self.draft >= _FIRST_DRAFT.get(keyword, Draft.DRAFT_4)

    def resolve(self, reference: object) -> Any:
        """Return the schema that a JSON pointer within the document names; None if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self.root
        for part in reference[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found if reference == "#" or reference[1] == "/" else None
