"""Every format of calls: what is written is read back, however the text is cut, and any text takes linear time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.calls.python_values import json_of_python
from penstock.contract.calls.reading import Call
from penstock.contract.calls.tagged_arguments import typed
from penstock.contract.calls.writing import written_calls
from penstock.contract.tool_formats import BY_NAME, FALLBACK, FORMATS, NO_CALLS, ToolFormat
from penstock.producer.parsing.parsed_text import AnswerFormat, AnswerReader, ParsedText

ALL = [*FORMATS.values(), FALLBACK]
NAMES = [form.name for form in ALL]
TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "is_on": {"type": "boolean"},
    "parts": {"type": "array"},
    "rest": {"$ref": "#/$defs/rest"},
}
PARAMETERS = {"type": "object", "properties": TYPES, "$defs": {"rest": {"type": "object"}}}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "get.the-Time_2")]
)


def format_of(form: ToolFormat, **options: Any) -> AnswerFormat:
    return AnswerFormat(form, functions=TOOLS, **options)


def read(form: AnswerFormat, pieces: Sequence[str]) -> ParsedText:
    reader = AnswerReader(form)
    said = ParsedText()
    for piece in pieces:
        said += reader.push(piece)
    return said + reader.end()


def cuts_of(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=20) | st.sampled_from(
    [
        "null",
        "None",
        "nothing",
        " null",
        "5",
        "true",
        "\n",
        "a\n",
        "\n\nb\n\n",
        "<",
        "</",
        '"',
        "\\",
        "{}",
        "[1]",
        "none",
    ]
)
numbers = st.integers(-(2**60), 2**60)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "maybe": st.none() | texts.filter(lambda text: text.strip().lower() not in ("null", "none")),
        "count": numbers,
        "share": st.floats(allow_nan=False, allow_infinity=False) | numbers,
        "is_on": st.booleans(),
        "parts": st.lists(values, max_size=3),
        "rest": st.dictionaries(texts, values, max_size=3),
    },
)
calls_of_answer = st.lists(st.tuples(st.sampled_from(["f", "get.the-Time_2"]), arguments), min_size=1, max_size=3)


def may_hold(form: ToolFormat, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether a format can write these calls: a closing mark inside a tagged value ends the value."""
    if form.kind != "tagged":
        return True
    shown = [value if isinstance(value, str) else json.dumps(value) for _, one in calls for value in one.values()]
    return not any(form.value_end in one for one in shown)


@pytest.mark.parametrize("name", NAMES)
@given(calls=calls_of_answer, data=st.data())
def test_what_is_written_is_read_back(name: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject) -> None:
    form = BY_NAME[name]
    if not may_hold(form, calls):
        return
    text = written_calls(form, calls)
    said = format_of(form).read(text)
    assert [(call.name, json.loads(call.arguments), call.end) for call in said.calls] == [
        (name, arguments, "whole") for name, arguments in calls
    ]
    assert said.content == ""
    assert read(format_of(form), cuts_of(data, text)) == read(format_of(form), [*text]) == said


SIZE = 1 << 18
"""Characters. A quadratic reader would take minutes for them."""
MARKS = sorted({mark for form in ALL for mark in form.marks} | {"true", "false", "\n", " ", "text", "count", "f", "{}"})


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_reading_does_not_depend_on_how_a_text_is_cut(name: str, data: st.DataObject) -> None:
    form = BY_NAME[name]
    own = [*form.marks, "f", "text", "count", "true", "false", "\n", " ", '{"a": 1}', "[", "]", ","]
    whole = written_calls(form, [("f", {"text": "a\nb", "count": 3})])
    pieces = data.draw(st.lists(st.sampled_from([*own, whole]) | st.sampled_from(MARKS) | texts, max_size=12))
    text = "".join(pieces)
    said = format_of(form).read(text)
    assert read(format_of(form), [*text]) == read(format_of(form), cuts_of(data, text)) == said
    assert [call.index for call in said.calls] == list(range(len(said.calls)))
    for call in said.calls:
        if call.end == "whole":
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_before_calls_stays_and_a_text_without_calls_is_unchanged(name: str) -> None:
    form = BY_NAME[name]
    for text in ("", "Well, <b> [1] {2} </x>\n", "a < b"):
        assert format_of(form).read(text) == ParsedText(text)
        if text and not form.is_bare:
            said = format_of(form).read(text + written_calls(form, [("f", {})]))
            assert (said.content, [call.name for call in said.calls]) == (text, ["f"])


