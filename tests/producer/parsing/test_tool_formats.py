"""Every format of calls: what is written is read back, however the text is cut, and any text takes linear time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from fakes.cover import examples
from hypothesis import given, settings
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
    return AnswerFormat(form, functions=TOOLS, frame=form if form.has_frame else None, **options)


def framed(form: ToolFormat, text: str, calls: Sequence[tuple[str, dict[str, Any]]] = ()) -> str:
    """Return an answer with a text and calls behind it, as a model of this format writes it."""
    said = f"{form.text_opening.removeprefix(form.begun)}{text}{form.text_end}"
    if not calls:
        return said
    before, after = form.recipient
    header = f"{before}{calls[0][0]}{after}" if before else ""
    end = form.message_ends[0] if form.message_ends else ""
    return f"{said}{end}{form.turn if form.header else ''}{header}{written_calls(form, calls)}"


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
    if form.kind == "expressions":
        return not form.text_mark or form.text_mark not in json.dumps(calls).replace('\\"', '"')
    if form.kind != "tagged":
        return True
    if form.ends_with_key and any(
        isinstance(value, dict | list) and value for _, one in calls for value in one.values()
    ):
        return False  # Inner values are untyped texts.
    shown = [value if isinstance(value, str) else json.dumps(value) for _, one in calls for value in one.values()]
    return not any(form.value_end in one for one in shown)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25))
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


SIZE = 1 << 17
"""Characters. A quadratic reader would take minutes for them."""
MARKS = sorted({mark for form in ALL for mark in form.marks} | {"true", "false", "\n", " ", "text", "count", "f", "{}"})


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(25))
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
        assert format_of(form).read(framed(form, text)) == ParsedText(text)
        if text and not form.is_bare:
            said = format_of(form).read(framed(form, text, [("f", {})]))
            assert (said.content, [call.name for call in said.calls]) == (text, ["f"])


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_is_taken_over_at_any_character_gives_the_same_events(name: str) -> None:
    """A gateway that takes a stream over reads the text so far again, and goes on behind what was sent."""
    form = BY_NAME[name]
    calls = [("f", {"text": 'a "b"\n<c> \\', "count": 3, "is_on": True, "parts": [1, "x"]}), ("get.the-Time_2", {})]
    text = framed(form, "" if form.is_bare else "Well, [1] <b>.\n", calls[: 1 if form.is_single else 2])
    whole = format_of(form).read(text)
    for at in range(0, len(text) + 1, 3):
        first, second = AnswerReader(format_of(form)), AnswerReader(format_of(form))
        sent = first.push(text[:at])
        again = ParsedText()
        for piece in (text[: at // 2], text[at // 2 : at]):
            again += second.push(piece)
        assert again == sent
        assert whole.content.startswith(sent.content) and whole.reasoning.startswith(sent.reasoning)
        for call in sent.calls:
            assert whole.calls[call.index].name == call.name
            assert whole.calls[call.index].arguments.startswith(call.arguments)
        assert sent + second.push(text[at:]) + second.end() == whole


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


def test_formats_of_an_unknown_kind_take_no_tools() -> None:
    assert not NO_CALLS.takes_tools and not ToolFormat("new", "drawn").takes_tools
    assert all(form.takes_tools for form in ALL)


# Expressions.


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        (
            "lfm2",
            """<|tool_call_start|>[f(text='it\\'s "x"', count=-3)]<|tool_call_end|>""",
            {"text": 'it\'s "x"', "count": -3},
        ),
        (
            "lfm2",
            "<|tool_call_start|>[f(parts=['a', {'k': [1.5, None]}], is_on=True,)]<|tool_call_end|>",
            {"parts": ["a", {"k": [1.5, None]}], "is_on": True},
        ),
        (
            "lfm2",
            '<|tool_call_start|>[f(text="\\u00e9\\ud83d\\ude00\\x41\\d", rest={"a": true})]<|tool_call_end|>',
            {"text": "é😀A\\d", "rest": {"a": True}},
        ),
        ("pythonic", " [f(text='''two\nlines \"x\"''')]", {"text": 'two\nlines "x"'}),
        ("pythonic", '<|python_start|>[f(text="")]<|python_end|>', {"text": ""}),
        ("olmo3", '<function_calls>\nf(text = "a", count=1e2)\n</function_calls>', {"text": "a", "count": 100.0}),
        (
            "gemma4",
            '<|tool_call>call:f{count:3,rest:{a:[<|"|>x, "y"<|"|>,null],<|"|>b c<|"|>:false},'
            'text:<|"|>it\'s<|"|>}<tool_call|>',
            {"count": 3, "rest": {"a": ['x, "y"', None], "b c": False}, "text": "it's"},
        ),
        ("lfm2", "<|tool_call_start|>[f(text=fast)]<|tool_call_end|>", {"text": "fast"}),
    ],
)
def test_expressions_are_read_as_their_models_write_them(form: str, text: str, arguments: object) -> None:
    said = format_of(FORMATS[form]).read(text)
    assert said.content == ""
    assert [(call.name, json.loads(call.arguments), call.end) for call in said.calls] == [("f", arguments, "whole")]


