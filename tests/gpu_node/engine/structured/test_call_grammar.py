"""Grammars of tool calls: whatever tokens are sampled, the parsers read them as calls of the offered tools."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes.cover import FULL
from fakes.guided import mask_of
from fixtures.tiny_model import write_tokenizer
from pydantic import BaseModel, ConfigDict, Field

from penstock.contract.errors import RequestError
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tool_formats import FORMATS
from penstock.contract.tools import MAX_CALLS, text_parameters
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.structured.guide import Guide
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.producer.parsing.parsed_text import AnswerFormat, ParsedText

EOS = 2
MARKS = {"<tool_call>": False, "</tool_call>": False, "[TOOL_CALLS]": True, "<think>": False, "</think>": False}
"""And whether they are special: as in Qwen's tokenizers, and Mistral's."""
FORMS = ("hermes", "llama3_json", "mistral")
REASONINGS = ("none", "think", "think_open")
NUM_DRAWN = 5 if FULL else 3
TOKENS, SPELLED = "marks are tokens", "marks are spelled"
DRAWN = [
    pytest.param(
        marks, form, reasoning, marks=pytest.mark.slow if (marks, reasoning != "none") == (SPELLED, True) else ()
    )
    for marks in (TOKENS, SPELLED)
    for form in FORMS
    for reasoning in REASONINGS
]
"""Where `</think>` is spelled, hardly any reasoning ends by chance, so that no call is read behind it."""


class Location(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    x: int = Field(ge=-9, le=9)


class Move(BaseModel):
    """Schemas of nested models refer to their own `$defs`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    to: Location
    fast: bool


ODD = 'sé"\n[x]; <b>'
FUNCTIONS = [
    {"name": "move", "parameters": json.dumps(Move.model_json_schema())},
    {"name": ODD, "parameters": json.dumps({"properties": {}, "additionalProperties": False})},
]


@pytest.fixture(scope="module", params=[TOKENS, SPELLED])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 384)
    if request.param == TOKENS:
        path = folder / "tokenizer.json"
        config = json.loads(path.read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        first = 1 + max(*config["model"]["vocab"].values(), *(token["id"] for token in config["added_tokens"]))
        config["added_tokens"] += [
            {"id": first + i, "content": mark, "special": special, **flags}
            for i, (mark, special) in enumerate(MARKS.items())
        ]
        path.write_text(json.dumps(config))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer.token_bytes), frozenset({EOS}))


def calls(form: str, **options: Any) -> StructuredOutputs:
    return StructuredOutputs.model_validate({"calls": {"form": FORMATS[form], "functions": FUNCTIONS, **options}})


def allowed(guides: GrammarCompiler, guide: Guide) -> list[int]:
    masks = mask_of(guides, guide)
    return np.flatnonzero(np.unpackbits(masks.words.view(np.uint8), bitorder="little")).tolist()


def draw(guides: GrammarCompiler, tokenizer: Tokenizer, wanted: StructuredOutputs, rng: random.Random) -> str | None:
    """Return a text of random allowed tokens, marker tokens more often. None if it does not end."""
    guide, token_ids = guides.new_guide(guides.prepare(wanted)), []
    marks = {tokenizer.id_of(mark) for mark in MARKS} | {EOS}
    for _ in range(200):
        may = allowed(guides, guide)
        likely = [token_id for token_id in may if token_id in marks]
        token_id = rng.choice(likely if likely and rng.random() < 0.3 else may)
        if token_id == EOS:
            return tokenizer.decode(token_ids)
        guide.take([token_id])
        token_ids.append(token_id)
    return None


def check_calls(said: ParsedText) -> None:
    for call in said.calls:
        if call.name == "move":
            Move.model_validate_json(call.arguments)
        else:
            assert (call.name, call.arguments) == (ODD, "{}")


