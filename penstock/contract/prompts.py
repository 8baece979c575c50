"""Lists of prompts, as `generate` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.errors import RequestError
from penstock.contract.job import Message
from penstock.contract.packed_prompt import PackedPrompt

_PARTS = (int, Mapping, Message)
"""What a prompt of token ids or a chat consists of."""


def prompts_of(prompts: Any) -> list[Any]:
    """Return prompts as a list. A single text, list of token ids or chat counts as a list of one.

    Raises RequestError for anything else than a sequence, and if prompts and parts of a prompt are mixed.
    """
    if isinstance(prompts, (str, PackedPrompt)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        message = "prompts must be a list; each prompt is a text, a list of token ids or a list of chat messages"
        raise RequestError(message, param="prompts")
    num_parts = sum(isinstance(prompt, _PARTS) for prompt in prompts)
    if num_parts not in (0, len(prompts)):
        raise RequestError("prompts mixes whole prompts with token ids or messages", param="prompts")
    return [prompts] if num_parts else list(prompts)
