"""What a chat template shows of its model: the messages that it accepts, and the formats that the model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.contract.errors import RequestError, TooCostlyError
from penstock.contract.tools import THINKING_VARIABLES, ReasoningParserName, ToolParserName, thinking_setting
from penstock.gpu_node.engine.text.chat_template import NO_VARIABLES, ChatTemplate

_MARKS: tuple[tuple[str, ToolParserName], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("ipython", "llama3_json"),  # The role under which Llama 3's templates render a tool's result.
)
_UNSUPPORTED_FORMAT = "<function="
"""Qwen's coder models write calls as XML between hermes' marks. No parser reads these."""

TELLING_MARKS = frozenset({"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"})
"""Marks that stay in the output text even if the tokenizer has them as special tokens, since the parsers need them."""


def tool_parser_of(template: ChatTemplate) -> ToolParserName:
    """Return the parser of the model's tool calls, by the marks with which the template renders earlier calls."""
    if not template.takes_tools or _UNSUPPORTED_FORMAT in template.source:
        return "none"
    return next((name for mark, name in _MARKS if mark in template.source), "none")


def reasoning_parser_of(template: ChatTemplate) -> ReasoningParserName:
    """Return the reasoning parser, by the template's use of `<think>` and whether it opens it for the assistant."""
    if "<think>" not in template.source:
        return "none"
    with suppress(TooCostlyError):
        return "think_open" if _opens_reasoning(template, NO_VARIABLES) else "think"
    return "think"


def thinking_switches_of(template: ChatTemplate) -> tuple[str, ...]:
    """Return the settings of thinking variables with which the template does not do what it does without them.

    Without them, it opens the reasoning for the assistant or leaves it closed.
    """
    if "<think>" not in template.source:
        return ()
    try:
        is_open = _opens_reasoning(template, NO_VARIABLES)
        return tuple(
            thinking_setting(name, value)
            for name in THINKING_VARIABLES
            for value in (False, True)
            if _opens_reasoning(template, {name: value}) != is_open
        )
    except TooCostlyError:
        return ()


def _opens_reasoning(template: ChatTemplate, variables: Mapping[str, bool]) -> bool:
    try:
        return template.render([{"role": "user", "content": "x"}], None, variables).rstrip().endswith("<think>")
    except TooCostlyError:
        raise  # It would take as long again with other variables.
    except RequestError:
        # The template may not accept this message.
        return False


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the format of chat templates: OpenAI's, with call arguments as objects.

    A tool result also gets the name of its function, which some templates need.
    """
    names = {call["id"]: call["name"] for message in messages for call in message.get("tool_calls", ())}
    return [_template_message(message, names.get(message.get("tool_call_id"))) for message in messages]


def _template_message(message: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    rendered = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    if "tool_calls" in rendered:
        rendered["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in rendered["tool_calls"]
        ]
    return rendered if name is None else rendered | {"name": name}
