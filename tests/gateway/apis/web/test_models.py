"""Models in the playground: a conversation keeps its own, some only continue a text, and one may be gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until
from playwright.sync_api import Page, Route, expect

from tests.gateway.apis.web.conftest import Held, Playground
from tests.gateway.conftest import MODEL, EchoEngine, Stack

MODELS = "**/v1/models"
BASE, EMBEDDER = "a-base-model", "an-embedder"
USES = {BASE: ["completion"], EMBEDDER: ["embed"], MODEL: ["chat", "completion", "tools"]}
"""By the order of their names, the model that chats is the last one."""


def answer(route: Route, uses: dict[str, list[str]]) -> None:
    """Answer with a list that has these models, and what each is good for."""
    data = [{"id": name, "object": "model", "capabilities": words} for name, words in uses.items()]
    route.fulfill(json={"object": "list", "data": data})


def serve(page: Page, uses: dict[str, list[str]]) -> None:
    """Let the list of models be this one from now on: the newest route of an address comes first."""
    page.route(MODELS, lambda route: answer(route, uses))


@pytest.fixture(scope="module")
def base(stack: Stack, url: str) -> EchoEngine:
    engine = EchoEngine()
    stack.start_node(engine, model=BASE, pool="base", reattach_grace_ms=500)
    wait_until(lambda: BASE in httpx.get(f"{url}/v1/models", timeout=60).text)
    return engine


@pytest.fixture
def chat(page: Page, url: str, engine: EchoEngine, base: EchoEngine) -> Iterator[Playground]:
    serve(page, USES)
    yield Playground(page, url)
    base.waits_after = 1
    base.may_go_on.set()


def test_a_new_conversation_takes_a_model_that_chats_and_the_others_are_marked(chat: Playground) -> None:
    expect(chat.model).to_have_value(MODEL)
    expect(chat.model.locator("option")).to_have_text([f"{BASE} (completion)", f"{EMBEDDER} (no text)", MODEL])
    expect(chat.model.locator("option", has_text=EMBEDDER)).to_be_disabled()
    chat.model.select_option(BASE)
    expect(chat.page.locator("#model-note")).to_contain_text("has no chat template. It continues your text")
    expect(chat.page.get_by_label("System prompt")).to_be_hidden()


def test_a_conversation_keeps_its_model_and_its_settings(chat: Playground) -> None:
    page = chat.page
    chat.model.select_option(BASE)
    page.get_by_label("Temperature").fill("0.3")
    chat.ask("of the base")
    assert chat.wait_end() == "of the base"
    page.get_by_role("link", name="New chat").click()
    chat.model.select_option(MODEL)
    page.get_by_label("Temperature").fill("0.9")
    chat.ask("of the other")
    assert chat.wait_end() == "of the other"
    page.reload()
    for text, model, temperature in (("of the base", BASE, "0.3"), ("of the other", MODEL, "0.9")):
        page.locator("#conversation-list a", has_text=text).click()
        expect(chat.answer.locator(".said")).to_have_text(text)
        expect(chat.model).to_have_value(model)
        expect(page.get_by_label("Temperature")).to_have_value(temperature)
        page.reload()
        expect(chat.model).to_have_value(model)
        expect(page.get_by_label("Temperature")).to_have_value(temperature)


def test_a_model_that_is_gone_is_named_and_taken_again_once_it_is_back(chat: Playground) -> None:
    page = chat.page
    chat.model.select_option(BASE)
    chat.ask("hello")
    assert chat.wait_end() == "hello"
    serve(page, {MODEL: USES[MODEL]})
    page.reload()
    gone = f"No node serves the model {BASE} any more."
    expect(page.locator("#model-note")).to_contain_text(gone)
    expect(chat.model).to_have_value(BASE)
    chat.ask("again")
    expect(page.locator("#chat-note")).to_contain_text(gone)
    expect(chat.prompt).to_have_value("again")
    serve(page, USES)
    chat.prompt.press("Enter")
    expect(page.locator("#model-note")).to_contain_text("has no chat template")
    chat.prompt.press("Enter")
    expect(chat.answer.locator(".said")).to_contain_text("again")
    # A new conversation does not insist on it.
    serve(page, {MODEL: USES[MODEL]})
    page.goto(page.url.partition("#")[0])
    page.reload()
    expect(chat.model).to_have_value(MODEL)


def test_an_older_list_of_models_that_comes_late_is_not_shown(chat: Playground) -> None:
    page = chat.page
    held = Held(page, MODELS)
    page.reload()
    late = held.first()
    serve(page, USES)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(chat.model.locator("option")).to_have_count(len(USES))
    with page.expect_response(MODELS):
        answer(late, {"another-model": ["chat"]})
    chat.model.select_option(BASE)
    chat.ask("hello")
    assert chat.wait_end() == "hello"
    expect(chat.model.locator("option")).to_have_count(len(USES))


def test_a_base_model_continues_the_text_and_outlives_a_reload(chat: Playground, base: EchoEngine) -> None:
    chat.model.select_option(BASE)
    base.waits_after = 5
    base.may_go_on.clear()
    with chat.page.expect_request("**/v1/jobs") as sent:
        chat.ask("Once upon a time")
    body = sent.value.post_data_json
    assert (body["model"], body["prompt"], body["max_tokens"]) == (BASE, "Once upon a time", 2048)
    assert not body["background"]  # A reader waits for it.
    expect(chat.answer.locator(".said")).to_have_text("Once")
    chat.page.reload()
    expect(chat.answer.locator(".said")).to_have_text("Once")
    base.may_go_on.set()
    assert chat.wait_end() == "Once upon a time"
    expect(chat.answer.locator(".figures")).to_have_text(re.compile("16 tokens · 16 in the prompt"))
    with chat.page.expect_request("**/v1/jobs") as sent:
        chat.ask("there was")
    assert sent.value.post_data_json["prompt"] == "Once upon a timeOnce upon a time\nthere was"
    chat.wait_end()


def test_a_text_that_is_continued_can_be_stopped(chat: Playground, base: EchoEngine, http: httpx.Client) -> None:
    chat.model.select_option(BASE)
    base.may_go_on.clear()
    chat.ask("a text")
    expect(chat.answer.locator(".said")).to_have_text("a")
    with chat.page.expect_response("**/v1/jobs/*") as canceled:
        chat.page.get_by_role("button", name="Stop").click()
    job = canceled.value.json()["id"]
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled")
    expect(chat.status).to_have_text("Stopped")


@pytest.mark.parametrize("model", [MODEL, BASE])
def test_an_answer_is_cut_at_2048_tokens_and_goes_on_from_where_it_ended(chat: Playground, model: str) -> None:
    page = chat.page
    chat.model.select_option(model)
    limit = page.get_by_label("Max tokens")
    expect(limit).to_have_value("2048")
    limit.fill("4")
    chat.ask("abcdefgh")
    assert chat.wait_end() == "abcd"
    expect(chat.answer.locator(".figures")).to_contain_text("cut at the token limit")
    requests: list[Any] = []
    page.on("request", lambda request: requests.append(request.post_data) if request.method == "POST" else None)
    chat.answer.get_by_role("button", name="Continue").click()
    # The engine says its prompt back, from its beginning.
    expect(chat.answer.locator(".said")).to_have_text("abcdabcd")
    chat.wait_end()
    body = json.loads(requests[0])
    if model == MODEL:
        assert body["continue_final_message"] is True
        assert [item["content"] for item in body["input"]] == ["abcdefgh", "abcd"]
    else:
        assert body["prompt"] == "abcdefghabcd"
    expect(chat.answer.locator(".figures")).to_contain_text("8 tokens")
    page.reload()
    expect(chat.answer.locator(".said")).to_have_text("abcdabcd")
    expect(page.locator(".turn")).to_have_count(2)


@pytest.mark.parametrize("model", [MODEL, BASE])
def test_a_reload_in_a_part_that_goes_on_repeats_and_loses_nothing(
    chat: Playground, engine: EchoEngine, base: EchoEngine, model: str
) -> None:
    chat.model.select_option(model)
    chat.page.get_by_label("Max tokens").fill("4")
    chat.ask("abcdefgh")
    assert chat.wait_end() == "abcd"
    working = engine if model == MODEL else base
    working.waits_after = 2
    working.may_go_on.clear()
    chat.answer.get_by_role("button", name="Continue").click()
    said = chat.answer.locator(".said")
    expect(said).to_have_text("abcdab")
    chat.page.reload()
    expect(said).to_have_text("abcdab")
    working.may_go_on.set()
    expect(said).to_have_text("abcdabcd")
    chat.wait_end()


def test_only_a_last_answer_that_was_cut_or_stopped_can_go_on(chat: Playground, engine: EchoEngine) -> None:
    goes_on = chat.page.get_by_role("button", name="Continue")
    chat.ask("whole")
    chat.wait_end()
    expect(goes_on).to_have_count(0)
    engine.may_go_on.clear()
    chat.ask("stopped")
    expect(chat.answer.locator(".said")).to_have_text("s")
    chat.page.keyboard.press("Escape")
    expect(chat.answer.get_by_role("button", name="Continue")).to_be_visible()
    engine.may_go_on.set()
    chat.answer.get_by_role("button", name="Continue").click()
    expect(chat.answer.locator(".said")).to_have_text("ss")
    chat.wait_end()
    expect(chat.answer.get_by_role("button", name="Continue")).to_be_hidden()
