"""Chats that a template refuses are changed before it; chats that it takes stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.tiny_model import write_tokenizer

from penstock.contract.chat_shapes import shapes_of
from penstock.contract.pool import PoolRecord
from penstock.gateway.stream.answer import moved_names
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.repairs import (
    NO_REFUSALS,
    Refusals,
    described_tools,
    moved_messages,
    refusals_of,
    repaired_calls,
)
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.producer.parsed_body import ParsedBody

_EACH = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
_CALLS = "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments }}{% endfor %}"
_SHOWN = "[{{ m.role }}]{{ m.content }}" + _CALLS + "{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if not loop.first and m.role != 'tool' and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('row') }}{% endif %}"
)
STRICT = _EACH + (
    "{% if m.tool_calls and not tools %}{{ raise_exception('tools') }}{% endif %}"
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "{{ '' + c.function.arguments }}{% endfor %}"
)
DESCRIBED = "{% for t in tools or [] %}{{ '' + t.function.description }}{% endfor %}{% for m in messages %}"


def of(role: str, content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(call_id: str, name: str = "f", arguments: object = None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        (_EACH + _SHOWN, NO_REFUSALS),
        (ALTERNATING + _SHOWN, Refusals(late_system=True, users_in_row=True, assistants_in_row=True)),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + _EACH + _SHOWN,
            Refusals(system=True),
        ),
        (STRICT + _SHOWN, Refusals(long_ids=True, several_calls=True, calls_without_tools=True, object_arguments=True)),
        (DESCRIBED + _SHOWN, Refusals(missing_description=True)),
        ("{{ raise_exception('nothing') }}", NO_REFUSALS),
    ],
)
def test_what_a_template_refuses_is_seen(source: str, refused: Refusals) -> None:
    assert refusals_of(ChatTemplate(source, {})) == refused


def test_messages_are_merged_and_moved_only_as_far_as_the_template_demands() -> None:
    chat = [of("system", "A"), of("user", "B"), of("user", "C"), of("system", "D"), of("assistant", "E")]
    assert moved_messages(chat, NO_REFUSALS) == chat
    late = moved_messages(chat, Refusals(late_system=True))
    assert late == [of("system", "A\n\nD"), of("user", "B"), of("user", "C"), of("assistant", "E")]
    merged = moved_messages(chat, Refusals(late_system=True, users_in_row=True))
    assert merged == [of("system", "A\n\nD"), of("user", "B\n\nC"), of("assistant", "E")]
    assert moved_messages(chat, Refusals(system=True))[0] == of("user", "A\n\nD\n\nB")
    called = [of("assistant", "", tool_calls=[call("1")]), of("assistant", "F")]
    assert moved_messages(called, Refusals(assistants_in_row=True)) == called


def test_calls_are_split_and_results_come_in_the_order_of_their_calls() -> None:
    calls = [call("first-id"), call("abcdefgh2", "g", {"a": 1})]
    results = [of("tool", "two", tool_call_id="abcdefgh2"), of("tool", "one", tool_call_id="first-id")]
    chat = [of("user", "x"), of("assistant", "y", tool_calls=calls), *results, of("user", "z")]
    assert [one["content"] for one in repaired_calls(chat, NO_REFUSALS)] == ["x", "y", "one", "two", "z"]
    strict = repaired_calls(chat, Refusals(several_calls=True, long_ids=True, object_arguments=True))
    assert [one["role"] for one in strict] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [one["content"] for one in strict] == ["x", "y", "one", "", "two", "z"]
    ids = [one["tool_calls"][0]["id"] for one in strict if "tool_calls" in one]
    assert ids == [one["tool_call_id"] for one in strict if one["role"] == "tool"]
    assert len(ids[0]) == 9 and ids[0].isalnum() and ids[1] == "abcdefgh2"
    assert strict[3]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_tools_get_the_descriptions_that_they_lack() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"description": "B."}}}
    (tool,) = described_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    properties: dict[str, Any] = tool["function"]["parameters"]["properties"]
    assert (tool["function"]["description"], properties["a"]["description"]) == ("", "")
    assert properties["b"] == {"description": "B."}
    assert parameters["properties"] == {"a": {"type": "string"}, "b": {"description": "B."}}


def test_moved_messages_are_named_for_the_answer() -> None:
    shapes = sorted(shapes_of(["user", "user", "developer", "assistant", "assistant"]))
    assert shapes == ["assistants_in_row", "late_system", "system", "users_in_row"]
    record = PoolRecord("m", "m", moved_messages=("late_system", "users_in_row"))
    assert moved_names(ParsedBody(shapes=shapes), record) == ["messages.system", "messages.user"]
    assert moved_names(ParsedBody(shapes=shapes, names={"prompt": "input"}), PoolRecord("m", "m")) == []
    assert moved_names(ParsedBody(shapes=["system"]), None) == []


HARD = [
    of("system", "S1"),
    of("user", "U1"),
    of("user", "U2"),
    of(
        "assistant",
        tool_calls=[
            {"id": "call_1", "name": "a", "arguments": '{"city": "Bern"}'},
            {"id": "call_2", "name": "b", "arguments": "{}"},
        ],
    ),
    of("tool", "R2", tool_call_id="call_2"),
    of("tool", "R1", tool_call_id="call_1"),
    of("assistant", "A1"),
    of("developer", "S2"),
    of("user", "U3"),
]
"""What many templates refuse: roles in a row, a late system message, several calls, results in another order."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
OFFERED = json.dumps(
    [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("a", "b")]
)
SOURCES = sorted(Path("build").rglob("llama.cpp/models/templates/*.jinja"))
STRICTEST = ALTERNATING + STRICT.partition("{% for m in messages %}")[2] + _SHOWN


@pytest.mark.parametrize("source", [pytest.param(path, id=path.stem) for path in SOURCES] or [STRICTEST])
def test_a_hard_chat_is_rendered_as_a_whole(source: Path | str, tmp_path: Path) -> None:
    """Each template of the peer, where its source is unpacked; otherwise one that refuses all of this."""
    write_tokenizer(tmp_path, 384)
    text = source if isinstance(source, str) else "{% set bos_token = '' %}" + source.read_text()
    tokenizer = Tokenizer(tmp_path, chat_template=text)
    # Templates that are only for chats with tools have another one beside them.
    offers = (OFFERED,) if "tool_use" in str(source) or "c4ai" in str(source) else (OFFERED, None)
    for tools in offers:
        shown = tokenizer.text_of(tokenizer.encode_chat(HARD, tools))
        assert [word for word in ("S1", "U1", "U2", "Bern", "R1", "R2", "A1", "S2", "U3") if word not in shown] == []
