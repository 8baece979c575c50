"""The playground in a real browser, against a real gateway, node and Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import wait_until
from faults.tools.processes import GatewayProcess
from playwright.sync_api import Page, expect

from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.apis.web.conftest import Playground
from tests.gateway.conftest import MODEL, EchoEngine, Stack

LONG = "a long prompt that the model says back " * 4
RESPONSES = "**/v1/responses"
STEP_S = 0.03
LONG_STEP_S = 0.1
"""On a busy machine, a browser needs seconds for what a test does during an answer."""


@pytest.fixture
def chat(page: Page, url: str, engine: EchoEngine) -> Playground:
    playground = Playground(page, url)
    playground.choose(MODEL)
    return playground


def test_chat_streams_an_answer_with_its_speed(chat: Playground, engine: EchoEngine) -> None:
    engine.step_s = LONG_STEP_S
    text = LONG.strip()
    chat.ask(text)
    said = chat.answer.locator(".said")
    expect(said).to_contain_text("a long")
    assert said.inner_text() != text  # it is still streaming
    engine.step_s = 0.0
    assert chat.wait_end() == text
    # Each byte is a token, and the prompt is said back.
    count = f"{len(text)} tokens · {len(text)} in the prompt"
    figures = re.compile(rf"TTFT [\d.]+ m?s · [\d.]+ tokens/s · {count}")
    expect(chat.answer.locator(".figures")).to_have_text(figures)


def test_a_message_can_be_typed_as_soon_as_the_page_is_there(page: Page, url: str, engine: EchoEngine) -> None:
    page.goto(url)
    expect(page.locator("#prompt")).to_be_focused()
    page.goto(f"{url}/#dashboard")
    page.reload()
    expect(page.locator("#prompt")).not_to_be_focused()


def test_model_text_never_becomes_markup(chat: Playground) -> None:
    chat.ask("<img src=x onerror=alert(1)> **bold** `code`\n```\n<b>block</b>\n```")
    assert "<img src=x onerror=alert(1)>" in chat.wait_end()
    said = chat.answer.locator(".said")
    assert said.locator("img, b, script").count() == 0
    expect(said.locator("strong")).to_have_text("bold")
    expect(said.locator("p code")).to_have_text("code")
    expect(said.locator("pre code")).to_have_text("<b>block</b>")


def test_parameters_reach_the_engine(chat: Playground, engine: EchoEngine) -> None:
    chat.page.get_by_text("More sampling").click()
    values = {"Temperature": "0.5", "Top p": "0.9", "Top k": "7", "Max tokens": "20", "Seed": "11", "Min p": "0.1"}
    for label, value in {**values, "Stop strings, one a line": "X\nYZ", "System prompt": "Be brief."}.items():
        chat.page.get_by_label(label).fill(value)
    chat.ask("hello")
    assert chat.wait_end() == "hello"
    params = engine.last_params
    assert params is not None
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 20)
    assert (params.seed, params.stop, params.min_p) == (11, ("X", "YZ"), 0.1)
    assert engine.tokenizer.last_chat is not None
    assert [turn["role"] for turn in engine.tokenizer.last_chat[0]] == ["system", "user"]
    chat.page.reload()
    expect(chat.page.get_by_label("Temperature")).to_have_value("0.5")


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_cancels_the_job(chat: Playground, engine: EchoEngine, http: httpx.Client, how: str) -> None:
    engine.step_s = LONG_STEP_S
    chat.ask(LONG)
    expect(chat.answer.locator(".said")).to_contain_text("a long")
    with chat.page.expect_response("**/v1/responses/*/cancel") as cancelled:
        if how == "button":
            chat.page.get_by_role("button", name="Stop").click()
        else:
            chat.page.keyboard.press(how)
    expect(chat.status).to_have_text("Stopped")
    job = cancelled.value.json()["id"].removeprefix("resp_")
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    expect(chat.page.get_by_role("button", name="Send")).to_be_visible()


def test_regenerate_and_edit_change_the_conversation(chat: Playground, engine: EchoEngine) -> None:
    for text in ("first", "second"):
        chat.ask(text)
        assert chat.wait_end() == text
    chat.page.get_by_role("button", name="Regenerate").first.click()
    expect(chat.page.locator(".turn")).to_have_count(2)
    assert chat.wait_end() == "first"
    chat.page.get_by_role("button", name="Edit").click()
    expect(chat.prompt).to_have_value("first")
    expect(chat.page.locator(".turn")).to_have_count(0)
    chat.ask("changed")
    assert chat.wait_end() == "changed"
    chat.ask("again")
    chat.wait_end()
    assert engine.tokenizer.last_chat is not None
    assert [turn["content"] for turn in engine.tokenizer.last_chat[0]] == ["changed", "changed", "again"]
    chat.page.get_by_role("link", name="New chat").click()
    expect(chat.page.locator(".turn")).to_have_count(0)


def test_refusal_is_shown_in_plain_words(chat: Playground) -> None:
    chat.page.get_by_label("Top p").fill("7")
    chat.ask("hello")
    expect(chat.status).to_contain_text("The request failed.")
    expect(chat.status).to_contain_text("top_p")


def test_waiting_request_shows_its_position(page: Page, stack: Stack, url: str) -> None:
    engine = EchoEngine()
    engine.step_s = LONG_STEP_S
    stack.start_node(engine, model="acme/narrow", pool="narrow", max_num_seqs=1, reattach_grace_ms=500)
    wait_until(lambda: "acme/narrow" in httpx.get(f"{url}/v1/models", timeout=60).text)
    first = Playground(page, url)
    first.choose("acme/narrow")
    first.ask(LONG)
    expect(first.answer.locator(".said")).to_contain_text("a long")
    second = Playground(page.context.new_page(), url)
    # A new tab opens with the answer that another one waits for.
    expect(second.answer.locator(".said")).to_contain_text("a long")
    second.page.get_by_role("link", name="New chat").click()
    second.choose("acme/narrow")
    second.ask("hello")
    expect(second.status).to_contain_text("Waiting in the queue: position 1")
    page.keyboard.press("Escape")
    assert second.wait_end() == "hello"


@pytest.fixture
def limited_key(stack: Stack, url: str) -> Iterator[str]:
    """A key that permits one job per minute. It closes only its own gateway: others do not know it."""

    async def add() -> str:
        async with connect(stack.redis_url) as redis:
            key, _ = await KeyStore(redis).add("small", ["infer"], Terms(jobs_per_minute=1, burst_s=1))
            return key

    yield stack.call(add())
    with sync_redis.Redis.from_url(stack.redis_url) as client:
        client.delete(keys.API_KEYS)


def test_key_is_asked_for_and_a_limit_says_when_to_return(
    page: Page, stack: Stack, engine: EchoEngine, limited_key: str
) -> None:
    chat = Playground(page, stack.start_gateway())
    expect(page.locator("#model-note")).to_contain_text("This gateway needs a valid API key.")
    page.get_by_label("Key", exact=True).fill(limited_key)
    page.get_by_role("button", name="Save").click()
    chat.choose(MODEL)
    chat.ask("hello")
    assert chat.wait_end() == "hello"
    assert limited_key in page.evaluate("JSON.stringify(sessionStorage)")
    assert limited_key not in page.evaluate("JSON.stringify(localStorage)")
    chat.ask("again")
    expect(chat.status).to_contain_text("The server is busy. Try again in ")
    page.get_by_role("link", name="Dashboard").click()
    expect(page.get_by_text("This API key does not permit the request.")).to_be_visible()


def test_answer_goes_on_after_the_gateway_is_killed(page: Page, stack: Stack, engine: EchoEngine) -> None:
    engine.step_s = STEP_S
    with GatewayProcess(stack.redis_url) as gateway:
        chat = Playground(page, gateway.url)
        chat.choose(MODEL)
        chat.ask(LONG.strip())
        expect(chat.answer.locator(".said")).to_contain_text("a long")
        gateway.kill()
        expect(chat.status).to_contain_text("The connection was lost.")
    with GatewayProcess(stack.redis_url, port=gateway.url.rpartition(":")[2]):
        assert chat.wait_end() == LONG.strip()


def test_chat_works_with_the_keyboard_alone(chat: Playground, engine: EchoEngine) -> None:
    page = chat.page
    page.locator("#prompt").focus()
    links = ["playground-link", "batches-link", "jobs-link", "dashboard-link", "API"]
    before_it = [*links, "key-button", "theme-button", "New chat", "turns"]
    for name in reversed(before_it):
        page.keyboard.press("Shift+Tab")
        assert _focused(page) == name
    for name in (*before_it[1:], "prompt"):
        page.keyboard.press("Tab")
        assert _focused(page) == name
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    assert chat.wait_end() == "one\ntwo"
    assert _focused(page) == "prompt"
    for name in ("send", "model"):
        page.keyboard.press("Tab")
        assert _focused(page) == name
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    expect(chat.page.get_by_role("log", name="Conversation")).to_be_visible()


def _focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim().slice(0, 20)"))


def test_motion_stops_where_the_reader_prefers_that(chat: Playground, engine: EchoEngine) -> None:
    engine.step_s = LONG_STEP_S
    chat.page.emulate_media(reduced_motion="no-preference")
    cursor = "getComputedStyle(document.querySelector('.said p:last-child'), '::after').animationName"
    chat.ask(LONG)
    expect(chat.answer.locator(".said p")).to_be_visible()
    assert chat.page.evaluate(cursor) == "blink"
    chat.page.emulate_media(reduced_motion="reduce")
    assert chat.page.evaluate(cursor) == "none"


def test_unset_parameters_are_not_sent(chat: Playground) -> None:
    chat.page.get_by_label("Max tokens").fill("")
    with chat.page.expect_request(RESPONSES) as request:
        chat.ask("hello")
    assert sorted(request.value.post_data_json) == [
        *("background", "input", "model", "reader_grace_s", "return_progress", "stream")
    ]
    assert chat.wait_end() == "hello"


def test_stream_outlives_a_refusal_of_its_known_job(chat: Playground, engine: EchoEngine) -> None:
    chat.page.route(RESPONSES, lambda route: route.fulfill(status=200), times=1)
    chat.ask("hello")
    expect(chat.status).to_contain_text("The connection was lost.")
    chat.page.route(RESPONSES, lambda route: route.fulfill(status=429, json={"error": {}}), times=1)
    with chat.page.expect_response(RESPONSES) as refusal:
        assert chat.wait_end() == "hello"
    assert refusal.value.status == 429


def test_end_of_an_answer_leaves_the_focus_in_another_field(chat: Playground, engine: EchoEngine) -> None:
    engine.step_s = STEP_S
    chat.ask(LONG)
    system = chat.page.get_by_label("System prompt")
    system.press_sequentially("You are ")
    engine.step_s = 0.0
    chat.wait_end()
    chat.page.keyboard.type("brief.")
    expect(system).to_have_value("You are brief.")
    chat.prompt.fill("hi")
    chat.page.get_by_role("button", name="Send").focus()
    chat.page.keyboard.press("Enter")
    chat.wait_end()
    expect(chat.prompt).to_be_focused()


def test_next_message_is_one_with_the_message_that_got_no_answer(chat: Playground, engine: EchoEngine) -> None:
    """Some chat templates refuse two messages of the user in a row."""
    chat.page.route(RESPONSES, lambda route: route.fulfill(status=400, json={"error": {}}), times=1)
    chat.ask("first")
    expect(chat.status).to_contain_text("The request failed.")
    chat.ask("second")
    assert chat.wait_end() == "first\n\nsecond"
    assert engine.tokenizer.last_chat is not None
    assert [turn["role"] for turn in engine.tokenizer.last_chat[0]] == ["user"]


GROW = """async (text) => {
    const { GrowingMarkdown } = await import("/web/markdown.js");
    const [whole, grown] = [document.createElement("div"), document.createElement("div")];
    new GrowingMarkdown(whole).show(text, false);
    const growing = new GrowingMarkdown(grown);
    const firstBlocks = new Set();
    for (let end = 0; end <= text.length; end++) {
        growing.show(text.slice(0, end));
        if (grown.children.length > 1) firstBlocks.add(grown.firstChild);
    }
    growing.show(text, false);
    firstBlocks.add(grown.firstChild);
    return [whole.innerHTML, grown.innerHTML, firstBlocks.size];
}"""


@pytest.mark.parametrize(
    ("text", "html"),
    [
        (
            "1 **a\nb** 2\n\n\n`c`, **d**\n",
            "<p>1 <strong>a<br>b</strong> 2</p><p><code>c</code>, <strong>d</strong></p>",
        ),
        ("a\r\n\r\nb\n\n* c\n* d\n\n  e\n", "<p>a</p><p>b</p><ul><li><p>c</p></li><li><p>d</p><p>e</p></li></ul>"),
        ("# a\n\n3. b\n4. ~~c~~\n", '<h3>a</h3><ol start="3"><li>b</li><li><s>c</s></li></ol>'),
        ("a\n\n> b\n\n---\n\nc", "<p>a</p><blockquote><p>b</p></blockquote><hr><p>c</p>"),
    ],
)
def test_finished_blocks_stay_while_a_text_grows(chat: Playground, text: str, html: str) -> None:
    assert chat.page.evaluate(GROW, text) == [html, html, 1]
