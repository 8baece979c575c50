"""Grammars of every format of calls: sampled calls parse and fit their schemas, and written ones are derived."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.guided import mask_of
from fixtures.tiny_model import write_tokenizer

from penstock.contract.calls.writing import written_calls
from penstock.contract.errors import RequestError
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tool_formats import BY_NAME, FALLBACK, FORMATS, ToolFormat, tokens_in
from penstock.gpu_node.engine.structured.call_grammar import MAX_TOLD_CALLS
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.producer.parsing.parsed_text import AnswerFormat

EOS = 2
NAMES = [*FORMATS, FALLBACK.name]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "x": {"type": "integer", "minimum": 0, "maximum": 9},
        "on": {"type": "boolean"},
    },
    "required": ["kind", "x"],
    "additionalProperties": False,
}
FREE: dict[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FUNCTIONS = [
    {"name": "move", "parameters": json.dumps(PARAMETERS)},
    {"name": "write", "parameters": json.dumps(FREE | {"additionalProperties": False})},
    {"name": "stop", "parameters": json.dumps({"properties": {}, "additionalProperties": False})},
]
TOOLS = json.dumps(
    [{"type": "function", "function": one | {"parameters": json.loads(one["parameters"])}} for one in FUNCTIONS]
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 384)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer.token_bytes), frozenset({EOS}))


def wanted(form: ToolFormat, functions: list[dict[str, Any]] = FUNCTIONS, **options: Any) -> StructuredOutputs:
    return StructuredOutputs.model_validate({"calls": {"form": form, "functions": functions, **options}})


def allowed(guides: GrammarCompiler, guide: Guide) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_of(guides, guide).words.view(np.uint8), bitorder="little")).tolist()


def as_answered(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as a model writes them behind its prompt."""
    before, after = form.recipient
    header = f"{before}{calls[0][0]}{after}" if before else ""
    return header + written_calls(form, calls).removeprefix(form.begun)


