"""The view of jobs in a real browser: filter, open, cancel and retry."""

from __future__ import annotations

import re
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
from tests.gateway.apis.web.conftest import scroll_width
from tests.gateway.conftest import MODEL, EchoEngine, Stack


def submit(http: httpx.Client, text: str, **options: Any) -> str:
    job: str = http.post("/v1/jobs", json={"model": MODEL, "prompt": text, **options}).raise_for_status().json()["id"]
    return job


def submit_chat(http: httpx.Client, messages: list[dict[str, str]]) -> str:
    job: str = http.post("/v1/jobs", json={"model": "echo-alias", "messages": messages}).raise_for_status().json()["id"]
    return job


def entry(page: Page, job: str) -> Locator:
    """A job's row, with what is below it on demand."""
    return page.locator("#job-table tbody", has_text=job)


def test_jobs_are_filtered_and_opened(page: Page, url: str, http: httpx.Client) -> None:
    tagged = submit(http, "the text of one", tags=["run:7"], metadata={"for": "a test"})
    refused = submit(http, "x" * 300)
    wait_until(lambda: http.get(f"/v1/jobs/{refused}").json()["state"] == "failed")
    page.goto(f"{url}/#jobs")
    expect(entry(page, refused).locator(".state")).to_have_text("failed")
    entry(page, refused).locator(".job").click()
    expect(entry(page, refused)).to_contain_text("tokens are too many")
    page.get_by_label("Tag").fill("run:7")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator(".job")).to_have_count(1)
    expect(page.locator("#job-status")).to_have_text("run:7: 1 of 1 ended, 1 succeeded")
    entry(page, tagged).locator(".job").click()
    expect(entry(page, tagged).locator("pre")).to_have_text("the text of one")
    for text in ("15 in the prompt (0 from the cache), 15 generated", '{"for":"a test"}', "Waited in the queue"):
        expect(entry(page, tagged)).to_contain_text(text)
    parts = re.compile(r"Where the time went.*waited in the queue: .*until the first token on \S+: ")
    expect(entry(page, tagged)).to_contain_text(parts)
    page.get_by_label("State").select_option("open")
    expect(page.get_by_text("No such jobs.")).to_be_visible()


def test_a_bulk_action_shows_how_far_it_is(page: Page, url: str, http: httpx.Client, redis_url: str) -> None:
    later = [submit(http, "later", not_before_s=3600, tags=["bulk"]) for _ in range(3)]
    answer = http.post("/v1/jobs/bulk", json={"action": "cancel", "filter": {"tag": "bulk"}, "dry_run": True}).json()
    wait_until(lambda: http.get(f"/v1/jobs/bulk/{answer['id']}").json()["state"] == "ended")
    pool = later[0].partition(".")[0]
    with sync_redis.Redis.from_url(redis_url) as redis:
        # As if another process had its lease, and had changed seven jobs.
        redis.hset(keys.bulk(pool, answer["id"]), mapping={"state": "running", "cursor": "", "changed": 7})
        redis.hset(keys.bulk(pool, answer["id"]), mapping={"holder": "other", "lease_until": 1 << 46})
        redis.zadd(keys.bulks(pool), {answer["id"]: answer["begun_ms"]})
        page.goto(f"{url}/#jobs")
        words = rf"bulk cancel {answer['id'][:8]}, 7 changed, 3 left, [\d.]+ a second, expected end .*\d"
        expect(page.locator("#job-status")).to_have_text(re.compile(words))
        redis.hset(keys.bulk(pool, answer["id"]), "state", "ended")
        redis.zrem(keys.bulks(pool), answer["id"])


def test_an_open_job_says_what_it_waits_for_and_what_would_help(page: Page, url: str, http: httpx.Client) -> None:
    job = submit(http, "later", not_before_s=600)
    page.goto(f"{url}/#jobs")
    entry(page, job).locator(".job").click()
    expect(entry(page, job)).to_contain_text(re.compile(r"Waits for.*its start time, in .*Would help.*--not-before 0"))


