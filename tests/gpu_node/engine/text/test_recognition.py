"""Formats of calls are recognized by what a template renders, and never wrongly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.contract.tool_formats import BY_NAME, FALLBACK, FORMATS, ToolFormat
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.recognition import recognized
from tests.source_tree import ROOT

_BEGIN = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
_EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"
_END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def template_of(form: ToolFormat) -> str:
    """Return a small template that renders calls in a format."""
    separator = "{% if not loop.last %}" + form.between + "{% endif %}"
    if form.kind == "json":
        written = '{"' + form.name_key + '": {{ f.name | tojson }}, "' + form.arguments_key
        written += '": {{ f.arguments | tojson }}}'
        call = written if form.is_bare else form.call + form.padding + written + form.padding + form.call_end
    elif form.kind == "named":
        head = ("{{ call.id }}" + form.id_end if form.id_end else "") + form.name_prefix + "{{ f.name }}"
        head += ":{{ loop.index0 }}" if form.counts_calls else ""
        call = form.call + head + form.name_end + "{{ f.arguments | tojson }}" + form.call_end
    else:
        newline = "\n" if form.has_newlines else ""
        told = "{{ 'true' if v is string else 'false' }}" if form.tells_text else ""
        value = newline + "{{ v if v is string else v | tojson }}" + newline
        argument = form.argument + "{{ k }}" + form.key_end + told + form.value + value + form.value_end
        each = "{% for k, v in f.arguments.items() %}" + argument + "{% endfor %}"
        call = form.call + "{{ f.name }}" + form.name_end + each + form.call_end
    brackets = ("[", "]") if form.is_list else ("", "")
    calls = form.section + brackets[0] + _EACH + call + separator + "{% endfor %}" + brackets[1] + form.section_end
    # Where calls have no mark, no text may stand before them.
    begin = _BEGIN.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}") if form.is_bare else _BEGIN
    return begin + "{% if m.tool_calls %}" + calls + "{% endif %}" + _END


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_is_recognized_by_what_it_renders(name: str) -> None:
    use = recognized(ChatTemplate(template_of(FORMATS[name]), {}), ())
    assert (use.form.name, use.offers_tools, use.shows_calls, use.shows_results) == (name, True, True, True)


@pytest.mark.parametrize(
    ("source", "offers_tools"),
    [
        ("{{ messages }}<tool_call>", False),
        (
            _BEGIN
            + "{% for c in m.tool_calls %}<tool_call>{{ c.function.name }}({{ c.function.arguments }}){% endfor %}"
            + _END,
            True,
        ),
        (_BEGIN + "{% for c in m.tool_calls %}{{ raise_exception('no') }}{% endfor %}<tool_call>" + _END, True),
        ("{% if tools %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}", True),
    ],
)
def test_what_is_not_recognized_is_told(source: str, offers_tools: bool) -> None:
    template = ChatTemplate(source, {})
    use = recognized(template, ())
    assert template.takes_tools is offers_tools
    assert (use.form, use.offers_tools, use.shows_calls) == (FALLBACK, False, False)


def test_marks_decide_where_no_call_is_rendered() -> None:
    source = "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# <|tool_call|> #}"
    use = recognized(ChatTemplate(source, {}), {"<|tool_call|>"})
    assert (use.form.name, use.offers_tools, use.shows_calls) == ("granite", True, False)


def test_the_operators_format_overrides() -> None:
    template = ChatTemplate(template_of(FORMATS["hermes"]), {})
    assert recognized(template, (), "glm45").form is FORMATS["glm45"]
    told = recognized(template, (), "json")
    assert (told.form, told.offers_tools) == (FALLBACK, False)
    assert recognized(ChatTemplate("{{ messages }}", {}), (), "hermes").form.is_told


def test_results_and_system_messages_go_where_the_template_shows_them() -> None:
    source = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    use = recognized(ChatTemplate(source, {}), ())
    assert (use.shows_results, use.has_system_role) == (False, False)


_ROW = re.compile(r"\| `(\w+)` \| (?:trial|its marks|told).*\| \d+ \| (.*) \|")
_PAGE = (ROOT / "docs/MODELS.md").read_text()
FORMAT_BY_TEMPLATE = {name: row[1] for row in _ROW.finditer(_PAGE) for name in row[2].split(", ")}
SOURCES = sorted(Path("build").rglob("llama.cpp/models/templates/*.jinja"))


@pytest.mark.skipif(not SOURCES, reason="the peer's source is not unpacked (make bench-peers)")
def test_the_table_of_the_page_is_right() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    found = {path.stem: recognized(ChatTemplate(path.read_text(), tokens), ()).form.name for path in SOURCES}
    assert found == FORMAT_BY_TEMPLATE


def test_the_table_names_known_formats() -> None:
    assert len(FORMAT_BY_TEMPLATE) == 70 and set(FORMAT_BY_TEMPLATE.values()) <= set(BY_NAME)
