"""Conversations in the browser: they outlive the tab, and a running answer goes on whatever dies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.processes.node_process import NodeProcess
from fakes.processes.reference_engine import ReferenceTokenizer, reference_tokens, text_of
from fakes.waiting import wait_until
from faults.tools.processes import GatewayProcess
from playwright.sync_api import Locator, Page, expect

from penstock.contract.job import SamplingParams
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.apis.web.conftest import Held, Playground
from tests.gateway.conftest import MODEL, EchoEngine, Stack

LONG = "a long prompt that the model says back " * 4
NUM_FIRST = 8
"""Tokens that the page shows of each answer before the engine goes on."""
POOL = "lasting"
PARAMS = SamplingParams(seed=5, max_tokens=300)


def entries(page: Page) -> Locator:
    """The conversations of the list."""
    return page.locator("#conversation-list a")


def jobs_of(http: httpx.Client) -> set[str]:
    return {job["id"] for job in http.get("/v1/jobs", params={"limit": 100}).json()["data"]}


def choose(page: Page, url: str) -> Playground:
    chat = Playground(page, url)
    chat.choose(MODEL)
    return chat


def test_a_reload_in_mid_answer_loses_nothing(page: Page, url: str, engine: EchoEngine, http: httpx.Client) -> None:
    chat, others = choose(page, url), jobs_of(http)
    engine.waits_after = NUM_FIRST
    engine.may_go_on.clear()
    chat.ask(LONG)
    said = chat.answer.locator(".said")
    expect(said).to_contain_text("a long")
    page.reload()
    expect(said).to_contain_text("a long")
    expect(said).to_have_attribute("aria-busy", "true")
    engine.may_go_on.set()
    assert chat.wait_end() == LONG.strip()
    expect(chat.answer.locator(".figures")).to_have_text(re.compile(rf"TTFT .* · {len(LONG.strip())} tokens · .*"))
    page.reload()
    assert chat.wait_end() == LONG.strip()
    expect(page.locator(".turn")).to_have_count(2)
    assert len(jobs_of(http) - others) == 1


SLOW_READS = """
const getAll = IDBObjectStore.prototype.getAll;
IDBObjectStore.prototype.getAll = function (...given) {
    const asked = getAll.apply(this, given);
    if (this.name !== "turns") return asked;
    const late = { get result() { return asked.result; } };
    asked.onsuccess = () => setTimeout(() => late.onsuccess(), 700);
    return late;
};"""
"""What is read of the browser's database is as old as a busy machine makes it."""


def test_an_answer_that_ends_while_its_page_opens_is_shown_whole(page: Page, url: str, engine: EchoEngine) -> None:
    first, second = (page.context.new_page() for _ in range(2))
    second.add_init_script(SLOW_READS)
    chat = choose(first, url)
    engine.may_go_on.clear()
    chat.ask(LONG)
    expect(chat.answer.locator(".said")).to_have_text("a")
    first.close()
    engine.may_go_on.set()
    chat = Playground(second, url)
    assert chat.wait_end() == LONG.strip()
    expect(second.locator("#conversation-list a")).to_have_count(1)
    second.close()


def test_an_answer_outlives_its_tab_its_gateway_and_its_node(page: Page, redis_url: str) -> None:
    settings: dict[str, Any] = {"pool": POOL, "lease_ms": 3000, "reattach_grace_ms": 100}
    settings["aliases"] = '["lasting-model"]'
    question = "tell me"
    tab = page.context.new_page()
    with NodeProcess(redis_url, name="node-a", step_s=0.1, **settings) as node, GatewayProcess(redis_url) as gateway:
        chat = Playground(tab, gateway.url)
        chat.choose("lasting-model")
        for label, value in {"Seed": PARAMS.seed, "Max tokens": PARAMS.max_tokens}.items():
            tab.get_by_label(label).fill(str(value))
        chat.ask(question)
        expect(chat.answer.locator(".said")).to_have_text(re.compile("[a-z]{20}"))
        tab.reload()
        expect(chat.answer.locator(".said")).to_have_text(re.compile("[a-z]{25}"))
        tab.close()
        node.kill()
        gateway.kill()
    port = gateway.url.rpartition(":")[2]
    with NodeProcess(redis_url, name="node-b", **settings), GatewayProcess(redis_url, port=port):
        # A new tab opens with the answer that was not read to its end.
        chat = Playground(page, gateway.url)
        whole = text_of(reference_tokens("", PARAMS, ReferenceTokenizer().encode(question)))
        expect(chat.answer.locator(".said")).to_have_attribute("aria-busy", "false")
        assert chat.wait_end() == whole.strip()
        expect(page.locator(".turn")).to_have_count(2)


def test_a_question_whose_answer_never_came_is_asked_once_again(page: Page, url: str, engine: EchoEngine) -> None:
    """The page is left before it knows the id of the response."""
    chat = choose(page, url)
    sent: list[str] = []

    def swallow(route: Any) -> None:
        sent.append(route.request.headers["idempotency-key"])
        route.fetch()
        route.abort()

    page.route("**/v1/responses", swallow)
    chat.ask("hello")
    expect(chat.status).to_contain_text("The connection was lost.")
    page.unroute("**/v1/responses")
    with page.expect_request("**/v1/responses") as again:
        page.reload()
    assert chat.wait_end() == "hello"
    assert {again.value.headers["idempotency-key"]} == set(sent)