@pytest.mark.parametrize(("tokenizer", "form", "reasoning"), DRAWN, indirect=["tokenizer"], scope="module")
def test_any_sampled_text_parses_as_calls(
    guides: GrammarCompiler, tokenizer: Tokenizer, form: str, reasoning: str
) -> None:
    rng, read = random.Random(form + reasoning), AnswerFormat(FORMATS[form], reasoning)
    for parallel in (True, False):
        wanted = calls(form, reasoning=reasoning, parallel=parallel)
        drawn = [draw(guides, tokenizer, wanted, rng) for _ in range(NUM_DRAWN)]
        texts = [text for text in drawn if text is not None]
        assert len(texts) > 1 or reasoning != "none"
        for said in map(read.read, texts):
            assert said.content == "" and 1 <= len(said.calls) <= (MAX_CALLS if parallel else 1)
            check_calls(said)


@pytest.mark.parametrize(("tokenizer", "form", "reasoning"), DRAWN, indirect=["tokenizer"], scope="module")
def test_text_that_parses_as_a_call_among_other_text_is_a_valid_call(
    guides: GrammarCompiler, tokenizer: Tokenizer, form: str, reasoning: str
) -> None:
    rng, read = random.Random(form + reasoning), AnswerFormat(FORMATS[form], reasoning)
    for _ in range(NUM_DRAWN):
        text = draw(guides, tokenizer, calls(form, reasoning=reasoning, required=False), rng)
        check_calls(read.read(text or ""))


def derives(guides: GrammarCompiler, tokenizer: Tokenizer, wanted: StructuredOutputs, text: str) -> bool:
    guide = guides.new_guide(guides.prepare(wanted))
    guide.take(tokenizer.encode(text))
    return EOS in allowed(guides, guide)


def written(form: str, *arguments: object, name: str = "move") -> str:
    """Return calls as models of a family write them."""
    key = "parameters" if form == "llama3_json" else "arguments"
    said = [json.dumps({"name": name, key: one}) for one in arguments]
    if form == "mistral":
        return f"[TOOL_CALLS] [{', '.join(said)}]"
    if form == "llama3_json":
        return "; ".join(said)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in said)


THERE, HERE = {"to": {"x": 5}, "fast": True}, {"to": {"x": -1}, "fast": False}


@pytest.mark.parametrize("form", FORMS)
def test_a_required_call_is_all_of_a_text(guides: GrammarCompiler, tokenizer: Tokenizer, form: str) -> None:
    may: Callable[[str], bool] = lambda text: derives(guides, tokenizer, calls(form), text)  # noqa: E731
    assert may(written(form, THERE)) and may(written(form, THERE, HERE))
    assert not may("") and not may("Well. " + written(form, THERE)) and not may(written(form, THERE) + " Well.")
    assert not may(written(form, {"to": {"x": 50}, "fast": True})) and not may(written(form, {"to": {"x": 5}}))
    assert not may(written(form, THERE, name="stop"))
    # Where any space is allowed, some models write nothing else.
    assert not may(written(form, THERE).replace('"x": 5', '"x":  5'))
    alone = calls(form, parallel=False)
    assert derives(guides, tokenizer, alone, written(form, THERE))
    assert not derives(guides, tokenizer, alone, written(form, THERE, HERE))


@pytest.mark.parametrize("form", FORMS)
def test_optional_call_matches_its_schema_and_other_text_is_free(
    guides: GrammarCompiler, tokenizer: Tokenizer, form: str
) -> None:
    def may(text: str, **options: Any) -> bool:
        return derives(guides, tokenizer, calls(form, required=False, **options), text)

    assert may("") and may("Well, {1}: [two] <b>\n") and may(written(form, THERE, HERE))
    assert not may(written(form, {"to": {"x": 50}, "fast": True})) and not may(written(form, THERE, name="stop"))
    assert may(written(form, THERE), parallel=False) and not may(written(form, THERE, HERE), parallel=False)
    if form != "llama3_json":
        assert may("Well. " + written(form, THERE))
    if form == "hermes":
        assert may(f"One {written(form, THERE)} two {written(form, HERE)} three.")


