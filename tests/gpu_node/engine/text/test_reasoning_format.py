"""What a chat template shows of its model's reasoning: marks, closing text, and how it takes earlier reasoning."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.contract.tool_formats import REASONING_MARKS, THINK
from penstock.gpu_node.engine.text.chat import ChatTemplate, reasoning_marks_of
from penstock.gpu_node.engine.text.reasoning_format import (
    EarlierReasoning,
    earlier_reasoning_of,
    reasoning_parser_of,
    takes_effort,
)
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

LAST = "{% for m in messages %}{{ m.role }}:{% if m.KEY %}<think>\n{{ m.KEY }}\n</think>\n\n{% endif %}{{ m.content }};"
TEMPLATE = LAST + "{% endfor %}{% if add_generation_prompt %}a:{% if reasoning_effort %}<think>{% endif %}{% endif %}"
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho", "reasoning": "hm"},
    {"role": "user", "content": "And?"},
]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (TEMPLATE.replace("KEY", "reasoning_content"), EarlierReasoning("reasoning_content", "\n</think>\n\n")),
        (TEMPLATE.replace("KEY", "thinking"), EarlierReasoning("thinking", "\n</think>\n\n")),
        (TEMPLATE.replace("m.KEY", "none"), EarlierReasoning(None, "</think>")),
        ("{{ raise_exception('no') }}<think>", EarlierReasoning(None, "</think>")),
        (
            TEMPLATE.replace("KEY", "reasoning").replace("</think>\n\n", "</think>Answer: "),
            EarlierReasoning("reasoning", "</think>"),
        ),
    ],
)
def test_closing_text_is_what_the_template_puts_behind_the_reasoning(source: str, want: EarlierReasoning) -> None:
    assert earlier_reasoning_of(ChatTemplate(source, {}), THINK) == want


@pytest.mark.parametrize("marks", REASONING_MARKS)
def test_marks_are_those_that_the_template_contains(marks: tuple[str, str]) -> None:
    template = ChatTemplate("{{ messages[0].content }}{# " + " ".join(marks) + " #}", {})
    assert (reasoning_marks_of(template), reasoning_parser_of(template)) == (marks, "think")
    assert not takes_effort(template) and takes_effort(ChatTemplate("{{ reasoning_effort }}", {}))


def test_tokenizer_gives_the_rule_and_the_template_earlier_reasoning(model_copy: Path) -> None:
    path = model_copy / "chat_template.jinja"
    path.write_text(TEMPLATE.replace("KEY", "reasoning_content"))
    tokenizer = Tokenizer(model_copy)
    rule = tokenizer.reasoning_rule(None)
    assert rule is not None and (rule.opening, rule.closing) == (b"<think>", b"</think>")
    assert b"".join(tokenizer.token_bytes[one] for one in rule.closing_ids) == b"\n</think>\n\n"
    assert "<think>\nhm\n</think>\n\nho;" in tokenizer.text_of(tokenizer.encode_chat(CHAT))
    given = Tokenizer(model_copy, reasoning_parser="think_open")
    open_rule = given.reasoning_rule('{"enable_thinking": false}')
    assert open_rule is not None and open_rule.opening == b"" and given.thinking_switches == ()
    assert Tokenizer(model_copy, reasoning_parser="none").reasoning_rule(None) is None


def test_template_that_refuses_reasoning_beside_a_text_gets_the_text(model_copy: Path) -> None:
    refusing = "{% for m in messages %}{% if m.thinking and loop.length > 2 %}{{ raise_exception('both') }}{% endif %}"
    path = model_copy / "chat_template.jinja"
    path.write_text(refusing + "{{ m.thinking }}{{ m.content }}{% endfor %}<think>")
    tokenizer = Tokenizer(model_copy)
    assert tokenizer.text_of(tokenizer.encode_chat(CHAT)) == "hihoAnd?<think>"
