"""What routes declare: their methods, and for those that take a body their description in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROBE_METHODS = ["GET", "HEAD"]
"""The methods of routes that a probe may ask. Some load balancers probe with HEAD."""
EXAMPLE_MODEL = "MODEL"
"""The model's name in the examples of bodies. `/docs` puts a shell variable in its place."""


def object_of(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with these properties, all of which are present."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an array."""
    return {"type": "array", "items": dict(items)}


TEXT = {"type": "string"}
NUMBER = {"type": "integer"}


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The description of one route."""

    summary: str = ""
    answer: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    """The JSON schema of the answer."""
    event: Mapping[str, Any] | None = None
    """The JSON schema of a streamed event; None for any object, and for a route without streams."""
    status: int = 200
    """The status of an answer without an error."""
    list_answer: Mapping[str, Any] | None = None
    """The JSON schema of the answer to a list of bodies; None: the route takes one body."""
    list_status: int = 207
    """The status of that answer if a body of the list was refused."""
    max_list_items: int = 1
    has_streams: bool = True
    """Whether the body's field `stream`, if it has one, makes the answer a stream."""
