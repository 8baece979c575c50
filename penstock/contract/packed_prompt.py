"""A prompt that another process has already checked and packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PromptField = Literal["prompt", "tokens", "messages"]
"""The request field that holds the prompt."""


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """A prompt as msgpack bytes, ready to be copied into a request, plus the sizes that admission needs."""

    form: PromptField
    data: bytes = field(repr=False)
    num_text_bytes: int = 0
    """UTF-8 bytes of the prompt's texts and message roles."""
    num_tokens: int | None = None
    """Number of token ids of a `tokens` prompt; None for text."""
    num_tool_bytes: int = 0
    """Bytes of the names and arguments of earlier tool calls."""
