"""What a chat template shows of its model: the form of turns that it wants, and the forms that the model writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.tools import ReasoningParserName, ToolParserName
from penstock.gpu_node.engine.text.chat_template import ChatTemplate

_MARKS: tuple[tuple[str, ToolParserName], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("ipython", "llama3_json"),  # the role under which Llama 3's templates render what a tool gave
)
_OTHER_FORM = "<function="
"""Qwen's coders write calls between the same marks as XML, which no parser reads."""

TELLING_MARKS = frozenset({"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>"})
"""Where a tokenizer has these as special tokens, they stand in the text: without them nobody can read it."""


def tool_parser_of(template: ChatTemplate) -> ToolParserName:
    """By the marks that the template renders earlier calls with."""
    if not template.takes_tools or _OTHER_FORM in template.source:
        return "none"
    return next((name for mark, name in _MARKS if mark in template.source), "none")


def reasoning_parser_of(template: ChatTemplate) -> ReasoningParserName:
    """By what the template says of `<think>`, and whether it opens it where the assistant speaks."""
    if "<think>" not in template.source:
        return "none"
    try:
        is_open = template.render([{"role": "user", "content": "x"}]).rstrip().endswith("<think>")
    except Exception:
        # It may want turns of another kind, which it says by raising what it likes.
        is_open = False
    return "think_open" if is_open else "think"


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: OpenAI's form, with the arguments of calls as objects, and beside what a call
    gave the name of its function, which some of them want.
    """
    names = {call["id"]: call["name"] for message in messages for call in message.get("tool_calls", ())}
    return [_turn(message, names.get(message.get("tool_call_id"))) for message in messages]


def _turn(message: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    turn = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    if "tool_calls" in turn:
        turn["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in turn["tool_calls"]
        ]
    return turn if name is None else turn | {"name": name}
