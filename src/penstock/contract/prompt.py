"""A job's prompt in its three forms: text, token ids, or the messages of a chat; and packed, by another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from penstock.contract.errors import RequestError
from penstock.contract.fields import CheckedInput
from penstock.contract.sampling import Text, encodable
from penstock.contract.tools import MAX_CALLS, CallId, ToolCall

MAX_MESSAGES = 4096
MAX_PARTICIPANT_NAME_CHARS = 256
"""Characters of the `name` of a message."""
ParticipantName = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_PARTICIPANT_NAME_CHARS), AfterValidator(encodable)
]


class Message(CheckedInput):
    """One message of a chat. With role `tool`, it holds the result of the call `tool_call_id`.

    `name` is the participant's name, for chat templates that use it. `reasoning` is what the assistant thought before
    the content; a chat template that takes earlier reasoning gets it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text
    tool_calls: tuple[ToolCall, ...] = Field(default=(), max_length=MAX_CALLS)
    tool_call_id: CallId | None = None
    name: ParticipantName | None = None
    reasoning: Text = ""


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
    first_words: str = field(default="", repr=False)


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
