"""JSON schemas of the answers of chats and completions, for the OpenAPI document.

`producer/openai/render.py` renders these answers without pydantic.
"""

from __future__ import annotations

from typing import Any

from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _with_optional(schema: dict[str, Any], **properties: Any) -> dict[str, Any]:
    return {**schema, "properties": schema["properties"] | properties}


_CALL = object_of(id=TEXT, type={"const": "function"}, function=object_of(name=TEXT, arguments=TEXT))
_USAGE = object_of(
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    total_tokens=NUMBER,
    prompt_tokens_details=object_of(cached_tokens=NUMBER),
)
_MESSAGE = _with_optional(
    object_of(role={"const": "assistant"}, content=_or_null(TEXT)),
    tool_calls=list_of(_CALL),
    reasoning_content=TEXT,
    refusal={"type": "null"},
)
_DELTA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": TEXT,
        "reasoning_content": TEXT,
        # Only the first part of a call has its id, type and name.
        "tool_calls": list_of(
            _with_optional(
                object_of(index=NUMBER, function=_with_optional(object_of(arguments=TEXT), name=TEXT)),
                id=TEXT,
                type={"const": "function"},
            )
        ),
    },
}


def _choice(**said: Any) -> dict[str, Any]:
    reason = {"enum": ["stop", "length", "tool_calls", None]}
    whole = object_of(index=NUMBER, finish_reason=reason, logprobs=_or_null({"type": "object"}), **said)
    return _with_optional(whole, prompt_logprobs={"type": "array"}, warnings=list_of(TEXT))


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = object_of(id=TEXT, object={"const": kind}, created=NUMBER, model=TEXT, choices=list_of(choice))
    return _with_optional(head, usage=_or_null(_USAGE))


CHAT_DOC = RouteDoc(
    "Continue a chat.",
    _answer("chat.completion", _choice(message=_MESSAGE)),
    _answer("chat.completion.chunk", _choice(delta=_DELTA)),
)
COMPLETION_DOC = RouteDoc(
    "Continue one or several texts.",
    _answer("text_completion", _choice(text=TEXT)),
    _answer("text_completion", _choice(text=TEXT)),
)