def test_ages_of_the_page_are_those_of_redis_clock(page: Page, url: str, http: httpx.Client) -> None:
    job = submit(http, "the text of one")
    page.add_init_script("const own = Date.now; Date.now = () => own() + 7_200_000")
    page.goto(f"{url}/#jobs")
    expect(entry(page, job).locator(".age")).to_have_text(re.compile(r"^\d+ s$"))


def test_a_job_is_canceled_and_retried(page: Page, url: str, http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.2
    job = submit(http, "x" * 200)
    page.goto(f"{url}/#jobs")
    shown = entry(page, job)
    expect(shown.locator(".state")).to_have_text("running")
    shown.locator(".job").click()
    expect(shown.get_by_role("button", name="Retry")).to_be_hidden()
    shown.get_by_role("button", name="Cancel").click()
    expect(shown.locator(".state")).to_have_text("cancelled")
    engine.step_s = 0.0
    shown.get_by_role("button", name="Retry").click()
    expect(shown.get_by_role("status")).to_contain_text("The retry is the job")
    retry = shown.get_by_role("status").inner_text().split()[-1].rstrip(".")
    expect(entry(page, retry).first.locator(".state")).to_have_text("succeeded")


def test_a_row_says_what_a_job_is_and_its_id_is_copied_on_demand(page: Page, url: str, http: httpx.Client) -> None:
    said = [("system", "Be brief."), ("user", "What?"), ("assistant", "It"), ("user", " And\n \x1b why? ")]
    job = submit_chat(http, [{"role": role, "content": content} for role, content in said])
    wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "succeeded")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{url}/#jobs")
    row = entry(page, job).locator(".job")
    cells = {"state": "succeeded", "model": "echo-alias", "words": "And why?", "in": "13", "out": "13"}
    for name, text in cells.items():
        expect(row.locator(f".{name}")).to_have_text(text)
    for name in ("waited", "took", "age"):
        expect(row.locator(f".{name}")).to_have_text(re.compile(r"^[\d.]+ (ms|s|min)$"))
    expect(page.get_by_text(job)).to_be_hidden()
    row.press("Enter")
    entry(page, job).get_by_role("button", name="Copy the id").click()
    assert page.evaluate("navigator.clipboard.readText()") == job
    row.press("ArrowLeft")
    expect(page.get_by_text(job)).to_be_hidden()


def test_forty_jobs_are_on_a_laptops_screen_and_all_of_500_within_reach(
    page: Page, url: str, http: httpx.Client, engine: EchoEngine
) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    bodies = [{"model": MODEL, "prompt": f"prompt {number} " + "word " * 30} for number in range(500)]
    for at in range(0, 500, 100):
        http.post("/v1/jobs", json=bodies[at : at + 100]).raise_for_status()
    page.goto(f"{url}/#jobs")
    expect(page.locator(".job")).to_have_count(50)
    bottoms = page.locator(".job").evaluate_all("rows => rows.map((row) => row.getBoundingClientRect().bottom)")
    assert sum(bottom <= 900 for bottom in bottoms) >= 40
    expect(page.locator(".job .words").first).to_contain_text("prompt 499")
    page.locator(".job").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".job").nth(49)).to_be_focused()
    while page.get_by_role("button", name="Show more").is_visible():
        count = page.locator(".job").count()
        page.get_by_role("button", name="Show more").click()
        expect(page.locator(".job").nth(count)).to_be_visible()
    assert page.locator(".job").count() >= 500
    assert scroll_width(page) == 1440


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


def test_an_operator_sees_all_tenants_jobs_and_no_text_of_them(page: Page, stack: Stack, operator: str) -> None:
    page.goto(f"{stack.start_gateway()}/#jobs")
    page.get_by_label("Key", exact=True).fill(operator)
    page.get_by_role("button", name="Save").click()
    job = page.locator("#job-table tbody").first
    expect(job.locator(".of-tenants")).to_have_text("default")
    expect(job.locator(".words")).to_be_empty()
    job.locator(".job").click()
    expect(job).to_contain_text("Waited in the queue")
    expect(job.locator(".row").get_by_role("button")).to_have_count(0)
    page.get_by_label("Tenant").fill("nobody")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.get_by_text("No such jobs.")).to_be_visible()
