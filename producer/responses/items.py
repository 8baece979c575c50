"""Input items of a response: their schemas. `_KINDS` has the record of each type."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.contract.job import MAX_MESSAGES
from penstock.contract.tools import MAX_ARGUMENTS_CHARS, MAX_CALLS_OF_CHAT, MAX_TOOLS, Arguments, CallId, FunctionName
from penstock.producer.openai import seals
from penstock.producer.openai.messages import given_arguments, placeholder_of
from penstock.producer.openai.seals import Seal
from penstock.producer.responses.compaction import opened
from penstock.producer.responses.tools import TOOL_SEARCH, AnyTool, arguments_of, offered_name, read_as, tool_of

MAX_ITEM_ID_CHARS = 256
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts that are text, and the member that holds it."""
_PARTS_OF_OTHERS = _TEXT_PARTS | {"encrypted_content": "encrypted_content"}
"""Those in messages of agents and in results of calls. What this model wrote is not encrypted."""
_MEDIA = frozenset(("input_image", "input_audio", "input_file"))
"""Parts of a call's result that the model cannot read."""
LOCAL_SHELL = "local_shell"

ItemId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ITEM_ID_CHARS)]


def _text_of(parts: Mapping[str, str], media: Collection[str] = ()) -> Callable[[object], object]:
    """Return a validator that returns the text of a content, a text or a list of parts. Unknown members are ignored."""

    def text_of(content: object) -> object:
        if not isinstance(content, list):
            return content
        return "".join(_text_of_part(part, parts, media) for part in content)

    return text_of


