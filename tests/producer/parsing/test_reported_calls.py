"""Public reports of calls that other servers read wrongly, in every format that can have the fault."""

from __future__ import annotations

import json

import pytest

from penstock.contract.calls.reading import Call
from penstock.contract.calls.writing import written_calls
from penstock.contract.tool_formats import BY_NAME, FORMATS
from penstock.producer.parsing.parsed_text import AnswerReader, ParsedText
from tests.producer.parsing.test_tool_formats import NAMES, format_of, framed, read


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


def test_brackets_of_a_shell_inside_a_text_end_no_call() -> None:
    """vllm-project/vllm#21544: braces in a command without an end broke the call."""
    command = "mkdir -p test/{test1,test2"
    for name in NAMES:
        form = BY_NAME[name]
        text = framed(form, "", [("f", {"text": command})])
        for pieces in ([text], [*text]):
            (call,) = read(format_of(form), pieces).calls
            assert (json.loads(call.arguments), call.end) == ({"text": command}, "whole"), name


def test_json_without_a_mark_is_no_call() -> None:
    """ggml-org/llama.cpp#18183: sample code of an answer became a call of a function that was not offered."""
    text = 'Send this:\n```json\n{"name": "f", "arguments": {"count": 1}}\n```\n{"name": "f", "arguments": {}}'
    for name in NAMES:
        form = BY_NAME[name]
        assert read(format_of(form), [*framed(form, text)]) == ParsedText(text), name


def test_two_calls_without_arguments_are_the_same_whole_and_token_by_token() -> None:
    """sgl-project/sglang#35564: in eight formats a call was lost, or counted from 1, or a number became a text."""
    for name in NAMES:
        form = BY_NAME[name]
        calls = [("f", {}), ("f", {"count": 123})][: 1 if form.is_single else 2]
        text = framed(form, "", calls)
        said = read(format_of(form), [*text])
        assert said == format_of(form).read(text)
        found = [(call.index, call.name, json.loads(call.arguments)) for call in said.calls]
        assert found == [(i, *call) for i, call in enumerate(calls)], name


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_no_call_is_lost_whichever_two_pieces_a_text_has(name: str) -> None:
    """sgl-project/sglang#35563: a stream of two chunks lost calls and names."""
    form = FORMATS[name]
    calls = [("f", {}), ("get.the-Time_2", {}), ("f", {"count": -7})]
    text = written_calls(form, calls)
    for at in range(len(text)):
        said = read(format_of(form), [text[:at], text[at:]])
        assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls


def test_a_stream_names_a_call_once_and_its_pieces_add_up() -> None:
    """vllm-project/vllm#19056 and #18108: pieces without an index, a brace too many, one of two numbers."""
    arguments = {"text": "R1-0528", "parts": [{"h2": "a", "guideline": "b, {c}"}] * 3, "count": 1, "share": 1.2}
    for name in NAMES:
        form = BY_NAME[name]
        reader, pieces = AnswerReader(format_of(form)), list[Call]()
        for char in framed(form, "", [("f", arguments)]):
            pieces += reader.push(char).calls
        pieces += reader.end().calls
        assert [piece.name for piece in pieces if piece.name] == ["f"], name
        assert {piece.index for piece in pieces} == {0}
        assert json.loads("".join(piece.arguments for piece in pieces)) == arguments