@pytest.mark.parametrize("form", ["hermes", "mistral"])
@pytest.mark.parametrize("reasoning", ["none", "think"])
def test_text_without_a_call_matches_the_answers_schema(
    guides: GrammarCompiler, tokenizer: Tokenizer, form: str, reasoning: str
) -> None:
    wanted = calls(form, reasoning=reasoning, required=False, answer=json.dumps(Location.model_json_schema()))

    def may(text: str) -> bool:
        return derives(guides, tokenizer, wanted, text)

    assert may('{"x": 3}') and may(written(form, THERE, HERE))
    assert not may("") and not may("Well.") and not may('{"x": 30}') and not may('{"x": 3}' + written(form, THERE))
    assert not may('Well. {"x": 3}') and not may(written(form, {"to": {"x": 50}, "fast": True}))
    assert may('<think>hm</think>\n\n{"x": 3}') is (reasoning == "think")


def test_unenforceable_schema_of_an_answer_is_named(guides: GrammarCompiler) -> None:
    with pytest.raises(RequestError) as caught:
        guides.prepare(calls("hermes", required=False, answer='{"type": "text"}'))
    assert caught.value.param == "structured_outputs.json_schema"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("required", [True, False])
def test_reasoning_stands_before_calls(
    guides: GrammarCompiler, tokenizer: Tokenizer, form: str, required: bool
) -> None:
    def may(reasoning: str, text: str) -> bool:
        return derives(guides, tokenizer, calls(form, reasoning=reasoning, required=required), text)

    call = written(form, THERE)
    assert may("think", f"<think>so <b>?\n</think>{call}") and may("think", call)
    assert may("think_open", f"so <b>?\n</think>{call}") and not may("think_open", call)
    if required:
        assert may("think", f"<think>hm\n</think>\n\n{call}") and not may("none", f"<think>hm</think>{call}")


@pytest.mark.parametrize("mark", ["</think>", "<tool_call>"])
def test_mark_with_a_special_token_is_never_spelled_out(
    guides: GrammarCompiler, tokenizer: Tokenizer, mark: str
) -> None:
    spelled = [token_id for char in mark for token_id in tokenizer.encode(char)]
    guide = guides.new_guide(guides.prepare(calls("hermes", reasoning="think_open", required=False)))
    guide.take(tokenizer.encode("so " if mark == "</think>" else "so</think>well ") + spelled[:-1])
    assert allowed(guides, guide)
    guide.take(spelled[-1:])
    assert bool(allowed(guides, guide)) is (tokenizer.id_of(mark) is None)


def test_function_with_unenforceable_parameters_is_named(guides: GrammarCompiler) -> None:
    unenforceable = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    own_options = {"type": "object", "x-guidance": {"lenient": True}}
    for parameters in ({"type": "array"}, unenforceable, own_options, {"type": ["string", "null"]}):
        functions = [*FUNCTIONS, {"name": "g", "parameters": json.dumps(parameters)}]
        with pytest.raises(RequestError, match="'g'") as caught:
            guides.prepare(calls("hermes", functions=functions))
        assert caught.value.param == "tools"
        assert "\n" not in caught.value.message


def test_a_schema_of_a_function_is_rewritten_as_others_are(guides: GrammarCompiler) -> None:
    tags = {"type": "array", "items": {"type": "string", "format": "slug"}, "uniqueItems": False}
    parameters = {"properties": {"tags": tags}, "dependentRequired": {"tags": ["by"]}}
    functions = [{"name": "x: %json {", "parameters": json.dumps(parameters)}]
    assert guides.prepare(calls("hermes", functions=functions)).kind == "calls"


PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Delete File: " filename LF | "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
"""The form of the grammar that Codex sends for its tool `apply_patch`."""
SUM = """
start: sum
sum: term (("+" | "-") term)* // of terms
term: NUMBER | "(" sum ")"
%import common.NUMBER
"""
SPACED = SUM + "%import common (WS, INT)\n%ignore WS\n"
VALUE = """
?start: object | list | ESCAPED_STRING | SIGNED_NUMBER
list: "[" [start ("," start)*] "]"
object: "{" [pair ("," pair)*] "}"
pair.2: ESCAPED_STRING ":" start
%import common.ESCAPED_STRING
%import common.SIGNED_NUMBER -> SIGNED_NUMBER
"""
WORDS = 'start: "select"i WS COLUMN ~ 2..3 ["\\x3b"]\nCOLUMN: "a".."c"\nWS: /[ \\t]+/\n'
A_PATCH = '*** Begin Patch\n*** Add File: a.txt\n+Nile: "6650" km \\ é\t\n+\n*** Delete File: b\n*** End Patch\n'
TEXTS = [
    ("lark", PATCH, [A_PATCH, A_PATCH[:-1]], [A_PATCH.replace("+Nile", "Nile"), A_PATCH + "\n", ""]),
    ("lark", SUM, ["1+(2-3.5)", "((1))"], ["1+", "(1", "1 + 2"]),
    ("lark", SPACED, ["1 +\n(2-3)", "((1))"], ["1+", "(1"]),
    ("lark", VALUE, ['{"a":[1,"x\\"y\\n"]}', "[]"], ['{"a":}', "[1", "{'a':1}"]),
    ("lark", WORDS, ["SeLect  abc", "select\tab;"], ["selec ab", "select a", "select ad"]),
    ("regex", r'^[a-z"\\]+\n\d{2}$', ['a"\\\n12'], ["a12", "A\n12", "a\n123"]),
    ("regex", r"(?s).*x|\p{L}\u00e9", ["\n\n\x01x", "ßé"], ["\n", "1é"]),
    ("regex", r"(?i)stop\t[^\w\s]", ["STOP\t!", 'stop\t"'], ["stop\ta", "stop\t\n", "stopT!"]),
]
REFUSED_TEXTS = [
    ("lark", 'first: "a"', "start"),
    ("lark", "start: other", "'other'"),
    ("lark", 'start: %json {"type": "object"}', "%json"),
    ("lark", "start: line+ start?\nline: /.+/ LF\n%import common.LF", "terminal that may go on"),
    ("lark", "%import python.NAME", "%import"),
    ("regex", r"a(?=b)", "'(?=b'"),
    ("regex", r"[[:alpha:]]", "class inside a class"),
    ("regex", "[a-", "no end"),
]


def text_calls(form: str, syntax: str, definition: str) -> StructuredOutputs:
    parameters = json.dumps(text_parameters((syntax, definition)))
    return calls(form, functions=[{"name": "write", "parameters": parameters}])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("syntax", "definition", "derived", "other"), TEXTS)
def test_the_text_of_a_custom_tool_matches_its_grammar(
    guides: GrammarCompiler,
    tokenizer: Tokenizer,
    form: str,
    syntax: str,
    definition: str,
    derived: list[str],
    other: list[str],
) -> None:
    wanted = text_calls(form, syntax, definition)

    def may(text: str) -> bool:
        said = written(form, {"input": "X"}, name="write").replace('"X"', json.dumps(text, ensure_ascii=False))
        return derives(guides, tokenizer, wanted, said)

    assert [text for text in derived if not may(text)] == []
    assert [text for text in other if may(text)] == []


@pytest.mark.parametrize(("syntax", "definition", "said"), REFUSED_TEXTS)
def test_a_grammar_of_a_text_that_cannot_be_enforced_is_refused_by_name(
    guides: GrammarCompiler, syntax: str, definition: str, said: str
) -> None:
    with pytest.raises(RequestError, match="the grammar of 'write' cannot be enforced") as caught:
        guides.prepare(text_calls("hermes", syntax, definition))
    assert said in caught.value.message and caught.value.param == "tools"