@pytest.mark.parametrize(
    "text", ["[link](https://x)", "[1, 2]", "[TODO(john): f]", "[f (x=1)]", "[f(1)]", "Look: [f(x=1)]", "[f", "[f("]
)
def test_a_list_that_holds_no_call_of_python_is_text(text: str) -> None:
    assert format_of(FORMATS["pythonic"]).read(text) == ParsedText(text)


@pytest.mark.parametrize("value", ["f()", "[1", '"a" "b"', "{1}", "lambda x: x", "'a'.b", "**{}", "1e999, 2 3"])
def test_an_expression_that_is_no_value_breaks_the_call_and_is_not_executed(value: str) -> None:
    said = format_of(FORMATS["lfm2"]).read(f"<|tool_call_start|>[f(text={value})]<|tool_call_end|> Well.")
    assert [call.end for call in said.calls] == ["broken"]


# Answers in messages.


def test_harmony_is_read_in_both_orders_of_its_headers() -> None:
    form = FORMATS["harmony"]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for call in (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
    ):
        for end in ("", "<|call|>"):
            said = format_of(form).read(f'{thought}{call}{{"count": 1}}{end}')
            assert (said.content, said.reasoning) == ("", "Hm.")
            assert said.calls == (Call(0, "f", '{"count": 1}', "whole"),)
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    said = format_of(form).read(f"{preamble}{thought}<|channel|>final<|message|>Well <|x|>.<|return|>")
    assert (said.content, said.reasoning, said.calls) == ("I look.Well <|x|>.", "Hm.", ())
    without_tools = AnswerFormat(None, "think", frame=form)
    assert without_tools.read(f"{thought}<|channel|>final<|message|>Well.") == ParsedText("Well.", "Hm.")


def test_receivers_of_messages_are_no_text() -> None:
    functionary = format_of(FORMATS["functionary_v32"])
    said = functionary.read('all\nI look.>>>f\n{"count": 1}>>>get.the-Time_2\n{}')
    assert (said.content, [(call.name, call.arguments) for call in said.calls]) == (
        "I look.",
        [("f", '{"count": 1}'), ("get.the-Time_2", "{}")],
    )
    assert functionary.read("Plain text.\nMore.") == ParsedText("Plain text.\nMore.")
    muse = format_of(FORMATS["muse"])
    said = muse.read(" to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Well.<|eot|>")
    assert said == ParsedText("Well.", "Hm.")


def test_the_frame_of_kimi_k3_is_no_text() -> None:
    form = FORMATS["kimi_k3"]
    text = (
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Well.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="count" type="number"<|sep|>3'
        "<|close|>argument<|sep|>"
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )
    marks = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    said = AnswerFormat(form, "think_open", functions=TOOLS, marks=marks, frame=form).read(text)
    assert said == ParsedText("Well.", "Hm.", (Call(0, "f", '{"count": 3}', "whole"),))


def test_values_in_tags_of_minimax_m3_have_members() -> None:
    form = FORMATS["minimax_m3"]
    arguments = {"parts": ["q", {"k": [1.5, True]}], "rest": {"rest": {"a": "b"}}, "text": "5"}
    said = format_of(form).read(written_calls(form, [("f", arguments)]))
    assert [(json.loads(call.arguments), call.end) for call in said.calls] == [(arguments, "whole")]


def test_cdata_holds_the_closing_mark() -> None:
    text = '<param name="text"><![CDATA[a </param> & b]]></param><param name="count">3</param>'
    text = f'<function name="f">{text}</function>'
    said = format_of(FORMATS["minicpm5"]).read(text)
    assert json.loads(said.calls[0].arguments) == {"text": "a </param> & b", "count": 3}


def test_a_fence_stands_around_the_actions_of_command_r() -> None:
    text = 'I will search. Action: ```json\n[\n  {"tool_name": "f", "parameters": {"count": 1}}\n]```\n'
    said = format_of(FORMATS["command_r"]).read(text)
    assert (said.content, [(call.name, call.arguments) for call in said.calls]) == (
        "I will search. ",
        [("f", '{"count": 1}')],
    )
    assert format_of(FORMATS["command_r"]).read("Action: run.") == ParsedText("Action: run.")


@pytest.mark.parametrize("name", ["hermes", "harmony", "minimax_m3", "lfm2"])
def test_a_megabyte_of_anything_takes_at_most_a_second(name: str) -> None:
    form = BY_NAME[name]
    call = written_calls(form, [("f", {"text": "a", "parts": [1]})])
    opening = form.section or form.call
    inside = call[: call.index("1") + 1]
    for part, before in (
        (opening, ""),
        ("[{", inside),
        ("[],", inside),
        (inside, ""),
        ("\\n", call[: call.index("a")]),
    ):
        text = before + part * ((1 << 20) // len(part))
        began = time.process_time()
        format_of(form).read(text)
        # The goal is a second; a crowded machine takes up to twice the processor time.
        assert time.process_time() - began < 2.0, part
