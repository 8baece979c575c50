"""Shapes of chats that some chat templates refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

ChatShape = Literal["system", "late_system", "users_in_row", "assistants_in_row"]
MESSAGE_OF_SHAPE: Mapping[ChatShape, str] = MappingProxyType(
    {"system": "system", "late_system": "system", "users_in_row": "user", "assistants_in_row": "assistant"}
)
"""The role of the messages that are merged or moved for a template that refuses this shape."""


def shapes_of(roles: Sequence[str]) -> frozenset[ChatShape]:
    """Return the shapes that a chat with messages of these roles has. `developer` counts as `system`."""
    found = set[ChatShape]()
    is_system = [role in ("system", "developer") for role in roles]
    if any(is_system):
        found.add("system")
    if any(is_system[1:]):
        found.add("late_system")
    doubled = {first for first, second in pairwise(roles) if first == second}
    if "user" in doubled:
        found.add("users_in_row")
    if "assistant" in doubled:
        found.add("assistants_in_row")
    return frozenset(found)
