"""A job's stream as one of Durable Streams: pages by offset, long-poll, events, tags and the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from fakes.waiting import wait_until

from penstock.gateway.apis.jobs import job_log, log_reader
from penstock.queue import keys
from tests.gateway.apis.jobs.test_jobs import ended, streamed, submit
from tests.gateway.conftest import MODEL, EchoEngine

START = "-1"


def page(http: httpx.Client, job_id: str, offset: str | None = START, **params: Any) -> httpx.Response:
    query = {**({} if offset is None else {"offset": offset}), **params}
    return http.get(f"/v1/jobs/{job_id}/stream", params=query)


def facts(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    """Return the status of an answer, and whether it is up to date and closed."""
    return answer.status_code, answer.headers.get("Stream-Up-To-Date"), answer.headers.get("Stream-Closed")


def control_events(text: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the messages of a stream of events, and its control events."""
    messages, controls = list[Any](), list[dict[str, Any]]()
    for block in filter(None, text.split("\n\n")):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data:"))
        if name == "event: data":
            messages += value
        else:
            assert name == "event: control", block
            controls.append(value)
    return messages, controls


@pytest.fixture
def held(engine: EchoEngine) -> Iterator[EchoEngine]:
    """An engine whose jobs wait after three tokens."""
    engine.waits_after = 3
    engine.may_go_on.clear()
    yield engine
    engine.may_go_on.set()


def read_to(http: httpx.Client, job_id: str, num_tokens: int) -> httpx.Response:
    """Return a page from the start once it has so many tokens."""
    return wait_until(
        lambda: page(http, job_id), lambda answer: sum(len(one["token_ids"]) for one in answer.json()) >= num_tokens
    )


def test_pages_have_the_objects_of_the_events_and_end_with_the_job(http: httpx.Client, held: EchoEngine) -> None:
    job_id = submit(http)
    first = read_to(http, job_id, 3)
    assert facts(first) == (200, "true", None)
    assert first.headers["Content-Type"] == "application/json"
    assert first.headers["Cache-Control"].startswith("private")
    assert first.headers["X-Penstock-Job"] == job_id
    behind = first.headers["Stream-Next-Offset"]
    nothing = page(http, job_id, behind)
    assert (facts(nothing), nothing.json()) == ((200, "true", None), [])
    assert (nothing.headers["Stream-Next-Offset"], nothing.headers["Cache-Control"]) == (behind, "no-store")
    head = http.head(f"/v1/jobs/{job_id}/stream")
    assert facts(head) == (200, "true", None)
    assert (head.headers["Stream-Next-Offset"], head.headers["Cache-Control"]) == (behind, "no-store")
    held.may_go_on.set()
    ended(http, job_id)
    rest = page(http, job_id, behind)
    assert facts(rest) == (200, "true", "true")
    assert [*first.json(), *rest.json()] == [data for _, data in streamed(http, job_id)]
    last = rest.headers["Stream-Next-Offset"]
    for offset in (last, "now"):
        for answer, body in ((page(http, job_id, offset), b"[]"), (page(http, job_id, offset, live="long-poll"), b"")):
            assert answer.content == body
            assert facts(answer) == (200 if body else 204, "true", "true")
            assert answer.headers["Stream-Next-Offset"] == last
    assert http.head(f"/v1/jobs/{job_id}/stream").headers["Stream-Closed"] == "true"


def test_each_offset_sorts_as_text_and_outlives_the_log(
    http: httpx.Client, engine: EchoEngine, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "MAX_PAGE_MESSAGES", 1)
    engine.step_s = 0.02
    job_id = submit(http, prompt="a" * 14)
    ended(http, job_id)

    def walked() -> list[tuple[str, bytes, bool]]:
        offset, found = START, []
        while True:
            answer = page(http, job_id, offset)
            is_last = "Stream-Closed" in answer.headers
            assert ("Stream-Up-To-Date" in answer.headers) is is_last
            offset = answer.headers["Stream-Next-Offset"]
            found.append((offset, answer.content, is_last))
            if is_last:
                return found

    pages = walked()
    assert [json.loads(body)[0]["index"] for _, body, _ in pages] == list(range(len(pages))) and len(pages) > 10
    offsets = [offset for offset, _, _ in pages]
    assert offsets == sorted(set(offsets)) and not {START, "now"} & set(offsets)
    with redis.Redis.from_url(redis_url) as direct:
        assert direct.delete(keys.log(job_id))
        assert walked() == pages
        assert direct.delete(keys.result(job_id))
    gone = page(http, job_id, offsets[3])
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "offset_gone")