def _text_of_part(part: object, parts: Mapping[str, str], media: Collection[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or (kind not in parts and kind not in media):
        message = "content parts of type {kind} are not supported; only text parts are"
        raise PydanticCustomError("unsupported_value", message, {"kind": repr(kind)[:64]})
    if kind in media:
        return placeholder_of(kind)
    text = part.get(parts[kind])
    if not isinstance(text, str):
        raise PydanticCustomError("part_text", "the {member} of a part must be a string", {"member": parts[kind]})
    return text


_Content = Annotated[str, BeforeValidator(_text_of(_TEXT_PARTS))]
_AgentContent = Annotated[str, BeforeValidator(_text_of(_PARTS_OF_OTHERS))]
_ResultContent = Annotated[str, BeforeValidator(_text_of(_PARTS_OF_OTHERS, _MEDIA))]
_Tools = Annotated[
    list[Annotated[AnyTool, PlainValidator(tool_of)]], FailFast(), Field(default_factory=list, max_length=MAX_TOOLS)
]


class _Item(BaseModel):
    """Base of input items. Unknown members are ignored, because clients send answers back with members of their own."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    kind: ClassVar[str]

    id: ItemId | None = None

    @property
    def ignored(self) -> Sequence[str]:
        """What of the item has no effect, as the answer's header names it."""
        return ()

    @property
    def is_of_user(self) -> bool:
        """Whether it is a message of the user."""
        return False

    def stored(self) -> dict[str, Any]:
        members = self.model_dump(exclude={"id", "tools"}, exclude_none=True)
        return {"type": self.kind, "status": "completed", **members}


class MessageItem(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content

    @property
    def is_of_user(self) -> bool:
        return self.role == "user"

    def stored(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": self.content}
        if self.role == "assistant":
            part |= {"annotations": [], "logprobs": []}
        return {"type": "message", "role": self.role, "status": "completed", "content": [part]}


class AgentMessageItem(_Item):
    """A message of another agent of the same client. Its text names the sender."""

    kind = "agent_message"
    author: str | None = None
    recipient: str | None = None
    content: _AgentContent


class AnyCallItem(_Item):
    """A call that the model made earlier."""

    call_id: CallId | None

    @property
    def offered(self) -> str:
        """The name under which the model knows the function."""
        raise NotImplementedError

    @property
    def given(self) -> str:
        """The arguments as the model wrote them."""
        raise NotImplementedError


class _CallItem(AnyCallItem):
    kind = "function_call"
    call_id: CallId
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: Annotated[Arguments, BeforeValidator(given_arguments)] = "{}"

    @property
    def offered(self) -> str:
        return offered_name(self.namespace, self.name)

    @property
    def given(self) -> str:
        return self.arguments


class _CustomCallItem(AnyCallItem):
    kind = "custom_tool_call"
    call_id: CallId
    name: FunctionName
    namespace: FunctionName | None = None
    input: Annotated[str, StringConstraints(max_length=MAX_ARGUMENTS_CHARS // 2)]

    @property
    def offered(self) -> str:
        return offered_name(self.namespace, self.name)

    @property
    def given(self) -> str:
        return arguments_of(self.input)


class _SearchCallItem(AnyCallItem):
    """A search for tools. One that the server ran has no id, and is skipped."""

    kind = "tool_search_call"
    call_id: CallId | None = None
    execution: Literal["client", "server"] = "server"
    # Of one request.
    arguments: dict[str, Any] = {}

    @property
    def offered(self) -> str:
        return TOOL_SEARCH

    @property
    def given(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


class _ShellCallItem(AnyCallItem):
    kind = "local_shell_call"
    call_id: CallId
    action: dict[str, Any]

    @property
    def offered(self) -> str:
        return LOCAL_SHELL

    @property
    def given(self) -> str:
        return json.dumps(self.action, ensure_ascii=False)


class AnyResultItem(_Item):
    """The result of a call."""

    call_id: CallId | None

    @property
    def text(self) -> str:
        """The result as the model gets it."""
        raise NotImplementedError


class _CallOutputItem(AnyResultItem):
    kind = "function_call_output"
    call_id: CallId
    output: _ResultContent
    media: Annotated[list[str], Field(exclude=True)] = []
    """Types of the parts that placeholders stand for."""

    @model_validator(mode="before")
    @classmethod
    def _note_media(cls, data: Any) -> Any:
        output = data.get("output") if isinstance(data, dict) else None
        if not isinstance(output, list):
            return data
        kinds = [part.get("type") for part in output if isinstance(part, dict)]
        return {**data, "media": [kind for kind in kinds if isinstance(kind, str) and kind in _MEDIA]}

    @property
    def ignored(self) -> Sequence[str]:
        return [f"input.{self.kind}.{kind}" for kind in self.media]

    @property
    def text(self) -> str:
        return self.output


class _CustomOutputItem(_CallOutputItem):
    kind = "custom_tool_call_output"


class _ShellOutputItem(_CallOutputItem):
    kind = "local_shell_call_output"
    call_id: CallId = Field(validation_alias=AliasChoices("call_id", "id"))


class _SearchOutputItem(AnyResultItem):
    """The tools that a search found. They are offered from now on."""

    kind = "tool_search_output"
    call_id: CallId | None = None
    execution: Literal["client", "server"] = "server"
    tools: _Tools

    @property
    def text(self) -> str:
        names = [offer.function["name"] for tool in self.tools for offer in tool.offers()]
        return f"Found these functions, which can be called now: {', '.join(names)}" if names else "Found no function."

    def stored(self) -> dict[str, Any]:
        return super().stored() | {"tools": [tool.shown() for tool in self.tools]}


class _AdditionalToolsItem(_Item):
    """Tools that are offered as if they were in the body's `tools`."""

    kind = "additional_tools"
    tools: _Tools

    def stored(self) -> dict[str, Any]:
        return {"type": self.kind, "tools": [tool.shown() for tool in self.tools]}


class ReasoningItem(_Item):
    """An earlier reasoning. A chat template that takes it gets its text, which may be sealed."""

    kind = "reasoning"
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    def stored(self) -> dict[str, Any]:
        return {"type": "reasoning", **self.model_dump(exclude={"id"}, exclude_none=True)}

    @property
    def thought(self) -> tuple[str, Seal | None] | None:
        """The text, and its seal, not checked yet; None if there is no text, or if another server sealed it."""
        if self.encrypted_content is None:
            texts = [part.get("text") for part in self.content or () if part.get("type") == "reasoning_text"]
            text = "".join(one for one in texts if isinstance(one, str))
            return (text, None) if text else None
        try:
            return seals.opened("reasoning", self.encrypted_content)
        except ValueError:
            return None

    @property
    def ignored(self) -> Sequence[str]:
        return () if self.encrypted_content is None or self.thought is not None else (f"input.{self.kind}",)


class ReferenceItem(_Item):
    """A reference to an item of the output of a stored response."""

    id: ItemId

    def stored(self) -> dict[str, Any]:
        return {"type": "item_reference"}


def _can_be_opened(content: str) -> str:
    try:
        opened(content)
    except ValueError as error:
        raise PydanticCustomError("compaction", "{problem}", {"problem": str(error)}) from None
    return content


class CompactionItem(_Item):
    """An earlier conversation as a summary, sealed by `/v1/responses/compact`. A gateway checks the seal later."""

    kind = "compaction"
    encrypted_content: Annotated[str, AfterValidator(_can_be_opened)]


class _SkippedItem(_Item):
    """A call of a tool that another server ran. The answer's header names it."""

    @property
    def ignored(self) -> Sequence[str]:
        return (f"input.{self.kind}",)


class _WebSearchItem(_SkippedItem):
    kind = "web_search_call"


class _ImageItem(_SkippedItem):
    kind = "image_generation_call"


AnyItem = (
    MessageItem
    | AgentMessageItem
    | _CallItem
    | _CustomCallItem
    | _SearchCallItem
    | _ShellCallItem
    | _CallOutputItem
    | _CustomOutputItem
    | _ShellOutputItem
    | _SearchOutputItem
    | _AdditionalToolsItem
    | ReasoningItem
    | ReferenceItem
    | CompactionItem
    | _WebSearchItem
    | _ImageItem
)
_KINDS: dict[str, type[AnyItem]] = {
    "message": MessageItem,
    "agent_message": AgentMessageItem,
    "function_call": _CallItem,
    "function_call_output": _CallOutputItem,
    "custom_tool_call": _CustomCallItem,
    "custom_tool_call_output": _CustomOutputItem,
    "tool_search_call": _SearchCallItem,
    "tool_search_output": _SearchOutputItem,
    "local_shell_call": _ShellCallItem,
    "local_shell_call_output": _ShellOutputItem,
    "additional_tools": _AdditionalToolsItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
    "compaction": CompactionItem,
    "compaction_summary": CompactionItem,
    "web_search_call": _WebSearchItem,
    "image_generation_call": _ImageItem,
}
_REMEDIES = {"compaction_trigger": "send this conversation to POST /v1/responses/compact instead"}
"""What to do in place of items that are not supported."""


def items_of(value: object) -> list[AnyItem]:
    """Check the value of `input`: a text, which is a message of the user, or a list of items."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        message = "must be a string or a list of 1 to {max} items"
        raise PydanticCustomError("input_type", message, {"max": MAX_MESSAGES})
    items = [_item_of(item, index) for index, item in enumerate(value)]
    if sum(isinstance(item, AnyCallItem) for item in items) > MAX_CALLS_OF_CHAT:
        raise PydanticCustomError("too_many", "must have at most {limit} calls", {"limit": MAX_CALLS_OF_CHAT})
    return items


def items_or_none(value: object) -> list[AnyItem]:
    """Check the value of an `input` that may be null, which stands for no items."""
    return [] if value is None else items_of(value)


def _item_of(value: object, index: int) -> AnyItem:
    if not isinstance(value, dict):
        raise PydanticCustomError("input_type", "item {index} must be an object", {"index": index})
    kind = value.get("type", "message")
    schema = _KINDS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        message = "item {index}: items of type {kind} are not supported; {remedy}"
        remedy = _REMEDIES.get(str(kind)) or f"supported: {', '.join(_KINDS)}"
        context = {"index": index, "kind": repr(kind)[:64], "remedy": remedy}
        raise PydanticCustomError("unsupported_value", message, context)
    try:
        return read_as(schema, value)
    except PydanticCustomError as error:
        kind_of_error: Any = error.type
        context = {"index": index, "problem": error.message()}
        raise PydanticCustomError(kind_of_error, "item {index}: {problem}", context) from None


def tools_in(items: Sequence[AnyItem]) -> Iterator[AnyTool]:
    """Yield the tools that items bring with them."""
    for item in items:
        if isinstance(item, _SearchOutputItem | _AdditionalToolsItem):
            yield from item.tools
