"""The view of jobs in a real browser: filter, open, cancel and retry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import wait_until
from playwright.sync_api import Locator, Page, expect

from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore
from tests.gateway.conftest import MODEL, EchoEngine, Stack


def submit(http: httpx.Client, text: str, **options: Any) -> str:
    job: str = http.post("/v1/jobs", json={"model": MODEL, "prompt": text, **options}).raise_for_status().json()["id"]
    return job


def card(page: Page, job: str) -> Locator:
    return page.locator(".batch", has_text=job)


def test_jobs_are_filtered_and_opened(page: Page, url: str, http: httpx.Client) -> None:
    tagged = submit(http, "the text of one", tags=["run:7"], metadata={"for": "a test"})
    refused = submit(http, "x" * 300)
    wait_until(lambda: http.get(f"/v1/jobs/{refused}").json()["state"] == "failed")
    page.goto(f"{url}/#jobs")
    expect(card(page, refused).locator(".badge")).to_have_text("failed")
    card(page, refused).get_by_role("button", name="Open").click()
    expect(card(page, refused)).to_contain_text("tokens are too many")
    page.get_by_label("Tag").fill("run:7")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator(".batch")).to_have_count(1)
    card(page, tagged).get_by_role("button", name="Open").click()
    expect(card(page, tagged).locator("pre")).to_have_text("the text of one")
    for text in ("15 in the prompt (0 from the cache), 15 generated", '{"for":"a test"}', "Waited in the queue"):
        expect(card(page, tagged)).to_contain_text(text)
    page.get_by_label("State").select_option("open")
    expect(page.get_by_text("No such jobs.")).to_be_visible()


def test_a_job_is_canceled_and_retried(page: Page, url: str, http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.2
    job = submit(http, "x" * 200)
    page.goto(f"{url}/#jobs")
    shown = card(page, job)
    expect(shown.locator(".badge")).to_have_text("running")
    expect(shown.get_by_role("button", name="Retry")).to_be_hidden()
    shown.get_by_role("button", name="Cancel").click()
    expect(shown.locator(".badge")).to_have_text("cancelled")
    engine.step_s = 0.0
    shown.get_by_role("button", name="Retry").click()
    expect(shown.get_by_role("status")).to_contain_text("The retry is the job")
    retry = shown.get_by_role("status").inner_text().split()[-1].rstrip(".")
    expect(card(page, retry).first.locator(".badge")).to_have_text("succeeded")


@pytest.fixture
def operator(stack: Stack, http: httpx.Client) -> Iterator[str]:
    """A key that may only look at what other tenants do, and a job of another tenant."""
    submit(http, "of another tenant")

    async def add() -> str:
        async with connect(stack.redis_url) as redis:
            return (await KeyStore(redis).add("operators", ["admin"], Terms()))[0]

    yield stack.call(add())
    with sync_redis.Redis.from_url(stack.redis_url) as client:
        client.delete(keys.API_KEYS)


def test_an_operator_sees_all_tenants_jobs_and_opens_none(page: Page, stack: Stack, operator: str) -> None:
    page.goto(f"{stack.start_gateway()}/#jobs")
    page.get_by_label("Key", exact=True).fill(operator)
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".batch").first).to_contain_text("tenant default")
    expect(page.locator(".batch").first.get_by_role("button", name="Open")).to_be_hidden()
    page.get_by_label("Tenant").fill("nobody")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("No such jobs.")).to_be_visible()
