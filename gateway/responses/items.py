"""Input items of a response: their schemas, and their translation into the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from penstock.contract.job import MAX_MESSAGES
from penstock.contract.problems import problem_of
from penstock.contract.tools import MAX_CALLS_OF_CHAT, Arguments, CallId, FunctionName

MAX_ITEM_ID_CHARS = 256
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the member that holds it."""

ItemId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ITEM_ID_CHARS)]


def _text_of(content: object) -> object:
    """Return the text of a content that is text or a list of text parts. Unknown members of a part are ignored."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        member = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if member is None:
            message = "content parts of type {kind} are not supported; only text parts are"
            raise PydanticCustomError("unsupported_value", message, {"kind": repr(kind)[:64]})
        if not isinstance(part.get(member), str):
            raise PydanticCustomError("part_text", "the {member} of a part must be a string", {"member": member})
        texts.append(part[member])
    return "".join(texts)


_Content = Annotated[str, BeforeValidator(_text_of)]


class _Item(BaseModel):
    """Base of input items. Unknown members are ignored, because clients send answers back with members of their own."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: ItemId | None = None


class _MessageItem(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content

    def stored(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": self.content}
        if self.role == "assistant":
            part |= {"annotations": [], "logprobs": []}
        return {"type": "message", "role": self.role, "status": "completed", "content": [part]}


class _CallItem(_Item):
    call_id: CallId
    name: FunctionName
    arguments: Annotated[Arguments, BeforeValidator(lambda text: text or "{}")]

    def stored(self) -> dict[str, Any]:
        members = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": "function_call", "status": "completed", **members}


class _CallOutputItem(_Item):
    call_id: CallId
    output: _Content

    def stored(self) -> dict[str, Any]:
        return {"type": "function_call_output", "status": "completed", "call_id": self.call_id, "output": self.output}


class _ReasoningItem(_Item):
    """An earlier reasoning. It is stored but not passed to the model, which does not need it."""

    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    def stored(self) -> dict[str, Any]:
        return {"type": "reasoning", **self.model_dump(exclude={"id"}, exclude_none=True)}


class _ReferenceItem(_Item):
    """A reference to an item of the output of a stored response."""

    id: ItemId

    def stored(self) -> dict[str, Any]:
        return {"type": "item_reference"}


AnyItem = _MessageItem | _CallItem | _CallOutputItem | _ReasoningItem | _ReferenceItem
_KINDS: dict[str, type[AnyItem]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _CallOutputItem,
    "reasoning": _ReasoningItem,
    "item_reference": _ReferenceItem,
}


def items_of(value: object) -> list[AnyItem]:
    """Check the value of `input`: a text, which is a message of the user, or a list of items."""
    if isinstance(value, str):
        return [_MessageItem(role="user", content=value)]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        message = "must be a string or a list of 1 to {max} items"
        raise PydanticCustomError("input_type", message, {"max": MAX_MESSAGES})
    items = [_item_of(item, index) for index, item in enumerate(value)]
    if sum(isinstance(item, _CallItem) for item in items) > MAX_CALLS_OF_CHAT:
        raise PydanticCustomError("too_many", "must have at most {limit} calls", {"limit": MAX_CALLS_OF_CHAT})
    return items


def _item_of(value: object, index: int) -> AnyItem:
    if not isinstance(value, dict):
        raise PydanticCustomError("input_type", "item {index} must be an object", {"index": index})
    kind = value.get("type", "message")
    schema = _KINDS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        message = "item {index}: items of type {kind} are not supported; supported: {names}"
        context = {"index": index, "kind": repr(kind)[:64], "names": ", ".join(_KINDS)}
        raise PydanticCustomError("unsupported_value", message, context)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        problem = problem_of(error)
        context = {"index": index, "problem": str(problem)}
        kind_of_error: Any = "unsupported_value" if problem.code == "unsupported_value" else "input_item"
        raise PydanticCustomError(kind_of_error, "item {index}: {problem}", context) from None


@dataclass(slots=True)
class Messages:
    """The messages of a chat that a list of items stands for."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    references: list[tuple[int, list[str]]] = field(default_factory=list)
    """Index of an empty message, and the ids of the items that belong there."""
    num_calls: int = 0


def messages_of(items: Sequence[AnyItem]) -> Messages:
    """Translate items. A text of the assistant and the calls that follow it become one message."""
    found = Messages()
    messages = found.messages
    may_join = joins_references = False
    """Whether the last message is the assistant's, so that a call joins it; whether it stands for references."""
    for item in items:
        match item:
            case _MessageItem():
                messages.append({"role": item.role, "content": item.content})
            case _CallItem():
                if not may_join:
                    messages.append({"role": "assistant", "content": ""})
                call = {"id": item.call_id, "name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append(call)
                found.num_calls += 1
            case _CallOutputItem():
                messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            case _ReferenceItem() if joins_references:
                found.references[-1][1].append(item.id)
            case _ReferenceItem():
                found.references.append((len(messages), [item.id]))
                messages.append({"role": "assistant", "content": ""})
            case _ReasoningItem():
                continue
        joins_references = isinstance(item, _ReferenceItem)
        may_join = not joins_references and messages[-1]["role"] == "assistant"
    return found
