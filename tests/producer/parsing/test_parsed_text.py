"""Parsing of reasoning, calls and content: equal however the text is split, and plain text stays unchanged."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.contract.calls.reading import MAX_OPENING_CHARS, Call, num_held
from penstock.contract.job import Message
from penstock.contract.tool_formats import FORMATS
from penstock.contract.tools import MAX_ARGUMENTS_CHARS, MAX_CALLS, MAX_FUNCTION_NAME_CHARS, ToolCall
from penstock.producer.parsing.parsed_text import AnswerFormat, AnswerReader, ParsedText

CALL_FORMS = ("hermes", "llama3_json", "mistral")
LONGEST_MARK = len("<|python_tag|>")
MAX_UNDECIDED = 32
FORMS = [
    AnswerFormat(calls, thoughts)
    for calls in (None, *map(FORMATS.get, CALL_FORMS))
    for thoughts in ("none", "think", "think_open")
]
WRITTEN = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<",
            "[",
            ";",
            "\n",
            " ",
        ),
        *('{"name": "f", "arguments": {"a": "</tool_call>"}}', '{"name": "f", "arguments": {"a": [1, "é"]}}'),
        *('<tool_call>{"name": "f", "arguments": {}}</tool_call>', '[TOOL_CALLS][{"name": "f", "arguments": {}}]'),
        *('<|python_tag|>{"name": "f", "parameters": {}}', "<think>hm</think>", "<think>hm\n</think>\n\n"),
        *('{"name": "f", "parameters": {}}', '[{"name": "f", "arguments": {"b": null}}]', '{"name": 5}', '{"name"'),
        *("[" * 5000, '{"name": "\\ud800", "arguments": {}}', '{"name": "f", "arguments": {"a": NaN}}', "so be it"),
        *('{"name": "f", "arguments": {"a": "\\ud800"}}', '{"name": "f", "parameters": {"a": "\\ud800"}}'),
    ]
)
BLANKS = st.builds(str.__mul__, st.sampled_from((" ", "\n", "\t", "\n ", "\xa0")), st.integers(0, 80))
INDENTED = st.builds(
    '{{{0}"type":{0}"function",{1}"name":{0}"f",{1}"{2}":{0}{{}}}}'.format,
    BLANKS,
    BLANKS,
    st.sampled_from(("parameters", "arguments")),
)
TEXTS = st.lists(WRITTEN | BLANKS | INDENTED | st.text('<>[]{}"ntool_caTOLCS/ \n', max_size=9), max_size=8).map("".join)


def read(form: AnswerFormat, pieces: list[str]) -> ParsedText:
    reader = AnswerReader(form)
    said = ParsedText()
    for piece in pieces:
        said += reader.push(piece)
    return said + reader.end()


def read_in_order(form: AnswerFormat, pieces: list[str]) -> list[str | Call]:
    """Return the texts and calls of an answer in order. Adjacent texts are joined."""
    reader = AnswerReader(form)
    parts = [part for piece in pieces for part in reader.push_in_order(piece)] + reader.end_in_order()
    found: list[str | Call] = []
    for part in parts:
        text = part.reasoning + part.content
        if text and found and isinstance(found[-1], str):
            found[-1] += text
        elif text:
            found.append(text)
        for call in part.calls:
            if found and isinstance(found[-1], Call) and found[-1].index == call.index:
                found[-1] += call
            else:
                found.append(call)
    return found


def next_message(said: ParsedText) -> Message:
    """Return the answer as the message that the caller's next request contains. Raises for what would be refused."""
    whole = [call for call in said.calls if call.end == "whole"]
    calls = tuple(ToolCall(id="c", name=call.name, arguments=call.arguments) for call in whole)
    return Message(role="assistant", content=said.content, tool_calls=calls)


