"""A record and a function whose values come from short lists, so that a small model can produce them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Name = Literal["Oder", "Elbe", "Warta"]
LENGTHS_KM = {"Oder": 840, "Elbe": 1094, "Warta": 808}
ASK_LENGTH = "How long is the Oder?"
ASK_RIVER = "Name a river."


class River(BaseModel):
    """A river."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    is_navigable: bool


def length_of(name: Name) -> str:
    """Return the length of a river."""
    return f"{LENGTHS_KM[name]} km"


LENGTH_PARAMETERS = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": [*LENGTHS_KM]}},
    "required": ["name"],
    "additionalProperties": False,
}
LENGTH_TOOL = {
    "type": "function",
    "function": {"name": "length_of", "description": length_of.__doc__, "parameters": LENGTH_PARAMETERS},
}
