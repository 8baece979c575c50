"""How the page shows answers, and what of the API it lets its user try: a schema, tools, and requests as code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until
from playwright.sync_api import Page, expect

from tests.gateway.apis.web.conftest import Playground
from tests.gateway.conftest import MODEL, EchoEngine, Stack

CALLER = "acme/page-caller"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RENDER = """async ([text, isWhole]) => {
    const { GrowingMarkdown } = await import("/web/markdown.js");
    const element = document.createElement("div");
    new GrowingMarkdown(element).show(text, !isWhole);
    return element.innerHTML;
}"""


@pytest.fixture
def chat(page: Page, url: str, engine: EchoEngine) -> Iterator[Playground]:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    playground = Playground(page, url)
    playground.choose(MODEL)
    yield playground
    page.context.clear_permissions()


def copied(chat: Playground, button: str) -> str:
    """What a button of the last answer copies."""
    chat.answer.get_by_role("button", name=button, exact=True).last.click()
    expect(chat.answer.get_by_role("button", name="Copied").first).to_be_visible()
    return str(chat.page.evaluate("navigator.clipboard.readText()"))


def rendered(page: Page, text: str, *, is_whole: bool = True) -> str:
    return str(page.evaluate(RENDER, [text, is_whole]))


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("[a](https://b.example/c)", '<a href="https://b.example/c" target="_blank" rel="noopener noreferrer">a</a>'),
        (
            "https://b.example",
            '<a href="https://b.example" target="_blank" rel="noopener noreferrer">https://b.example</a>',
        ),
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("[a](javascript:alert(1))", "[a](javascript:alert(1))"),
        ("[a](mailto:b@c.example)", "<span>a</span>"),
        ("[a](/v1/models)", "<span>a</span>"),
        ("[a](//b.example)", "<span>a</span>"),
        (
            "![a](https://b.example/c.png)",
            '<a href="https://b.example/c.png" target="_blank" rel="noopener noreferrer">[image: a]</a>',
        ),
        ("![](data:image/png;base64,AA)", "<span>[image: without a description]</span>"),
        ("a &amp; &lt;b&gt; `<i>`", "a &amp; &lt;b&gt; <code>&lt;i&gt;</code>"),
    ],
)
def test_links_lead_to_the_web_alone_and_nothing_is_loaded(page: Page, url: str, text: str, html: str) -> None:
    page.goto(url)
    assert rendered(page, text) == f"<p>{html}</p>"


def test_a_table_has_its_alignment_and_scrolls_by_itself(page: Page, url: str) -> None:
    page.goto(url)
    assert rendered(page, "| a | b |\n|---|--:|\n| 1 | **2** |") == (
        '<div class="wide" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="right"><strong>2</strong></td></tr></tbody></table></div>'
    )


def test_code_has_colors_and_a_button_that_copies_it(chat: Playground) -> None:
    code = 'def f(x):  # <b>\n    return "a" * 3'
    chat.ask(f"```py\n{code}\n```")
    chat.wait_end()
    block = chat.answer.locator("figure.code")
    expect(block.locator(".code-keyword")).to_have_text(["def", "return"])
    expect(block.locator(".code-comment")).to_have_text("# <b>")
    block.get_by_role("button", name="Copy").click()
    expect(block.get_by_role("button", name="Copied")).to_be_visible()
    assert chat.page.evaluate("navigator.clipboard.readText()") == code


def test_code_that_is_not_complete_has_no_colors_yet(page: Page, url: str) -> None:
    page.goto(url)
    text = "```python\nx = 1\n```"
    assert "code-number" not in rendered(page, text, is_whole=False)
    assert "code-number" in rendered(page, text)
    assert "<code>x = 1</code>" in rendered(page, text.replace("python", "constructor"))


def test_a_link_defined_at_the_end_is_a_link_once_the_answer_is_whole(page: Page, url: str) -> None:
    page.goto(url)
    script = """async (text) => {
        const { GrowingMarkdown } = await import("/web/markdown.js");
        const element = document.createElement("div");
        const shown = new GrowingMarkdown(element);
        for (let end = 0; end <= text.length; end++) shown.show(text.slice(0, end));
        shown.show(text, false);
        return element.innerHTML;
    }"""
    text = "[a][1]\n\nb\n\nc\n\n[1]: https://d.example\n"
    link = '<a href="https://d.example" target="_blank" rel="noopener noreferrer">a</a>'
    assert page.evaluate(script, text) == f"<p>{link}</p><p>b</p><p>c</p>"


def test_a_schema_constrains_the_answer_which_is_shown_as_json(chat: Playground, engine: EchoEngine) -> None:
    chat.page.get_by_text("JSON schema").click()
    field = chat.page.get_by_label("The answer matches this schema")
    field.fill("{")
    chat.ask("hello")
    expect(chat.page.locator("#chat-note")).to_contain_text("JSON schema: this is no JSON")
    field.fill(json.dumps(SCHEMA))
    chat.ask('{"city": "Bern"}')
    chat.wait_end()
    assert engine.last_params is not None
    assert engine.last_params.structured_outputs is not None
    assert json.loads(engine.last_params.structured_outputs.json_schema or "") == SCHEMA
    expect(chat.answer.locator("figure.code .code-property")).to_have_text('"city"')


@pytest.fixture(scope="module")
def calling(stack: Stack, url: str) -> EchoEngine:
    engine = EchoEngine()
    stack.start_node(engine, model=CALLER, pool="page_caller", tool_parser="hermes", reattach_grace_ms=500)
    wait_until(lambda: CALLER in httpx.get(f"{url}/v1/models", timeout=60).text)
    return engine


def test_calls_are_shown_and_their_results_sent_back(calling: EchoEngine, chat: Playground) -> None:
    page = chat.page
    chat.choose(CALLER)
    page.get_by_text("Tools").click()
    page.get_by_label("Functions, a JSON list").fill(json.dumps(TOOLS))
    chat.ask(CALL)
    call = chat.answer.locator(".call")
    expect(call.get_by_role("heading")).to_have_text("Calls weather")
    expect(call.locator("code")).to_have_text('{\n  "city": "Bern"\n}')
    call.get_by_label("Result of weather").fill("12 °C")
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator(".turn")).to_have_count(4)
    assert chat.wait_end() == "12 °C"
    assert calling.tokenizer.last_chat is not None
    messages, tools = calling.tokenizer.last_chat
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert "weather" in str(messages[1]["tool_calls"])
    assert json.loads(tools or "")[0]["function"]["name"] == "weather"
    page.reload()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.get_by_role("button", name="Send the results")).to_have_count(0)


def test_a_request_is_copied_as_curl_and_as_python_and_both_run(
    chat: Playground, engine: EchoEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.page.get_by_label("System prompt").fill('It\'s "brief".\nTruly.')
    chat.page.get_by_label("Temperature").fill("0.5")
    chat.page.get_by_label("Top k").fill("7")
    chat.ask("it's a test")
    chat.wait_end()
    answered: dict[str, Any] = json.loads(subprocess.check_output(["bash", "-c", copied(chat, "Copy as curl")]))
    assert answered["output"][0]["content"][0]["text"] == "it's a test"
    assert answered["instructions"] == 'It\'s "brief".\nTruly.'
    exec(copied(chat, "Copy as Python"), {})
    assert capsys.readouterr().out == "it's a test\n"
    assert engine.last_params is not None
    assert (engine.last_params.temperature, engine.last_params.top_k) == (0.5, 7)
    assert copied(chat, "Copy") == "it's a test"


def test_each_paragraph_has_the_direction_of_its_text(chat: Playground) -> None:
    chat.ask("ما هو توربين الماء؟\n\nA turbine.\n\n```\nقيمة = 1\n```")
    chat.wait_end()
    side = """all => all.map((one) => {
        const range = document.createRange();
        range.selectNodeContents(one);
        const [text, box] = [range.getBoundingClientRect(), one.getBoundingClientRect()];
        return text.left - box.left > box.right - text.right ? "right" : "left";
    })"""
    assert chat.answer.locator(".said p, .said pre code").evaluate_all(side) == ["right", "left", "left"]


@pytest.mark.parametrize("text", ["gate\n" * 70_000, "*a* " * 40_000, "- a\n" * 20_000])
def test_an_answer_of_many_parts_is_shown(chat: Playground, text: str) -> None:
    """A call in JavaScript takes about a hundred thousand arguments."""
    assert len(rendered(chat.page, text)) > len(text)
