"""What a text says, told apart: the same however it is cut into pieces, and unchanged where it says no more."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.openai.parsed_text import AnswerFormat, AnswerReader, ParsedText
from penstock.producer.openai.tool_calls import CALL_FORMS, num_held

LONGEST_MARK = len("<|python_tag|>")
MAX_UNDECIDED = 32
FORMS = [
    AnswerFormat(calls, thoughts) for calls in ("none", *CALL_FORMS) for thoughts in ("none", "think", "think_open")
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
TEXTS = st.lists(WRITTEN | st.text('<>[]{}"ntool_caTOLCS/ \n', max_size=9), max_size=8).map("".join)


def read(form: AnswerFormat, pieces: list[str]) -> ParsedText:
    reader = AnswerReader(form)
    said = ParsedText()
    for piece in pieces:
        said += reader.push(piece)
    return said + reader.end()


@given(st.sampled_from(FORMS), TEXTS, st.data())
def test_any_cut_of_a_text_says_the_same(form: AnswerFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    said = form.read(text)
    assert read(form, pieces) == said
    assert read(form, list(text)) == said
    assert [call.index for call in said.calls] == list(range(len(said.calls)))
    for call in said.calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict) and json.dumps(arguments, ensure_ascii=False).encode()


@given(st.sampled_from([AnswerFormat(calls) for calls in ("none", *CALL_FORMS)]), TEXTS)
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
        bound = MAX_UNDECIDED if form.tool_parser == "llama3_json" else LONGEST_MARK
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
    ],
)
def test_calls_are_read_in_each_familys_form(form: str, text: str, content: str, calls: list[object]) -> None:
    said = AnswerFormat(form).read(text)
    assert read(AnswerFormat(form), list(text)) == said
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
def test_reasoning_is_told_from_content(parser: str, text: str, reasoning: str, content: str) -> None:
    assert AnswerFormat("none", parser).read(text) == ParsedText(content, reasoning)
    assert read(AnswerFormat("none", parser), list(text)) == ParsedText(content, reasoning)


def test_calls_stand_behind_reasoning_and_never_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    said = AnswerFormat("hermes", "think").read(f"<think>{call}</think>\n{call}")
    assert (said.reasoning, said.content, len(said.calls)) == (call, "", 1)


@pytest.mark.parametrize("form", CALL_FORMS)
def test_of_one_call_the_others_are_left_out_however_the_text_is_cut(form: str) -> None:
    key = "parameters" if form == "llama3_json" else "arguments"
    calls = [json.dumps({"name": name, key: {}}) for name in "fgh"]
    texts = {
        "hermes": "".join(f"<tool_call>{call}</tool_call>" for call in calls),
        "llama3_json": ";".join(calls),
        "mistral": f"[TOOL_CALLS][{','.join(calls)}]",
    }
    wanted = AnswerFormat(form, one_call=True)
    for pieces in ([texts[form]], list(texts[form])):
        assert [call.name for call in read(wanted, pieces).calls] == ["f"]


def test_the_longest_end_that_may_begin_a_mark_is_held() -> None:
    assert [num_held(text, "<<a") for text in ("", "<", "x<<", "<<<", "<<a", "<a")] == [0, 1, 2, 2, 0, 0]
