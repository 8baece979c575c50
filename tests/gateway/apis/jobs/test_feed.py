"""`/v1/jobs/events`: one stream has all ends of a tenant's jobs, and continues through any gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis

from penstock.gateway import open_feeds
from penstock.gateway.apis.jobs import feed
from penstock.queue import keys
from penstock.queue.broker.completions import MAX_CURSOR_CHARS
from tests.gateway.apis.jobs.test_job_tenants import Callers
from tests.gateway.apis.jobs.test_job_tenants import callers as callers
from tests.gateway.conftest import MODEL, Stack

PATH = "/v1/jobs/events"
Event = tuple[str, dict[str, Any]]


def submit(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hello", **body})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@contextmanager
def reading(http: httpx.Client, query: str = "", **headers: str) -> Iterator[Iterator[Event]]:
    """Yield the events of a stream, each with its id, behind the cursor at its start."""
    with http.stream("GET", f"{PATH}{query}", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = _events(answer.iter_lines())
        event_id, start = next(events)
        assert start == {"object": "job.cursor", "cursor": event_id}
        yield events


def _events(lines: Iterator[str]) -> Iterator[Event]:
    event_id = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield event_id, json.loads(line.removeprefix("data: "))


def cursor_of(http: httpx.Client, query: str = "") -> str:
    answer = http.get(f"{PATH}/cursor{query}")
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"object", "cursor"} and answer.json()["object"] == "job.cursor"
    return str(answer.json()["cursor"])


def test_one_stream_has_the_ends_of_all_jobs_after_a_cursor(http: httpx.Client) -> None:
    cursor = cursor_of(http)
    ids = {submit(http) for _ in range(3)}
    with reading(http, f"?after={cursor}") as events:
        found = [next(events) for _ in ids]
    assert {shown["id"] for _, shown in found} == ids
    for _, shown in found:
        links = {"self": f"/v1/jobs/{shown['id']}"}
        job = http.get(links["self"]).json()
        known = {"object": "job.completion", "id": job["id"], "pool": "echo", "state": "succeeded", "tags": []}
        assert shown == known | {"finished_ms": shown["finished_ms"], "links": links}
        assert 0 <= shown["finished_ms"] - job["ledger"]["finished_ms"] < 1000


def test_a_stream_without_a_cursor_begins_now(http: httpx.Client) -> None:
    submit(http, not_before_s=600)
    with reading(http) as events:
        job_id = submit(http)
        assert next(events)[1]["id"] == job_id


def test_a_stream_continues_after_any_event_at_another_gateway(stack: Stack, http: httpx.Client) -> None:
    cursor = cursor_of(http)
    for _ in range(3):
        submit(http)
    with reading(http, f"?after={cursor}") as events:
        found = [next(events) for _ in range(3)]
    with httpx.Client(base_url=stack.start_gateway(), timeout=60) as other:
        for at, (event_id, _) in enumerate(found[:-1]):
            with reading(other, f"?after={event_id}") as events:
                assert [next(events) for _ in found[at + 1 :]] == found[at + 1 :]
        # A browser that lost its connection repeats its URL, and says in the header where it was.
        with reading(other, f"?after={cursor}", **{"Last-Event-ID": found[1][0]}) as events:
            assert next(events) == found[2]


def test_a_stream_has_the_jobs_of_a_tag_and_of_a_pool(http: httpx.Client, redis_url: str) -> None:
    cursor, of_pool = cursor_of(http), cursor_of(http, "?pool=echo")
    ids = [submit(http, not_before_s=600) for _ in range(2)]
    with redis.Redis.from_url(redis_url) as client:
        client.hset(keys.job(ids[1]), mapping={"tag1": "red", "tag2": "blue", "extra": 9})
    for job_id in ids:
        http.delete(f"/v1/jobs/{job_id}")
    with reading(http, f"?after={cursor}&tag=red") as events:
        shown = next(events)[1]
    assert (shown["id"], shown["state"], shown["tags"]) == (ids[1], "cancelled", ["red", "blue"])
    with reading(http, f"?after={of_pool}&pool=echo") as events:
        assert [next(events)[1]["id"] for _ in ids] == ids


def test_a_reader_of_one_tag_gets_cursors_behind_what_it_skips(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_CURSOR_EVERY_S", 0.0)
    with reading(http, "?tag=red") as events:
        job_id = submit(http)
        event_id, shown = next(events)
        assert shown == {"object": "job.cursor", "cursor": event_id}
    with reading(http, f"?after={event_id}") as events:
        later = submit(http)
        assert next(events)[1]["id"] == later != job_id


def test_a_reader_that_fell_behind_is_told(http: httpx.Client, redis_url: str) -> None:
    cursor = cursor_of(http)
    ids = [submit(http) for _ in range(3)]
    with reading(http, f"?after={cursor}") as events:
        found = [next(events)[1] for _ in ids]
    with redis.Redis.from_url(redis_url) as client:
        client.xtrim(keys.ended("echo", "default"), maxlen=1, approximate=False)
    with reading(http, f"?after={cursor}") as events:
        gap, last = next(events)[1], next(events)[1]
    assert (gap["object"], gap["pool"], gap["reason"]) == ("job.gap", "echo", "trimmed")
    assert gap.keys() == {"object", "pool", "reason", "from_ms", "until_ms"}
    assert gap["from_ms"] <= found[0]["finished_ms"] and gap["until_ms"] == last["finished_ms"]
    assert last == found[2]


def test_wrong_parameters_are_refused_with_field_and_limit(http: httpx.Client) -> None:
    of_pool = cursor_of(http, "?pool=echo")
    for query, param, words in (
        ("after=nonsense", "after", f"at most {MAX_CURSOR_CHARS} characters"),
        (f"after={of_pool}", "after", "belongs to pool 'echo' alone"),
        (f"after={of_pool}&pool=other", "after", "belongs to pool 'echo' alone"),
        ("tag=", "tag", "1 to 64 characters"),
        (f"tag={'x' * 65}", "tag", "1 to 64 characters"),
        (f"pool={'x' * 70}", "pool", "at most 69 characters"),
        ("limit=3", "limit", "accepts only after, tag, pool and tenant"),
    ):
        answer = http.get(f"{PATH}?{query}")
        assert answer.status_code == 400, query
        error = answer.json()["error"]
        assert (error["param"], words in error["message"]) == (param, True), error
    answer = http.get(f"{PATH}/cursor?after=x")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
    assert http.get(PATH, headers={"Last-Event-ID": "x"}).status_code == 400


def test_metrics_tell_how_far_behind_the_slowest_reader_is() -> None:
    feeds = open_feeds.OpenFeeds()

    def values() -> list[float]:
        return [sample.value for family in feeds.metrics(time.time()) for sample in family.samples]

    assert values() == [0, 0]
    with feeds.counting("acme"), feeds.counting("acme") as first, feeds.counting("rival") as second:
        assert values() == [3, 0]
        first.unsent_since_ms, second.unsent_since_ms = (int(time.time() * 1000) - ms for ms in (5000, 90_000))
        num_open, lag_s = values()
        assert num_open == 3 and 90 <= lag_s < 100
    assert values() == [0, 0]


def test_a_stream_of_completions_is_counted(http: httpx.Client) -> None:
    with reading(http):
        assert "penstock_completion_feeds 1.0" in http.get("/metrics").text
    assert "penstock_completion_feed_lag_seconds 0.0" in http.get("/metrics").text


def test_a_tenant_has_a_limit_of_open_streams(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_feeds, "MAX_FEEDS_OF_TENANT", 1)
    with reading(http):
        answer = http.get(PATH)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_feeds")
        assert "retry-after" in answer.headers


def test_a_feed_belongs_to_its_tenant(callers: Callers) -> None:
    mine, theirs = cursor_of(callers["acme"]), cursor_of(callers["rival"])
    job_id = submit(callers["acme"], not_before_s=600)
    callers["acme"].delete(f"/v1/jobs/{job_id}")
    other = submit(callers["rival"], not_before_s=600)
    callers["rival"].delete(f"/v1/jobs/{other}")
    with reading(callers["rival"], f"?after={theirs}") as events:
        assert next(events)[1]["id"] == other
    answer = callers["rival"].get(f"{PATH}?after={mine}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")
    assert "belongs to another tenant" in answer.json()["error"]["message"]
    for path in (PATH, f"{PATH}/cursor"):
        assert callers["rival"].get(f"{path}?tenant=acme").status_code == 403
    with reading(callers["ops"], f"?tenant=acme&after={mine}") as events:
        assert next(events)[1]["id"] == job_id
