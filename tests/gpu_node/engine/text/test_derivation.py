"""A template whose marks no record of the table has is read by a format that its renderings give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.tiny_model import write_tokenizer

from penstock.contract.calls.writing import written_calls
from penstock.contract.tool_formats import DERIVED, FALLBACK, FORMATS, ToolFormat
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.derivation import FIRST, SECOND, TEXTS, Rendered, candidates
from penstock.gpu_node.engine.text.recognition import recognized
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.producer.parsing.parsed_text import AnswerFormat
from tests.gpu_node.engine.text.test_recognition import template_of

_TAGS = {"call": "<use n=", "name_end": "/>", "call_end": "</use>", "argument": "<in n=", "key_end": "/>"}
OF_OWN = [
    replace(FORMATS["cohere"], section="<|act|>", section_end="<|/act|>", name_key="fn", arguments_key="args"),
    ToolFormat("lists", "json", "<acts>", "</acts>", "<act>", "</act>"),
    ToolFormat("ids", "named", "<|fns|>", "<|/fns|>", "<|fn|>", "<|/fn|>", name_end="<|in|>", id_end="<|of|>"),
    ToolFormat("numbers", "named", call="<fn>", call_end="</fn>", name_end="|>", number_mark="#"),
    ToolFormat("told", "tagged", **_TAGS | {"key_end": " text="}, value="/>", value_end="</in>", tells_text=True),  # type: ignore[arg-type]
    replace(FORMATS["gemma4"], call="<|do|>", call_end="<|/do|>", text_mark="<'>", name_end="[", arguments_end="]"),
    replace(FORMATS["lfm2"], section="<py>", section_end="</py>"),
]
"""Formats with other marks than those of the table."""


@pytest.mark.parametrize("form", OF_OWN, ids=lambda form: f"{form.kind}-{form.name}")
def test_a_format_is_derived_from_what_a_template_renders(form: ToolFormat) -> None:
    use = recognized(ChatTemplate(template_of(form), {}), ())
    assert (use.form.name, use.form.kind, use.form.is_list) == (DERIVED, form.kind, form.is_list)
    assert "derived" in use.reason and use.offers_tools and use.shows_calls
    calls = [("f", {"a": 'x "y"', "b": [1, {"c": None}]}), ("g", {})]
    said = AnswerFormat(use.form).read("Well. " + written_calls(use.form, calls))
    assert [(call.name, json.loads(call.arguments), call.end) for call in said.calls] == [
        (name, arguments, "whole") for name, arguments in calls
    ]
    assert said.content == "Well. "
    assert AnswerFormat(use.form).read("Well. " + written_calls(form, calls)) == said


@pytest.mark.parametrize(
    "call",
    [
        "<fn>{{ f.name }} {{ f.arguments | tojson | tojson }}</fn>",
        "Calling {{ f.name }} with {{ f.arguments | tojson }}.",
        "<fn>{{ f.name }}{% for k, v in f.arguments.items() %}, {{ k }} is {{ v }}{% endfor %}</fn>",
    ],
)
def test_what_cannot_be_read_back_is_told(call: str) -> None:
    source = template_of(FORMATS["gigachat31"]).replace("{% set f = call.function %}", "{% set f = call.function %}\0")
    begin, _, rest = source.partition("\0")
    template = ChatTemplate(begin + call + "{% endfor %}" + rest.partition("{% endfor %}")[2], {})
    assert recognized(template, ()).form == FALLBACK


def test_a_template_that_takes_one_call_gives_marks_too() -> None:
    said = f'<fn>{{"name": "{FIRST}", "in": {json.dumps(TEXTS)}}}</fn>'
    forms = list(candidates(Rendered(said, None, None, None)))
    assert ("<fn>", "</fn>", "in") in [(one.call, one.call_end, one.arguments_key) for one in forms]
    assert SECOND not in repr(forms)


def test_special_tokens_that_are_derived_marks_stay_in_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 384)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = 1 + max(*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"]))
    spec["added_tokens"] += [{"id": first + i, "content": mark, **flags} for i, mark in enumerate(("<|act|>", "<|x|>"))]
    file.write_text(json.dumps(spec))
    tokenizer = Tokenizer(tmp_path, chat_template=template_of(OF_OWN[0]) + "{# <|x|> #}")
    assert tokenizer.tool_format.section == "<|act|>"
    assert tokenizer.decode([first, first + 1]) == "<|act|>"