def derives(guides: GrammarCompiler, tokenizer: Tokenizer, output: StructuredOutputs, text: str) -> bool:
    guide = guides.new_guide(guides.prepare(output))
    guide.take(tokenizer.encode(text, framed=False))
    return EOS in allowed(guides, guide)


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_call_parses_and_fits_its_schema(guides: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    form, rng = BY_NAME[name], random.Random(name)
    only = [FUNCTIONS[0]]
    guide, token_ids = guides.new_guide(guides.prepare(wanted(form, only, parallel=False))), list[int]()
    while (token_id := rng.choice(allowed(guides, guide))) != EOS:
        guide.take([token_id])
        token_ids.append(token_id)
        assert len(token_ids) < 500
    frame = form if form.has_frame else None
    said = AnswerFormat(form, functions=TOOLS, frame=frame).read(tokenizer.decode(token_ids))
    assert (said.content, [(call.name, call.end) for call in said.calls]) == ("", [("move", "whole")])
    arguments = json.loads(said.calls[0].arguments)
    assert arguments["kind"] in ("a", "b c") and 0 <= arguments["x"] <= 9
    assert type(arguments.get("on", True)) is bool and arguments.keys() <= PARAMETERS["properties"].keys()


def test_a_told_model_cannot_repeat_a_call_without_end(guides: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Each answer of the demo model to openai-agents reached its token limit, because it called one function again."""
    calls = [("stop", dict[str, Any]())] * MAX_TOLD_CALLS
    assert derives(guides, tokenizer, wanted(FALLBACK), written_calls(FALLBACK, calls))
    guide = guides.new_guide(guides.prepare(wanted(FALLBACK)))
    guide.take(tokenizer.encode(written_calls(FALLBACK, calls), framed=False))
    assert allowed(guides, guide) == [EOS]


def test_calls_of_a_list_may_have_marks_of_their_own(guides: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """No format of the table is so, but a derived one may be."""
    form = ToolFormat("derived", "json", "<acts>", "</acts>", "<act>", "</act>", between="\n", padding=" ")
    text = written_calls(form, [("stop", {}), ("write", {"text": "a"})])
    assert derives(guides, tokenizer, wanted(form), text)
    assert not derives(guides, tokenizer, wanted(form), text.replace("</act>", "", 1))
    named = ToolFormat("derived", "named", call="<fn:", call_end=":fn>")
    assert derives(guides, tokenizer, wanted(named), written_calls(named, [("stop", {})]))


SPECIAL = sorted(
    {
        part
        for name in ("harmony", "muse", "kimi_k3", "minimax_m3", "gemma4", "lfm2", "gigachat3", "apertus")
        for mark in (*FORMATS[name].marks, *FORMATS[name].frame_marks, FORMATS[name].turn)
        for part in tokens_in(mark)
        if len(part) > 2 and part[0] in "<]" and part[-1] in ">[" and not part.startswith(("</", "<atem"))
    }
)
"""Marks that these models have as special tokens."""


@pytest.fixture(scope="module")
def special_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("special")
    write_tokenizer(folder, 384)
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    first = max(token["id"] for token in spec["added_tokens"] + [{"id": max(spec["model"]["vocab"].values())}]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] += [
        {"id": first + i, "content": mark, "special": True, **flags} for i, mark in enumerate(SPECIAL)
    ]
    file.write_text(json.dumps(spec))
    # The marks around messages tell only where the chat template has them.
    return Tokenizer(folder, chat_template="{# " + " ".join(SPECIAL) + " #}{{ messages[0].content }}")


@pytest.fixture(scope="module")
def special_guides(special_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(special_tokenizer, len(special_tokenizer.token_bytes), frozenset({EOS}))


@pytest.mark.parametrize("name", ["harmony", "muse", "kimi_k3", "minimax_m3", "gemma4", "lfm2", "gigachat3", "apertus"])
def test_marks_that_are_special_tokens_are_forced_as_tokens(
    special_guides: GrammarCompiler, special_tokenizer: Tokenizer, name: str
) -> None:
    form, rng = BY_NAME[name], random.Random(name)
    frame = form if form.has_frame else None
    reader = AnswerFormat(form, "think", functions=TOOLS, frame=frame, marks=form.reasoning)
    output = wanted(form, [FUNCTIONS[0]], parallel=False)
    guide, token_ids = special_guides.new_guide(special_guides.prepare(output)), list[int]()
    while (token_id := rng.choice(allowed(special_guides, guide))) != EOS:
        guide.take([token_id])
        token_ids.append(token_id)
        assert len(token_ids) < 500
    said = reader.read(special_tokenizer.decode(token_ids))
    assert (said.content, [(call.name, call.end) for call in said.calls]) == ("", [("move", "whole")])
    text = as_answered(form, [("write", {"text": "a\n<b>"})])
    whole = wanted(form, [FUNCTIONS[1]], parallel=False)
    assert derives(special_guides, special_tokenizer, whole, text)


@pytest.mark.parametrize("name", NAMES)
def test_written_calls_are_derived(guides: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    form = BY_NAME[name]
    move, wrong = ("move", {"kind": "b c", "x": 5}), ("move", {"kind": "c", "x": 5})
    write = ("write", {"text": "two\nlines, <b> & more"})
    for calls in ([move], [write], [("stop", {})], [move, write, ("stop", {})]):
        text = as_answered(form, calls)
        if form.is_single and len(calls) > 1:
            assert not derives(guides, tokenizer, wanted(form), text)
            continue
        assert derives(guides, tokenizer, wanted(form), text)
        assert derives(guides, tokenizer, wanted(form, required=False), text)
        assert derives(guides, tokenizer, wanted(form, parallel=False), text) is (len(calls) == 1)
    for required in (True, False):
        assert not derives(guides, tokenizer, wanted(form, required=required), as_answered(form, [wrong]))
    said = f"{form.text_opening.removeprefix(form.begun)}Well, <b> [1]\n{form.text_end}"
    assert derives(guides, tokenizer, wanted(form, required=False), said)
    assert not derives(guides, tokenizer, wanted(form), "Well.")


def test_a_schema_that_tags_cannot_hold_is_refused_by_name(guides: GrammarCompiler) -> None:
    for schema in (
        {"properties": {"a": {"type": "string", "minLength": 3}}},
        {"properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}]},
        {"properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"properties": {"a>": {"type": "string"}}},
    ):
        functions = [{"name": "g", "parameters": json.dumps(schema)}]
        with pytest.raises(RequestError, match=r"no grammar can hold .*'g'") as caught:
            guides.prepare(wanted(FORMATS["qwen3_coder"], functions))
        assert caught.value.param == "tools"
