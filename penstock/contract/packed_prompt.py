"""A prompt that another process has checked and packed already."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PromptField = Literal["prompt", "tokens", "messages"]
"""The field of a request that holds the prompt."""


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """A prompt as a request on the queue carries it: msgpack, and the sizes that admission needs."""

    form: PromptField
    data: bytes = field(repr=False)
    num_text_bytes: int = 0
    """UTF-8 bytes of its texts and roles."""
    num_tokens: int | None = None
    """Token ids, for a prompt that consists of them."""
    num_tool_bytes: int = 0
    """Bytes of the names and arguments of earlier calls."""