@pytest.mark.parametrize("name", NAMES)
def test_text_arguments_come_out_while_they_are_written(name: str) -> None:
    form, said = BY_NAME[name], "word " * 400
    text = written_calls(form, [("f", {"text": said})])
    half = text[: text.index(said) + 1000]
    reader = AnswerReader(format_of(form))
    begun = reader.push(half)
    assert len(begun.calls[0].arguments) > 950
    assert (begun + reader.push(text[len(half) :]) + reader.end()).calls == (
        Call(0, "f", json.dumps({"text": said}), "whole"),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", ["opening", "blank", "brackets", "unclosed", "closing", "value"])
def test_much_of_anything_takes_linear_time(name: str, pattern: str) -> None:
    form = BY_NAME[name]
    call = written_calls(form, [("f", {"text": "a", "parts": [1]})])
    opening = call[: call.index("f")]
    part = {
        "opening": form.section or form.call,
        "blank": (form.section or form.call) + " \n" * 5000,
        "brackets": call + "[{" * 500,
        "unclosed": call[: call.index("1") + 1],
        "closing": call + (form.section_end or form.call_end or "]"),
        "value": opening + "<" * 1000,
    }[pattern]
    text = part * (SIZE // len(part))
    began = time.process_time()
    format_of(form).read(text)
    for one in ("blank", "value"):
        if pattern == one:
            format_of(form).read(call[: call.index("1")] + (" " if one == "blank" else "1, ") * (SIZE // 3))
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, "5.0"),
        ("5", {"string"}, "5"),
        ("True", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("None", {"null", "string"}, None),
        ("5", {"null", "integer", "string"}, 5),
        ("{'a': [1, None, 'b\\'c']}", {"object"}, {"a": [1, None, "b'c"]}),
        ('{"a": true}', {"object", "array"}, {"a": True}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("__import__('os')", {"object"}, "__import__('os')"),
    ],
)
def test_texts_are_typed_by_the_schema_and_stay_text_if_they_do_not_fit(
    text: str, allowed: set[str], value: object
) -> None:
    assert json.loads(typed(text, frozenset(allowed))) == value


@given(values)
def test_literals_of_python_are_read(value: object) -> None:
    written = json_of_python(repr(value))
    assert written is not None and json.loads(written) == value


# Reports of wrong calls in other servers.


def test_a_call_without_the_mark_of_its_list_is_read() -> None:
    """Qwen3-Coder often leaves `<tool_call>` out (vllm-project/vllm issues of the parser qwen3_coder)."""
    text = "<function=f>\n<parameter=text>\nls -la\n</parameter>\n</function>\n</tool_call>"
    said = format_of(FORMATS["qwen3_coder"]).read(text)
    assert [(call.name, call.arguments) for call in said.calls] == [("f", '{"text": "ls -la"}')]
    assert said.content == ""


def test_a_mark_inside_a_value_leaks_into_no_other_call() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=text>\n<tool_call> <function=g>\n</parameter>\n</function>\n</tool_call>"
    )
    said = format_of(FORMATS["qwen3_coder"]).read(text)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("f", {"text": "<tool_call> <function=g>"})
    ]


def test_numbers_as_text_stay_text_where_the_schema_says_so() -> None:
    """A zip code of digits was turned into a number (reports of the GLM parsers)."""
    text = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>00501</arg_value>\n</tool_call>"
    assert format_of(FORMATS["glm45"]).read(text).calls[0].arguments == '{"text": "00501"}'


def test_a_call_without_arguments_is_an_empty_object() -> None:
    """Calls without arguments were lost (reports of the GLM 4.5 and Kimi parsers)."""
    for form, text in (
        ("glm45", "<tool_call>f\n</tool_call>"),
        ("glm45", "<tool_call>f</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ):
        assert format_of(FORMATS[form]).read(text).calls == (Call(0, "f", "{}", "whole"),)


def test_a_name_of_kimi_loses_its_prefix_and_number() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>"
        '{"text": "<|tool_call_end|>"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    assert format_of(FORMATS["kimi_k2"]).read(text).calls == (Call(0, "f", '{"text": "<|tool_call_end|>"}', "whole"),)


def test_ids_of_mistral_are_no_part_of_a_name() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"count": 1}[TOOL_CALLS]f[ARGS]{}'
    found = format_of(FORMATS["mistral_args"]).read(text).calls
    assert [(call.name, call.arguments) for call in found] == [("f", '{"count": 1}'), ("f", "{}")]


def test_formats_of_an_unknown_kind_take_no_tools() -> None:
    assert not NO_CALLS.takes_tools and not ToolFormat("new", "drawn").takes_tools
    assert all(form.takes_tools for form in ALL)
