"""What a model's chat template refuses or leaves out, seen by trial chats, and the step that changes such chats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from penstock.contract.chat_shapes import MESSAGE_OF_SHAPE, ChatShape
from penstock.contract.errors import RequestError, TooCostlyError, UnavailableError
from penstock.contract.tools import GENERATION_PROMPT
from penstock.gpu_node.engine.text.chat import NO_VARIABLES, ChatTemplate

_SYSTEM, _LATE, _USER, _OTHER_USER = "Be brief q1.", "Be kind q2.", "Which trains q3?", "And buses q4?"
_ANSWER, _OTHER_ANSWER, _RESULT, _OTHER_RESULT = "The 8:15 q5.", "Or the 9:15 q6.", "8:15 q7", "9:15 q8"
_NAME, _OTHER_NAME = "find_trains", "find_buses"
SHORT_ID, _LONG_ID = "abcdefgh1", "call_0123456789abcdef"
_ID_CHARS = 9
"""Letters and digits of an id that every template takes."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """The chats that a template refuses, or of which it leaves a part out, although it takes others."""

    system: bool = False
    """A system message at all."""
    late_system: bool = False
    """A system message after the first message."""
    users_in_row: bool = False
    assistants_in_row: bool = False
    long_ids: bool = False
    """Ids of calls that are not nine letters or digits."""
    several_calls: bool = False
    """More than one call in a message, or it shows only one of them."""
    calls_without_tools: bool = False
    """Earlier calls when no tools are offered."""
    object_arguments: bool = False
    """Arguments of earlier calls as an object, although it takes them as text."""
    missing_description: bool = False
    """A function without a description."""

    @property
    def moved_shapes(self) -> tuple[ChatShape, ...]:
        """The shapes of chats that are rendered with messages merged or moved."""
        return tuple(shape for shape in MESSAGE_OF_SHAPE if getattr(self, shape))


NO_REFUSALS = Refusals()


def refusals_of(template: ChatTemplate) -> Refusals:
    """Return what a template refuses. It renders about ten short chats."""
    trials = _Trials(template)
    tools = [_tool(name, description="Find.") for name in (_NAME, _OTHER_NAME)]
    chat = [_of("user", _USER), _of("assistant", _ANSWER), _of("user", _OTHER_USER)]
    try:
        if not trials.shows(chat, (_USER, _ANSWER, _OTHER_USER)):
            # Some templates are only for chats with tools.
            trials.default = tools
            if not template.takes_tools or not trials.shows(chat, (_USER, _ANSWER, _OTHER_USER)):
                return NO_REFUSALS
        takes_system = trials.shows([_of("system", _SYSTEM), chat[0]], (_SYSTEM, _USER))
        late = [_of("system", _SYSTEM), *chat[:2], _of("system", _LATE), chat[2]]
        found = Refusals(
            system=not takes_system,
            late_system=takes_system and not trials.shows(late, (_SYSTEM, _LATE)),
            users_in_row=not trials.shows([chat[0], chat[2]], (_USER, _OTHER_USER)),
            assistants_in_row=not trials.shows([*chat[:2], _of("assistant", _OTHER_ANSWER), chat[2]], (_OTHER_ANSWER,)),
        )
        return trials.with_tools(found, tools) if template.takes_tools else found
    except TooCostlyError:
        return NO_REFUSALS


def _of(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _call(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string", **more}}, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


_CITY, _OTHER_CITY = "Bern q9", "Basel q0"
_ARGUMENTS, _OTHER_ARGUMENTS = {"city": _CITY}, {"city": _OTHER_CITY}


class _Trials:
    """Renders the trial chats of a template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.default: Sequence[Mapping[str, Any]] | None = None
        """The tools of chats that name none."""

    def shows(
        self, chat: Sequence[Mapping[str, Any]], words: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Return whether the template takes a chat and shows all these words of it."""
        variables = {GENERATION_PROMPT: False} if chat[-1]["role"] == "assistant" else NO_VARIABLES
        try:
            text = self._template.render(chat, self.default if tools is None else tools, variables)
        except TooCostlyError:
            raise  # It would take as long again.
        except (RequestError, UnavailableError):
            return False
        return all(word in text for word in words)

    def with_tools(self, found: Refusals, tools: Sequence[Mapping[str, Any]]) -> Refusals:
        """Return what is found so far together with the refusals of calls and tools."""
        asked = _of("user", _USER)

        def chat(arguments: Any, call_id: str) -> list[dict[str, Any]]:
            result = _of("tool", _RESULT, tool_call_id=call_id, name=_NAME)
            return [asked, _of("assistant", "", tool_calls=[_call(_NAME, call_id, arguments)]), result]

        is_text = False
        if not self.shows(chat(_ARGUMENTS, SHORT_ID), (_CITY,), tools):
            is_text = self.shows(chat(json.dumps(_ARGUMENTS), SHORT_ID), (_CITY,), tools)
            if not is_text:
                return replace(found, missing_description=self._needs_description(asked))
        arguments, others = (json.dumps(one) if is_text else one for one in (_ARGUMENTS, _OTHER_ARGUMENTS))
        two = [_call(_NAME, SHORT_ID, arguments), _call(_OTHER_NAME, SHORT_ID[:-1] + "2", others)]
        results = [
            _of("tool", _RESULT, tool_call_id=two[0]["id"], name=_NAME),
            _of("tool", _OTHER_RESULT, tool_call_id=two[1]["id"], name=_OTHER_NAME),
        ]
        both = [asked, _of("assistant", "", tool_calls=two), *results]
        return replace(
            found,
            object_arguments=is_text,
            long_ids=not self.shows(chat(arguments, _LONG_ID), (_CITY,), tools),
            several_calls=not self.shows(both, (_CITY, _OTHER_CITY), tools),
            calls_without_tools=not self.shows(chat(arguments, SHORT_ID), (_CITY,)),
            missing_description=self._needs_description(asked),
        )

    def _needs_description(self, asked: Mapping[str, Any]) -> bool:
        if self.shows([asked], (_USER,), [_tool(_NAME)]):
            return False
        return self.shows([asked], (_USER,), [_tool(_NAME, description="Find.")])


def moved_messages(messages: Sequence[Mapping[str, Any]], refusals: Refusals) -> list[dict[str, Any]]:
    """Return a chat's messages with those merged or moved that the template would refuse."""
    kept = [dict(one) for one in messages]
    if refusals.system or (refusals.late_system and any(one["role"] == "system" for one in kept[1:])):
        kept = _system_first(kept, refusals)
    roles = set[str]()
    if refusals.users_in_row:
        roles.add("user")
    if refusals.assistants_in_row:
        roles.add("assistant")
    return list(_merged(kept, roles)) if roles else kept


def _system_first(messages: list[dict[str, Any]], refusals: Refusals) -> list[dict[str, Any]]:
    said = [one["content"] for one in messages if one["role"] == "system" and one["content"]]
    others = [one for one in messages if one["role"] != "system"]
    text = "\n\n".join(said)
    if not text or not refusals.system:
        return [{"role": "system", "content": text}, *others] if text else others
    at = next((i for i, one in enumerate(others) if one["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *others]
    others[at] = others[at] | {"content": f"{text}\n\n{others[at]['content']}"}
    return others


def _merged(messages: Sequence[dict[str, Any]], roles: set[str]) -> Iterator[dict[str, Any]]:
    """Yield messages, with those in a row of the same one of these roles as one. A message with calls stays alone."""
    held: dict[str, Any] | None = None
    for one in messages:
        if held is not None and held["role"] == one["role"] in roles and "tool_calls" not in held:
            said = "\n\n".join(text for text in (held["content"], one["content"]) if text)
            held = held | one | {"content": said}
            continue
        if held is not None:
            yield held
        held = one
    if held is not None:
        yield held


def repaired_calls(messages: Sequence[Mapping[str, Any]], refusals: Refusals) -> list[dict[str, Any]]:
    """Return messages with calls and results as the template takes them. Results come in the order of their calls."""
    repaired: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = dict(messages[at])
        at += 1
        calls = message.get("tool_calls") or ()
        results = list(takewhile(lambda one: one["role"] == "tool", messages[at:])) if calls else []
        at += len(results)
        order = {call["id"]: i for i, call in enumerate(calls)}
        results.sort(key=lambda one: order.get(one.get("tool_call_id"), len(order)))
        if refusals.several_calls and len(calls) > 1:
            repaired += _split(message, results)
        else:
            repaired += [message, *map(dict, results)]
    if refusals.long_ids:
        repaired = [_with_short_ids(one) for one in repaired]
    return [_with_text_arguments(one) for one in repaired] if refusals.object_arguments else repaired


def _split(message: dict[str, Any], results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a message for each call, and behind it its results."""
    known = {call["id"] for call in message["tool_calls"]}
    for i, call in enumerate(message["tool_calls"]):
        yield message | {"content": message["content"] if i == 0 else "", "tool_calls": [call]}
        yield from (dict(one) for one in results if one.get("tool_call_id") == call["id"])
    yield from (dict(one) for one in results if one.get("tool_call_id") not in known)


def _short_id(call_id: str) -> str:
    is_short = len(call_id) == _ID_CHARS and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:_ID_CHARS]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_call_id" in message:
        message = message | {"tool_call_id": _short_id(message["tool_call_id"])}
    if "tool_calls" in message:
        message = message | {"tool_calls": [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]}
    return message


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:

    if "tool_calls" not in message:
        return message
    calls = [
        call
        | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def described_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of which each function and each of its parameters has a description."""
    return [{**tool, "function": _described(tool["function"])} for tool in tools]


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": "", "parameters": {"type": "object", "properties": {}}, **function}
    properties = described["parameters"].get("properties") if isinstance(described["parameters"], dict) else None
    if isinstance(properties, dict):
        given = {
            key: {"description": "", **value} if isinstance(value, dict) else value for key, value in properties.items()
        }
        described["parameters"] = {**described["parameters"], "properties": given}
    return described
