"""The view of batches in a real browser: upload, progress, pause, cancel, retry and download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.gateway.apis.web.conftest import scroll_width
from tests.gateway.conftest import MODEL, EchoEngine, Stack

CHAT = "/v1/chat/completions"
FIELD = "Drop a file of requests here"


@pytest.fixture(scope="module")
def batch_url(stack: Stack, shared_engine: EchoEngine, tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(tmp_path_factory.mktemp("files")))
        url: str = stack.start_gateway()
        return url


def row(custom_id: str, **body: Any) -> str:
    content = {"model": MODEL, "messages": [{"role": "user", "content": f"text {custom_id}"}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": content})


def upload(page: Page, *rows: str) -> Locator:
    """Upload rows, and return the newest batch of the list once it is there."""
    name = f"{len(rows)}-rows.jsonl"
    content = "".join(f"{one}\n" for one in rows).encode()
    page.get_by_label(FIELD).set_input_files({"name": name, "mimeType": "application/jsonl", "buffer": content})
    told = page.locator("#upload-status")
    expect(told).to_contain_text(f"{name} is batch batch_")
    batch_id = told.inner_text().split()[-1].rstrip(".")
    batch = page.locator(".batch", has_text=batch_id)
    expect(batch).to_be_visible()
    return batch


def downloaded(page: Page, batch: Locator, button: str) -> list[dict[str, Any]]:
    with page.expect_download() as found:
        batch.get_by_role("button", name=button).click()
    return [json.loads(line) for line in Path(found.value.path()).read_text().splitlines()]


def test_a_file_is_answered_downloaded_and_its_failed_rows_are_tried_again(
    page: Page, batch_url: str, engine: EchoEngine
) -> None:
    page.goto(f"{batch_url}/#batches")
    expect(page.get_by_text("No batches yet.")).to_be_visible()
    batch = upload(page, *(row(f"r{number}") for number in range(20)), row("wrong", temperature=-1))
    expect(batch.locator(".badge")).to_have_text("completed")
    expect(batch).to_contain_text("20 of 21 rows answered · 1 failed")
    answers = downloaded(page, batch, "Download the output")
    assert {one["custom_id"] for one in answers} == {f"r{number}" for number in range(20)}
    assert [one["custom_id"] for one in downloaded(page, batch, "Download the errors")] == ["wrong"]
    batch.get_by_role("button", name="Retry failed rows").click()
    expect(page.locator("#upload-status")).to_contain_text("1 row is batch")
    newest = page.locator(".batch").first
    expect(newest).to_contain_text("0 of 1 rows answered · 1 failed")
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert scroll_width(page) <= width


def test_a_message_batch_is_shown_and_its_results_are_downloaded(
    page: Page, batch_url: str, engine: EchoEngine
) -> None:
    params = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "a text"}]}
    requests = [{"custom_id": f"m{number}", "params": params} for number in range(3)]
    requests.append({"custom_id": "wrong", "params": {**params, "temperature": -1}})
    made = httpx.post(f"{batch_url}/v1/messages/batches", json={"requests": requests}, timeout=60).json()
    page.goto(f"{batch_url}/#batches")
    batch = page.locator(".batch", has_text=made["id"])
    expect(batch.locator(".badge")).to_have_text("completed")
    expect(batch).to_contain_text("/v1/messages · 3 of 4 rows answered · 1 failed")
    results = {one["custom_id"]: one["result"]["type"] for one in downloaded(page, batch, "Download the output")}
    assert results == {"m0": "succeeded", "m1": "succeeded", "m2": "succeeded", "wrong": "errored"}


def flow_row(custom_id: str, **fields: Any) -> str:
    return json.dumps({**json.loads(row(custom_id)), **fields})


def test_the_graph_of_a_flow_shows_what_each_row_waits_for(page: Page, batch_url: str, engine: EchoEngine) -> None:
    engine.may_go_on.clear()
    page.goto(f"{batch_url}/#batches")
    rows = [flow_row("first"), flow_row("second", after=["first"]), flow_row("third", after=["first", "second"])]
    batch = upload(page, *rows)
    batch.get_by_role("button", name="Show the rows").click()
    boxes = batch.locator(".flow-row")
    expect(boxes).to_have_count(3)
    expect(boxes.nth(2)).to_contain_text("waiting")
    expect(boxes.nth(2).locator("title")).to_contain_text("waits for first, second")
    assert batch.locator(".flow-edge").count() == 3
    engine.may_go_on.set()
    expect(batch.locator(".flow")).to_contain_text("3 succeeded")
    expect(batch.get_by_role("button", name="Retry failed rows")).to_be_hidden()
    batch.get_by_role("button", name="Hide the rows").click()
    expect(boxes.first).to_be_hidden()
    page.set_viewport_size({"width": 390, "height": 900})
    batch.get_by_role("button", name="Show the rows").click()
    assert scroll_width(page) <= 390


def test_a_batch_is_paused_resumed_and_canceled(page: Page, batch_url: str, engine: EchoEngine) -> None:
    engine.step_s = 0.2
    page.goto(f"{batch_url}/#batches")
    batch = upload(page, *(row(f"r{number}", max_tokens=200) for number in range(200)))
    batch.get_by_role("button", name="Pause").click()
    expect(batch.locator(".badge")).to_have_text("paused")
    batch.get_by_role("button", name="Resume").click()
    expect(batch.locator(".badge")).to_have_text("in progress")
    batch.get_by_role("button", name="Cancel").click()
    expect(batch.locator(".badge")).to_have_text("cancelled")


def test_webhook_endpoints_show_their_deliveries(page: Page, batch_url: str) -> None:
    """Its receiver does not exist. A disabled endpoint's deliveries are dead at once."""
    with httpx.Client(base_url=batch_url, timeout=60) as http:
        fields = {"url": "https://receiver.invalid/", "name": "ends of batches", "event_types": ["batch.completed"]}
        endpoint = http.post("/v1/webhook_endpoints", json=fields).json()["id"]
        page.goto(f"{batch_url}/#batches")
        shown = page.locator("#webhook-list article", has_text="ends of batches")
        expect(shown).to_contain_text("No dead deliveries.")
        batch = upload(page, row("r"))
        expect(batch.locator(".badge")).to_have_text("completed")
        # Until one is chosen, it is the first state that has deliveries.
        expect(shown.get_by_label("State of the deliveries")).to_have_value("pending")
        expect(shown).to_contain_text("batch.completed of batch_")
        expect(shown.locator("li")).to_contain_text(", next ")
        http.post(f"/v1/webhook_endpoints/{endpoint}", json={"status": "disabled"})
        expect(shown.locator(".badge")).to_have_text("disabled")
        shown.get_by_label("State of the deliveries").select_option("dead")
        again = shown.get_by_role("button", name="Deliver all dead ones again")
        expect(again).to_be_visible()
        shown.get_by_role("button", name="Enable").click()
        expect(shown.locator(".badge")).to_have_text("enabled")
        again.click()
        expect(shown).to_contain_text("No dead deliveries.")
        http.delete(f"/v1/webhook_endpoints/{endpoint}")
        page.set_viewport_size({"width": 390, "height": 900})
        assert scroll_width(page) <= 390


def test_what_is_no_batch_file_is_refused_before_it_is_stored(page: Page, batch_url: str) -> None:
    page.goto(f"{batch_url}/#batches")
    page.get_by_label(FIELD).set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"hello\n"})
    expect(page.locator("#upload-status")).to_contain_text("The first line is no JSON object")


def test_a_gateway_without_storage_says_what_it_lacks(page: Page, url: str) -> None:
    page.goto(f"{url}/#batches")
    content = f"{row('r')}\n".encode()
    page.get_by_label(FIELD).set_input_files({"name": "a.jsonl", "mimeType": "text/plain", "buffer": content})
    expect(page.locator("#upload-status")).to_contain_text("PENSTOCK_FILES_URL")
