"""Tools and calls in chat templates, compared with transformers, and the properties found from a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.contract.errors import RequestError
from penstock.contract.tools import reasoning_parser_for
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.reasoning_format import reasoning_parser_of, thinking_switches_of
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "é",
            "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
        },
    }
]
CALLED = {"id": "abcdef123", "name": "f", "arguments": '{"b": "ü", "a": [1]}'}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "content": "done", "tool_call_id": "abcdef123"},
]
FUNCTION = {"name": "f", "arguments": {"b": "ü", "a": [1]}}
THEIR_CHAT = [
    CHAT[0],
    CHAT[1] | {"tool_calls": [{"id": "abcdef123", "type": "function", "function": FUNCTION}]},
    CHAT[2] | {"name": "f"},
]
TEMPLATES = {
    "hermes": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}{{ m.role }} {{ m.name }}:{{ m.content }}{% for call in m.tool_calls %}"
        '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
        "</tool_call>{% endfor %}{% endfor %}"
    ),
    "mistral": (
        "{% if tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
        '{% set out = call.function | tojson %}{{ out[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]'
        '{% elif m.role == "tool" %}{{ m.tool_call_id }} {{ m.content }}'
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "llama3_json": (
        "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
        "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
        '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
        "{% elif m.role == 'tool' %}ipython{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_tools_calls_and_results_render_as_in_transformers(form: str, model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text(TEMPLATES[form])
    theirs: Any = AutoTokenizer.from_pretrained(model_copy)
    ours = Tokenizer(model_copy)
    assert (ours.tool_format.name, ours.reasoning_parser) == (form, "none")
    for tools in (None, TOOLS):
        want = theirs.apply_chat_template(THEIR_CHAT, tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(CHAT, tools and json.dumps(tools)) == want


@pytest.mark.parametrize(
    ("source", "parser"),
    [
        ("{{ messages[0].content }}", "none"),
        ("{{ messages[0].content.split('</think>')[-1] }}{# <think> #}", "think"),
        ("{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}", "think_open"),
        ("{{ raise_exception('no') }}<think>", "think"),
    ],
)
def test_reasoning_parser_is_detected_from_the_template(source: str, parser: str) -> None:
    assert reasoning_parser_of(ChatTemplate(source, {})) == parser


HYBRID = (
    "{{ messages[0].content }}{% if add_generation_prompt %}<assistant>{% if CONDITION %}<think>{% else %}</think>"
    "{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("condition", "parser", "switches"),
    [
        ("enable_thinking is not defined or enable_thinking", "think_open", ("enable_thinking=false",)),
        ("thinking is defined and thinking", "think", ("thinking=true",)),
        ("true", "think_open", ()),
        ("false", "think", ()),
    ],
)
def test_template_shows_which_variables_open_the_reasoning(
    condition: str, parser: str, switches: tuple[str, ...]
) -> None:
    template = ChatTemplate(HYBRID.replace("CONDITION", condition), {})
    assert reasoning_parser_of(template) == parser
    assert thinking_switches_of(template) == switches


@pytest.mark.parametrize(
    ("variables", "is_open"),
    [
        (None, True),
        ({}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}, False),
        ({"thinking": False}, True),
        ({"enable_thinking": 0}, True),
        ({"continue_final_message": True}, False),
        ({"add_generation_prompt": False}, False),
    ],
)
def test_parser_of_an_answer_follows_what_the_template_renders(
    variables: dict[str, object] | None, is_open: bool
) -> None:
    source = HYBRID.replace("CONDITION", "enable_thinking is not defined or enable_thinking is not false")
    template = ChatTemplate(source, {})
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat, None, variables or {}).endswith("<think>") == is_open
    kwargs = None if variables is None else json.dumps(variables)
    parser = reasoning_parser_for(reasoning_parser_of(template), thinking_switches_of(template), kwargs)
    assert parser == ("think_open" if is_open else "think")


def test_tools_are_told_if_the_template_does_not_render_them(model_copy: Path) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (model_copy / "chat_template.jinja").write_text(source)
    tokenizer = Tokenizer(model_copy)
    text = tokenizer.text_of(tokenizer.encode_chat(CHAT, json.dumps(TOOLS)))
    assert text.startswith("[system]You can call") and '"name": "f"' in text
    call = '<tool_call>\n{"name": "f", "arguments": {"b": "ü", "a": [1]}}\n</tool_call>'
    assert text.endswith(f"[user]hi[assistant]{call}[tool]done[assistant]")
    with pytest.raises(RequestError, match="takes no tools"):
        Tokenizer(model_copy, tool_parser="none").encode_chat(CHAT, json.dumps(TOOLS))


def test_marks_of_calls_stay_in_the_text_although_they_are_special_tokens(model_copy: Path) -> None:
    path = model_copy / "tokenizer.json"
    config = json.loads(path.read_text())
    first = max(token["id"] for token in config["added_tokens"]) + max(config["model"]["vocab"].values()) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, mark in enumerate(("[TOOL_CALLS]", "[INST]")):
        config["added_tokens"].append({"id": first + number, "content": mark, "special": True, **flags})
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer(model_copy)
    assert tokenizer.decode(tokenizer.encode("[TOOL_CALLS][INST]x")) == "[TOOL_CALLS]x"
