"""Variables of a request in the chat template, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.contract.errors import RequestError
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{{ reasoning_effort }}{% endif %}"
)
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The river"}]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False, "reasoning_effort": "none"},
        {"enable_thinking": True, "reasoning_effort": "high"},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"continue_final_message": True, "enable_thinking": False},
    ],
)
def test_variables_render_as_in_transformers(variables: dict[str, Any], model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text(TEMPLATE)
    theirs: Any = AutoTokenizer.from_pretrained(model_copy)
    adds = not variables.get("continue_final_message")
    want = theirs.apply_chat_template(CHAT, return_dict=False, **{"add_generation_prompt": adds, **variables})
    assert Tokenizer(model_copy).encode_chat(CHAT, None, json.dumps(variables)) == want


def test_a_name_is_shown_by_templates_that_use_it() -> None:
    message = {"role": "user", "content": "x", "name": "ann"}
    assert ChatTemplate(TEMPLATE, {}).render([message]).startswith("<user ann>x<end>")


def test_a_continued_message_keeps_its_white_space() -> None:
    chat = [{"role": "assistant", "content": "Once upon "}]
    text = ChatTemplate("{% for m in messages %}{{ m.content | trim }}<end>{% endfor %}", {}).render(
        chat, None, {"continue_final_message": True}
    )
    assert text == "Once upon "


def test_a_message_that_the_template_does_not_show_cannot_be_continued(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="cannot be continued"):
        Tokenizer(model_copy).encode_chat(CHAT, None, '{"continue_final_message": true}')


def test_variables_do_not_replace_the_conversation() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}{{ documents }}", {})
    said = template.render([{"role": "user", "content": "x"}], None, {"messages": [], "tools": 1, "documents": 2})
    assert said == "xNoneNone"