def test_conversations_are_listed_renamed_exported_and_deleted_with_their_responses(
    page: Page, url: str, engine: EchoEngine, http: httpx.Client
) -> None:
    chat = choose(page, url)
    others = jobs_of(http)
    for text in ("first", "second"):
        chat.ask(text)
        assert chat.wait_end() == text
        page.get_by_role("link", name="New chat").click()
    expect(entries(page)).to_have_text(["second", "first"])
    entries(page).last.click()
    assert chat.wait_end() == "first"
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name", exact=True).fill("renamed")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    expect(page.locator("#chat-title")).to_have_text("renamed")
    page.reload()
    expect(entries(page)).to_have_text(["second", "renamed"])
    assert chat.wait_end() == "first"
    with page.expect_download() as found:
        page.get_by_role("button", name="Export", exact=True).click()
    exported = json.loads(Path(found.value.path()).read_text())
    (conversation,) = exported["conversations"]
    assert [turn["content"] for turn in conversation["turns"]] == ["first", "first"]
    response = conversation["turns"][1]["response"]
    assert http.get(f"/v1/responses/{response}").status_code == 200
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(entries(page)).to_have_text(["second"])
    wait_until(lambda: http.get(f"/v1/responses/{response}").status_code == 404)
    page.get_by_role("button", name="Forget all").click()
    page.get_by_role("dialog").get_by_role("button", name="Forget all").click()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    left = jobs_of(http) - others
    assert len(left) == 2
    assert {http.get(f"/v1/responses/resp_{job}").status_code for job in left} == {404}


def test_another_tab_shows_what_this_one_says(page: Page, url: str, engine: EchoEngine) -> None:
    chat = choose(page, url)
    chat.ask("first")
    chat.wait_end()
    other = Playground(page.context.new_page(), page.url)
    assert other.wait_end() == "first"
    chat.ask("second")
    expect(other.page.locator(".turn")).to_have_count(4)
    assert other.wait_end() == "second"


def test_answers_of_two_conversations_stream_at_the_same_time(page: Page, url: str, engine: EchoEngine) -> None:
    chat = choose(page, url)
    engine.waits_after = NUM_FIRST
    engine.may_go_on.clear()
    chat.ask(LONG)
    expect(chat.answer.locator(".said")).to_contain_text("a long")
    page.get_by_role("link", name="New chat").click()
    chat.ask("another question")
    expect(chat.answer.locator(".said")).to_contain_text("another")
    expect(entries(page).locator(".badge")).to_have_count(2)
    engine.may_go_on.set()
    assert chat.wait_end() == "another question"
    entries(page).filter(has_text="a long").click()
    expect(chat.answer).to_contain_text("a long")
    assert chat.wait_end() == LONG.strip()


def test_a_draft_outlives_a_reload(page: Page, url: str) -> None:
    chat = Playground(page, url)
    chat.prompt.fill("not yet sent")
    page.reload()
    expect(chat.prompt).to_have_value("not yet sent")


@pytest.fixture
def tenants(stack: Stack, url: str) -> Iterator[dict[str, str]]:
    """The keys of two tenants. They close only gateways that start later."""

    async def add() -> dict[str, str]:
        async with connect(stack.redis_url) as redis:
            return {name: (await KeyStore(redis).add(name, ["infer"], Terms()))[0] for name in ("ann", "bob")}

    yield stack.call(add())
    with sync_redis.Redis.from_url(stack.redis_url) as client:
        client.delete(keys.API_KEYS)


def give(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Save").click()


def test_a_missing_key_is_asked_for_and_each_tenant_has_its_own_conversations(
    page: Page, stack: Stack, engine: EchoEngine, tenants: dict[str, str]
) -> None:
    chat = Playground(page, stack.start_gateway())
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("This gateway needs a valid API key.")
    give(page, tenants["ann"])
    chat.choose(MODEL)
    chat.ask("of ann")
    assert chat.wait_end() == "of ann"
    page.get_by_role("button", name="API key").click()
    give(page, tenants["bob"])
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="API key").click()
    give(page, "pk-wrong")
    expect(dialog).to_be_visible()
    give(page, tenants["ann"])
    expect(entries(page)).to_have_text(["of ann"])


CANCEL_AND_SEND = """() => {
    document.querySelector("#key-dialog [value=cancel]").click();
    document.querySelector("#composer").requestSubmit();
}"""


def test_who_declines_to_give_a_key_is_not_asked_again_and_again(
    page: Page, stack: Stack, tenants: dict[str, str]
) -> None:
    slow = Held(page, "**/v1/key")
    page.goto(f"{stack.start_gateway()}/#batches")
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_role("button", name="Cancel").click()
    with page.expect_response("**/v1/batches*") as refused:
        pass
    assert refused.value.status == 401
    expect(page.locator("#batch-status")).to_contain_text("This gateway needs a valid API key.")
    expect(dialog).to_be_hidden()
    message = page.get_by_label("Message")
    page.get_by_role("link", name="Playground").click()
    expect(message).to_be_visible()
    # An answer to what was asked before the user went on opens no dialog over what the user types.
    slow.first()
    with page.expect_response("**/v1/key"):
        page.unroute("**/v1/key")  # which lets it go
    message.fill("hello")
    expect(message).to_have_value("hello")
    expect(dialog).to_be_hidden()
    for _ in range(2):
        message.press("Enter")
        expect(dialog).to_be_visible()
        dialog.get_by_role("button", name="Cancel").click()
        expect(message).to_have_value("hello")
    # A busy browser may take the user's next message before it reports that the dialog is closed.
    message.press("Enter")
    expect(dialog).to_be_visible()
    page.evaluate(CANCEL_AND_SEND)
    expect(dialog).to_be_visible()