@given(st.sampled_from(FORMS), TEXTS, st.data())
def test_parsing_does_not_depend_on_how_a_text_is_cut(form: AnswerFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    said = form.read(text)
    assert read(form, pieces) == said
    assert read(form, list(text)) == said
    assert read_in_order(form, pieces) == read_in_order(form, list(text)) == read_in_order(form, [text])
    assert [call.index for call in said.calls] == list(range(len(said.calls)))
    assert next_message(said).tool_calls is not None


@example("llama3_json", " " * 40, '{"name": "f", "parameters": {}}', 0)
@example("llama3_json", "", '{"type": ' + " " * 40 + '"function", "name": "f", "parameters": {}}', 0)
@given(st.sampled_from([*CALL_FORMS]), BLANKS, INDENTED, st.integers(0, 100))
def test_parsing_does_not_depend_on_how_an_indented_bare_call_is_cut(
    form: str, blank: str, call: str, cut: int
) -> None:
    text = blank + call
    said = AnswerFormat(FORMATS[form]).read(text)
    assert (
        read(AnswerFormat(FORMATS[form]), [text[:cut], text[cut:]])
        == read(AnswerFormat(FORMATS[form]), list(text))
        == said
    )


@given(st.sampled_from([AnswerFormat(calls) for calls in (None, *map(FORMATS.get, CALL_FORMS))]), TEXTS)
def test_a_text_without_calls_comes_out_unchanged(form: AnswerFormat, text: str) -> None:
    said = form.read(text)
    assert said.calls or said == ParsedText(text)


@given(st.sampled_from(FORMS), st.text("<>[]tool_caTOLCS/ \nthink|py", max_size=60))
def test_plain_text_is_late_by_no_more_than_the_longest_mark(form: AnswerFormat, text: str) -> None:
    if any(mark in text for mark in ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "think>")):
        return
    reader, said = AnswerReader(form), ParsedText()
    for n, char in enumerate(text, 1):
        said += reader.push(char)
        bound = MAX_UNDECIDED if form.calls == FORMATS["llama3_json"] else LONGEST_MARK
        blank = len(text[:n]) - len(text[:n].lstrip()) if form.reasoning_parser == "think_open" else 0
        assert len(said.content) + len(said.reasoning) >= n - bound - blank


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", 'So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "So:\n", [("f", {"a": 1})]),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g","arguments":{}}</tool_call>\nok',
            "ok",
            [("f", {}), ("g", {})],
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> \\" </tool_call>"}}\n</tool_call>',
            "",
            [("f", {"a": '</tool_call> " </tool_call>'})],
        ),
        (
            "hermes",
            '<tool_call>"f\n</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
            '<tool_call>"f\n</tool_call>',
            [("f", {})],
        ),
        ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n', "", [("f", {})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            "",
            [("f", {}), ("g", {})],
        ),
        (
            "hermes",
            'I use "<tool_call>" here. <tool_call>{"name": "f", "arguments": {}}</tool_call>',
            'I use "<tool_call>" here. ',
            [("f", {})],
        ),
        (
            "hermes",
            '<tool_call> {so}. <tool_call> <tool_call>\n{"name": "f", "arguments": {}}</tool_call>',
            "<tool_call> {so}. <tool_call> ",
            [("f", {})],
        ),
        ("hermes", "<tool_call> \n", "<tool_call> \n", []),
        ("hermes", "<tool_call>f(1)</tool_call> no", "<tool_call>f(1)</tool_call> no", []),
        ("llama3_json", '{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
        (
            "llama3_json",
            '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        ("llama3_json", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": [2]}}]',
            "",
            [("f", {}), ("g", {"x": [2]})],
        ),
        ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        (
            "mistral",
            'Write [TOOL_CALLS] so: [TOOL_CALLS][{"name": "f", "arguments": {}}]',
            "Write [TOOL_CALLS] so: ",
            [("f", {})],
        ),
    ],
)
def test_calls_are_parsed_in_the_format_of_each_family(form: str, text: str, content: str, calls: list[object]) -> None:
    said = AnswerFormat(FORMATS[form]).read(text)
    assert read(AnswerFormat(FORMATS[form]), list(text)) == said
    assert said.content == content
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        ("think", "<think>\nhm\n</think>\n\nyes", "hm\n", "yes"),
        ("think", "<think>cut off </thi", "cut off </thi", ""),
        ("think", "no <think>hm</think>", "", "no <think>hm</think>"),
        ("think_open", "hm</think>yes", "hm", "yes"),
        ("think", "<think>\n\n</think>\n\nyes", "", "yes"),
    ],
)
def test_reasoning_is_separated_from_content(parser: str, text: str, reasoning: str, content: str) -> None:
    assert AnswerFormat(None, parser).read(text) == ParsedText(content, reasoning)
    assert read(AnswerFormat(None, parser), list(text)) == ParsedText(content, reasoning)


def test_calls_are_found_after_reasoning_and_never_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    said = AnswerFormat(FORMATS["hermes"], "think").read(f"<think>{call}</think>\n{call}")
    assert (said.reasoning, said.content, len(said.calls)) == (call, "", 1)


@pytest.mark.parametrize("form", CALL_FORMS)
def test_without_parallel_calls_all_but_the_first_call_are_dropped(form: str) -> None:
    text = written_as(form, [call_text(form, name, {}) for name in "fgh"])
    wanted = AnswerFormat(FORMATS[form], one_call=True)
    for pieces in ([text], list(text)):
        assert [call.name for call in read(wanted, pieces).calls] == ["f"]


def call_text(form: str, name: str, arguments: dict[str, str]) -> str:
    return json.dumps({"name": name, "parameters" if form == "llama3_json" else "arguments": arguments})


def written_as(form: str, calls: list[str]) -> str:
    match form:
        case "hermes":
            return "".join(f"<tool_call>{call}</tool_call>" for call in calls)
        case "llama3_json":
            return ";".join(calls)
    return f"[TOOL_CALLS][{','.join(calls)}]"


@pytest.mark.parametrize("form", CALL_FORMS)
@pytest.mark.parametrize(
    ("name", "arguments", "is_call"),
    [
        ("", {}, False),
        ("f" * MAX_FUNCTION_NAME_CHARS, {}, True),
        ("f" * (MAX_FUNCTION_NAME_CHARS + 1), {}, False),
        ("f", {"a": "x" * (MAX_ARGUMENTS_CHARS - 9)}, True),
    ],
)
def test_a_call_that_no_request_may_contain_is_text(
    form: str, name: str, arguments: dict[str, str], is_call: bool
) -> None:
    text = written_as(form, [call_text(form, name, arguments)])
    said = AnswerFormat(FORMATS[form]).read(text)
    assert said.content == ("" if is_call else text)
    assert len(next_message(said).tool_calls) == is_call