def test_a_long_poll_gets_what_comes_and_its_cursor_never_repeats(
    http: httpx.Client, held: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(http)
    behind = read_to(http, job_id, 3).headers["Stream-Next-Offset"]
    monkeypatch.setattr(log_reader, "LONG_POLL_S", 0.1)
    silent = page(http, job_id, behind, live="long-poll")
    assert (facts(silent), silent.content, silent.headers["Stream-Next-Offset"]) == ((204, "true", None), b"", behind)
    cursor = silent.headers["Stream-Cursor"]
    again = page(http, job_id, behind, live="long-poll", cursor=cursor)
    assert int(again.headers["Stream-Cursor"]) > int(cursor)
    monkeypatch.setattr(log_reader, "LONG_POLL_S", 60.0)
    threading.Timer(0.2, held.may_go_on.set).start()
    for offset in (behind, "now"):
        came = page(http, job_id, offset, live="long-poll")
        assert came.status_code == (200 if came.content else 204)
        if offset == behind:
            assert came.json()[0]["index"] == int(behind[:10])


def test_events_follow_the_job_to_its_end(http: httpx.Client, held: EchoEngine) -> None:
    job_id = submit(http)
    behind = read_to(http, job_id, 3).headers["Stream-Next-Offset"]
    threading.Timer(0.2, held.may_go_on.set).start()
    answer = page(http, job_id, behind, live="sse")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    messages, controls = control_events(answer.text)
    # Nothing was there yet, which the first control event says at once.
    assert controls[0]["streamNextOffset"] == behind and controls[0]["upToDate"] and "streamCursor" in controls[0]
    assert controls[-1]["streamClosed"] and "streamCursor" not in controls[-1]
    assert messages == [data for _, data in streamed(http, job_id)][int(behind[:10]) :]
    end = controls[-1]["streamNextOffset"]
    _, (only,) = control_events(page(http, job_id, end, live="sse").text)
    assert (only["streamNextOffset"], only["upToDate"], only["streamClosed"]) == (end, True, True)


def test_a_known_page_is_a_304_until_the_stream_is_closed(http: httpx.Client, held: EchoEngine) -> None:
    job_id = submit(http)
    first = read_to(http, job_id, 3)
    url, behind = f"/v1/jobs/{job_id}/stream", first.headers["Stream-Next-Offset"]
    known = http.get(url, params={"offset": START}, headers={"If-None-Match": f'"x", {first.headers["ETag"]}'})
    assert (known.status_code, known.content, known.headers["ETag"]) == (304, b"", first.headers["ETag"])
    empty = page(http, job_id, behind).headers["ETag"]
    held.may_go_on.set()
    ended(http, job_id)
    closed = http.get(url, params={"offset": behind}, headers={"If-None-Match": empty})
    assert facts(closed) == (200, "true", "true")
    assert "ETag" not in page(http, job_id, "now").headers


def test_a_log_that_was_written_anew_has_no_offset_of_the_old_one(
    http: httpx.Client, engine: EchoEngine, redis_url: str
) -> None:
    job_id = submit(http)
    ended(http, job_id)
    offset = page(http, job_id).headers["Stream-Next-Offset"]
    index = int(offset[:10])
    for other in (f"{index + 1:010d}_0000000000", f"{max(1, index - 2):010d}_0000000099"):
        answer = page(http, job_id, other)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (410, "offset_gone", "offset"), other


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("offset=5", "offset"),
        ("offset=a,b", "offset"),
        ("offset=", "offset"),
        ("offset=-1&offset=-1", "offset"),
        ("offset=-1&live=yes", "live"),
        ("live=long-poll", "offset"),
        ("offset=-1&token_durability=disk", "token_durability"),
    ],
)
def test_a_wrong_query_is_refused_by_name(http: httpx.Client, engine: EchoEngine, query: str, param: str) -> None:
    job_id = submit(http)
    answer = http.get(f"/v1/jobs/{job_id}/stream?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_writes_are_a_405_and_other_jobs_a_404(http: httpx.Client, engine: EchoEngine) -> None:
    job_id = submit(http)
    for method in ("PUT", "POST", "DELETE"):
        answer = http.request(method, f"/v1/jobs/{job_id}/stream", content=b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed"), method
        assert set(answer.headers["Allow"].split(", ")) >= {"GET"}
    unknown = f"{job_id[:-4]}ffff"
    for live in ({}, {"live": "long-poll"}, {"live": "sse"}):
        assert page(http, unknown, **live).status_code == 404
    assert http.head(f"/v1/jobs/{unknown}/stream").status_code == 404


def test_a_job_that_needs_a_reader_outlives_the_pause_between_two_polls(
    engine: EchoEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pool cancels a job that has had no reader for half a second.
    monkeypatch.setattr(job_log, "PRESENT_S", 1.5)
    engine.step_s = 0.2
    job_id = submit(http, background=False, prompt="a" * 50)
    page(http, job_id)
    for _ in range(2):
        time.sleep(1.0)
        answer = page(http, job_id, "now")
        assert facts(answer) == (200, "true", None)
    # The reader does not come again.
    assert ended(http, job_id)["state"] == "cancelled"


def test_a_chat_is_read_by_offset_too(http: httpx.Client, engine: EchoEngine) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}]}
    answer = http.post("/v1/chat/completions", json=body)
    messages = page(http, answer.headers["X-Penstock-Job"]).json()
    assert "".join(one.get("text", "") for one in messages) == "abc"
