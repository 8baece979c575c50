"""Formats of calls are recognized by what a template renders, and never wrongly."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from penstock.contract.tool_formats import BY_NAME, FALLBACK, FORMATS, ToolFormat
from penstock.gpu_node.engine.text.chat import ChatTemplate, ends_of_turn
from penstock.gpu_node.engine.text.recognition import recognized
from penstock.gpu_node.engine.text.repairs import refusals_of
from penstock.gpu_node.engine.text.telling import with_tools_written
from tests.source_tree import ROOT

_BEGIN = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
_EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"
_END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


_LITERALS = (
    "{% macro lit(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ v | tojson }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, o in v.items() %}{{ k }}:{{ lit(o) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for o in v %}"
    "{{ lit(o) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_NESTED = (
    "{% macro lit(k, v) %}OPEN{{ k }}>{% if v is mapping %}{% for i, o in v.items() %}{{ lit(i, o) }}{% endfor %}"
    "{% elif v is sequence and v is not string %}{% for o in v %}{{ lit('item', o) }}{% endfor %}"
    "{% else %}{{ v if v is string else v | tojson }}{% endif %}CLOSE{{ k }}>{% endmacro %}"
)


def call_of(form: ToolFormat) -> tuple[str, str]:
    """Return the macros and the text with which a template renders one call in a format."""
    head = form.call + ("{{ call.id }}" + form.id_end if form.id_end else "") + form.name_prefix + "{{ f.name }}"
    head += form.number_mark + "{{ loop.index0 }}" if form.number_mark else ""
    head += form.name_end.replace("{", "{{ '{' }}") if form.kind == "expressions" else form.name_end
    macros = ""
    if form.kind == "json":
        written = '{"' + form.name_key + '": {{ f.name | tojson }}, "' + form.arguments_key
        written += '": {{ f.arguments | tojson }}}'
        return "", written if form.is_bare else form.call + form.padding + written + form.padding + form.call_end
    if form.kind == "named":
        return "", head + "{{ f.arguments | tojson }}" + form.call_end
    if form.kind == "expressions":
        macros = _LITERALS.replace("QUOTE", form.text_mark) if form.text_mark else ""
        value = "{{ lit(v) }}" if form.text_mark else "{{ v | tojson }}"
        argument = "{{ k }}" + form.assigns + value + "{% if not loop.last %}" + form.comma + "{% endif %}"
    elif form.ends_with_key:
        macros = _NESTED.replace("OPEN", form.argument).replace("CLOSE", form.value_end)
        argument = "{{ lit(k, v) }}"
    else:
        newline = "\n" if form.has_newlines else ""
        told = "{{ 'true' if v is string else 'false' }}" if form.tells_text else ""
        told = "{{ 'string' if v is string else 'object' }}" if form.tells_type else told
        value = "{{ v if v is string else v | tojson }}"
        if form.has_cdata:
            value = "{% if v is string %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}"
        argument = form.argument + "{{ k }}" + form.key_end + told + form.value + newline + value + newline
        argument += form.value_end
    each = "{% for k, v in f.arguments.items() %}" + argument + "{% endfor %}"
    return macros, head + each + form.arguments_end + form.call_end


def template_of(form: ToolFormat) -> str:
    """Return a small template that renders calls in a format."""
    macros, call = call_of(form)
    separator = "{% if not loop.last %}" + form.between + "{% endif %}"
    brackets = ("[", "]") if form.is_list else ("", "")
    if form.is_fenced:
        brackets = ("\n```json\n[", "]```")
    if form.header:
        return macros + messages_of(form, call)
    marks = ("", "") if form.is_bare else (form.section, form.section_end)
    calls = marks[0] + brackets[0] + _EACH + call + separator + "{% endfor %}" + brackets[1] + marks[1]
    # Where calls have no mark, no text may stand before them.
    begin = _BEGIN.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}") if form.is_bare else _BEGIN
    return macros + begin + "{% if m.tool_calls %}" + calls + "{% endif %}" + _END


def messages_of(form: ToolFormat, call: str) -> str:
    """Return a small template of a format whose answers consist of messages with headers."""
    turn, end = form.turn or form.header, form.message_ends[0] if form.message_ends else ""
    before, after = form.recipient
    call = f"{before}{{{{ f.name }}}}{after}{form.section}{call}{form.section_end}" if before else call
    text = turn + form.text_opening.removeprefix(form.begun) + "{{ m.content }}" + end
    each = _EACH + turn + call.removeprefix(form.begun) + end + "{% endfor %}"
    said = "{% if m.role == 'assistant' %}{% if m.content %}" + text + "{% endif %}" + each
    begin = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}" + said
    others = "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    return begin + others + "{% if add_generation_prompt %}" + turn + "{% endif %}"


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


def test_special_tokens_decide_where_neither_calls_nor_marks_are_in_the_template() -> None:
    source = "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    use = recognized(ChatTemplate(source, {}), {"<|tool_call_start|>", "<|tool_call_end|>"})
    assert (use.form.name, use.offers_tools, use.shows_calls) == ("lfm2", True, False)
    written = with_tools_written(
        [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": "b", "c": True}}}],
            },
        ],
        [],
        use,
    )
    assert written[1]["content"] == '<|tool_call_start|>[f(a="b", c=True)]<|tool_call_end|>'


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("functions", "{{ 'Functions: ' + functions }}"),
        ("xml_tools", "{% for t in xml_tools %}{{ t.name }}{{ t.parameters | tojson }}{% endfor %}"),
        ("message", "{{ '<|tool|>' + messages[0]['tools'] if messages[0]['tools'] }}"),
    ],
)
def test_tools_are_offered_where_the_template_takes_them(place: str, shown: str) -> None:
    form = FORMATS["hermes"]
    template = ChatTemplate(template_of(form).replace("{% if tools %}{{ tools | tojson }}{% endif %}", shown), {})
    assert not template.takes_tools
    use = recognized(template, ())
    assert (use.form, use.offers_tools, use.offered_as) == (form, True, place)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    messages, given, variables = use.offer([{"role": "user", "content": "q"}], tools)
    assert "find" in template.render(messages, given, variables)
    assert template.render([{"role": "user", "content": "q"}]).endswith("[user]q[assistant]")


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


_ROW = re.compile(r"\| `(\w+)` \| (?:trial|its|told).*\| \d+ \| (.*) \|")
_PAGE = (ROOT / "docs/MODELS.md").read_text()
FORMAT_BY_TEMPLATE = {name: row[1] for row in _ROW.finditer(_PAGE) for name in row[2].split(", ")}
_TOKENS_OF_LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
SOURCES = sorted(Path("build").rglob("llama.cpp/models/templates/*.jinja"))


@pytest.mark.skipif(not SOURCES, reason="the peer's source is not unpacked (make bench-peers)")
def test_the_table_of_the_page_is_right() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    found = {}
    for path in SOURCES:
        template = ChatTemplate(path.read_text(), tokens)
        added = _TOKENS_OF_LFM if path.stem.startswith("LFM") else ()
        found[path.stem] = recognized(template, added, refusals=refusals_of(template)).form.name
    assert found == FORMAT_BY_TEMPLATE


def _cpu_s() -> float:
    """Return the CPU time of this process and of the processes that it runs."""
    own = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)))


@pytest.mark.skipif(not SOURCES, reason="the peer's source is not unpacked (make bench-peers)")
@pytest.mark.slow
def test_a_start_pays_little_for_the_trials() -> None:
    """The limit is 100 ms of a start. CPU time does not depend on other load; the clock has ticks of 10 ms."""
    slow = {}
    for path in SOURCES:
        template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
        assert template.takes_tools in (True, False)  # It is compiled now, as every start needs it.
        before_s = _cpu_s()
        recognized(template, (), refusals=refusals_of(template))
        if (took_s := _cpu_s() - before_s) > 0.1:
            slow[path.stem] = took_s
    assert not slow


def test_the_table_names_known_formats() -> None:
    assert len(FORMAT_BY_TEMPLATE) == 70 and set(FORMAT_BY_TEMPLATE.values()) <= set(BY_NAME)


def test_the_end_of_reasoning_does_not_end_an_answer_in_messages() -> None:
    """`<|end|>` ends a turn of Phi, but only a message of gpt-oss, whose calls end the answer."""
    tokens = ("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>")
    source = template_of(FORMATS["harmony"]) + "{# <|channel|>analysis<|message|> <|end|> <|call|> #}"
    ends = ends_of_turn(ChatTemplate(source, {}), tokens)
    assert "<|call|>" in ends and "<|end|>" not in ends
    assert "<|end|>" in ends_of_turn(ChatTemplate("{{ messages[0].content }}{# <|end|> #}", {}), tokens)