@pytest.mark.parametrize("form", CALL_FORMS)
def test_an_answer_has_no_more_calls_than_a_message_may_have(form: str) -> None:
    text = written_as(form, [call_text(form, f"f{number}", {}) for number in range(MAX_CALLS + 2)])
    said = AnswerFormat(FORMATS[form]).read(text)
    assert read(AnswerFormat(FORMATS[form]), list(text)) == said
    assert (said.content, [call.name for call in said.calls]) == ("", [f"f{number}" for number in range(MAX_CALLS)])


@pytest.mark.parametrize("form", CALL_FORMS)
def test_arguments_come_out_while_they_are_written_and_unchanged(form: str) -> None:
    written = '{"city": "a } \\" b",  "list": [1, {"x": null}]}'
    text = written_as(form, [call_text(form, "f", {}).replace("{}", written)])
    reader = AnswerReader(AnswerFormat(FORMATS[form]))
    parts = [(at, call) for at, char in enumerate(text) for call in reader.push(char).calls]
    end = reader.end()
    assert parts[0][1].name == "f"
    assert parts[0][0] == text.index(written)
    assert "".join(call.arguments for _, call in parts) == written
    assert len([call for _, call in parts if call.arguments]) == len(written) - 1  # an escape comes whole
    assert [call.end for _, call in parts if call.end] == ["whole"]
    assert not end


@pytest.mark.parametrize("form", CALL_FORMS)
@given(st.data())
def test_a_text_that_is_cut_anywhere_shows_no_mark_of_a_call(form: str, data: st.DataObject) -> None:
    marks = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
    lead = marks[form] if form == "llama3_json" else ""
    text = lead + written_as(form, [call_text(form, "f", {"a": "b"})])
    cut = data.draw(st.integers(0, len(text)))
    said = read_cut(form, list(text[:cut]))
    assert said.content in ("", text[:1])
    assert said == AnswerFormat(FORMATS[form]).read(text[:cut], is_cut=True)
    whole = AnswerFormat(FORMATS[form]).read(text).calls[0]
    assert all(whole.arguments.startswith(call.arguments) and call.end in ("whole", "cut") for call in said.calls)


def read_cut(form: str, pieces: list[str]) -> ParsedText:
    reader = AnswerReader(AnswerFormat(FORMATS[form]))
    said = ParsedText()
    for piece in pieces:
        said += reader.push(piece)
    return said + reader.end(is_cut=True)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"a": <1>}', '{"a": '),
        ('{"a": 1,}', '{"a": 1,}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "line\nend"}', '{"a": "line'),
        ('{"a": "' + "x" * MAX_ARGUMENTS_CHARS + '"}', '{"a": "' + "x" * (MAX_ARGUMENTS_CHARS - 7)),
    ],
)
def test_a_call_that_breaks_keeps_what_came_out_of_it(arguments: str, kept: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>\nAnd so on.'
    pieces = [text] if len(text) > 10_000 else list(text)
    said = read(AnswerFormat(FORMATS["hermes"]), pieces)
    assert said == AnswerFormat(FORMATS["hermes"]).read(text)
    assert said.calls == (Call(0, "f", kept, "broken"),)
    assert said.content == "And so on."


def test_a_call_with_its_arguments_before_its_name_comes_out_once_the_name_is_known() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "id": 12, "name": "f"}</tool_call>'
    assert AnswerFormat(FORMATS["hermes"]).read(text).calls == (Call(0, "f", '{"a": 1}', "whole"),)


def test_text_and_calls_of_one_piece_keep_their_order() -> None:
    calls = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fg"]
    assert read_in_order(AnswerFormat(FORMATS["hermes"], "think"), [f"<think>hm</think>a{calls[0]}b{calls[1]}c"]) == [
        *("hma", Call(0, "f", "{}", "whole"), "b", Call(1, "g", "{}", "whole"), "c")
    ]


def test_the_longest_end_that_may_begin_a_mark_is_held() -> None:
    assert [num_held(text, "<<a") for text in ("", "<", "x<<", "<<<", "<<a", "<a")] == [0, 1, 2, 2, 0, 0]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_blanks_that_follow_a_mark_without_an_end_are_text(size: int) -> None:
    call = '{"name": "f", "arguments": {}}</tool_call>'
    for num_blanks, is_call in ((MAX_OPENING_CHARS - len("<tool_call>"), True), (MAX_OPENING_CHARS, False)):
        text = "<tool_call>" + " " * num_blanks + call
        reader = AnswerReader(AnswerFormat(FORMATS["hermes"]))
        parts = [reader.push(text[at : at + size]) for at in range(0, len(text), size)] + [reader.end()]
        assert any(part.calls for part in parts) is is_call
        assert "".join(part.content for part in parts) == ("" if is_call else text)
