"""Streams on the wire: framing, waiting in the queue, late refusals, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import closing
from http.client import HTTPConnection
from itertools import accumulate
from urllib.parse import urlsplit

import httpx
import msgpack
import openai
import pytest
import redis
from fakes.waiting import wait_until

from penstock.producer.client import AsyncJob

MODEL = "acme/echo"
JOB = "x-penstock-job"
IDS = {"X-Penstock-Event-Ids": "true"}


def text_body(prompt: str, **options: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 250, **options}


def events_of(raw: bytes) -> list[tuple[str | None, str]]:
    """Return (id, data) of each event. Fail on anything except events and comments."""
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw.decode("ascii").removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        assert set(fields) <= {"id", "data"}
        events.append((fields.get("id"), fields["data"]))
    return events


def state_of(stack, job_id: str) -> str:
    async def look() -> str:
        async with stack.client() as client:
            return (await client.status(job_id)).state

    return stack.call(look())


def open_jobs(stack, pool: str) -> set[bytes]:
    with redis.Redis.from_url(stack.redis_url) as client:
        return client.smembers(f"penstock:{{{pool}}}:open")


def test_event_ids_have_the_job_the_chunk_and_the_number_of_tokens(http, engine):
    engine.step_s = 0.05
    response = http.post("/v1/completions", json=text_body("a\nb", stream=True), headers=IDS)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *pieces, last = events_of(response.content)
    # Tokens that pile up while a node has no turn share a chunk; each is a byte of text here.
    num_bytes = accumulate(len(text_of([piece])) for piece in pieces)
    expected = [f"{response.headers[JOB]}:{i}:{so_far}" for i, so_far in enumerate(num_bytes)]
    assert [event_id for event_id, _ in pieces[:-1]] == expected[:-1]
    assert len(pieces) > 1 and text_of(pieces) == "a\nb"
    assert last == (None, "[DONE]")


def test_response_header_names_one_job_for_each_prompt(http):
    response = http.post("/v1/completions", json=text_body(["a", "b"], stream=True))
    assert len(set(response.headers[JOB].split(", "))) == 2


def test_full_pool_is_a_429_with_retry_after_and_no_job_of_a_list_stays(stack, shared_engine, http):
    engine = type(shared_engine)()
    engine.step_s = 0.1
    stack.start_node(engine, model="acme/tiny", pool="tiny", max_open_jobs=2, reattach_grace_ms=60_000)
    wait_until(lambda: "acme/tiny" in http.get("/v1/models").text)
    job = {"model": "acme/tiny", "prompt": "a" * 120, "params": {"max_tokens": 120}}
    other = http.post("/v1/jobs", json=job).json()["id"]
    body = {**text_body(["a" * 250] * 2), "model": "acme/tiny"}
    for stream in (False, True):
        response = http.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        wait_until(lambda: open_jobs(stack, "tiny") == {other.encode()})
    api = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)
    with api, pytest.raises(openai.RateLimitError):
        api.completions.create(model="acme/tiny", prompt=["a"] * 2)
    http.delete(f"/v1/jobs/{other}")


def test_a_refusal_by_the_node_is_a_real_400_although_a_stream_was_asked_for(http):
    response = http.post("/v1/completions", json=text_body("a" * 300, stream=True))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_prompts_of_one_list_stream_side_by_side(http, engine):
    engine.step_s = 0.005
    response = http.post("/v1/completions", json=text_body(["a" * 200, "b" * 200], stream=True))
    indices = [json.loads(data)["choices"][0]["index"] for _, data in events_of(response.content)[:-1]]
    assert indices.index(1) < len(indices) // 4


# One sequence at a time: the second request waits in the queue. -----------------------------------------


@pytest.fixture(scope="module")
def narrow(stack, shared_engine):
    """An engine of its own behind a node with one slot."""
    engine = type(shared_engine)()
    stack.start_node(engine, model="acme/narrow", pool="narrow", max_num_seqs=1, reattach_grace_ms=60_000)
    return engine


@pytest.fixture(scope="module")
def hasty_url(stack, narrow):
    """A gateway that soon sends status 200 to a stream whose job waits."""
    return stack.start_gateway(first_chunk_wait_s=0.3, keep_alive_s=0.1)


@pytest.fixture
def hold(stack, narrow):
    """Occupy the one slot until the returned function is called."""
    narrow.step_s = 0.02

    async def take_slot():
        client = await stack.client().connect()
        job = await client.submit("x" * 250, model="acme/narrow", background=False)
        await anext(job.stream())

        async def free() -> None:
            await job.cancel()
            await client.close()

        return free

    free, freed = stack.call(take_slot()), threading.Event()

    def free_once() -> None:
        if not freed.is_set():
            freed.set()
            stack.call(free())

    yield free_once
    free_once()


def narrow_body(prompt: str) -> dict[str, object]:
    return {**text_body(prompt, stream=True), "model": "acme/narrow"}


def test_waiting_stream_answers_200_and_sends_keep_alives(hasty_url, hold):
    with httpx.stream("POST", f"{hasty_url}/v1/completions", json=narrow_body("hello"), timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        first, blank, second, _ = [next(lines) for _ in range(4)]
        assert re.fullmatch(r": waiting, position 1(, about \d+ s)?", first), first
        assert second.startswith(": waiting, position 1") and not blank
        hold()
        said = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert "".join(said) == "hello"


def test_openais_client_ignores_keep_alives_before_the_first_token(hasty_url, hold):
    with openai.OpenAI(base_url=f"{hasty_url}/v1", api_key="none", max_retries=0) as api:
        stream = api.completions.create(model="acme/narrow", prompt="hello", stream=True)
        threading.Timer(0.5, hold).start()
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello"


def test_openais_client_ignores_keep_alives_between_tokens(hasty_url, narrow):
    narrow.step_s = 0.4
    with openai.OpenAI(base_url=f"{hasty_url}/v1", api_key="none", max_retries=0) as api:
        stream = api.completions.create(model="acme/narrow", prompt="abc", stream=True)
        assert [chunk.choices[0].text for chunk in stream] == ["a", "b", "c"]


def test_a_refusal_after_the_200_is_an_error_event(hasty_url, hold):
    with httpx.stream("POST", f"{hasty_url}/v1/completions", json=narrow_body("a" * 300), timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith(": waiting")
        hold()
        (data,) = [line for line in lines if line.startswith("data: ")]
    error = json.loads(data[6:])["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "context_length_exceeded",
        "prompt",
    )


def test_openais_client_raises_the_late_refusal(hasty_url, hold):
    with openai.OpenAI(base_url=f"{hasty_url}/v1", api_key="none", max_retries=0) as api:
        stream = api.completions.create(model="acme/narrow", prompt="a" * 300, stream=True)
        threading.Timer(0.1, hold).start()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert caught.value.code == "context_length_exceeded"


def test_a_refusal_before_the_wait_is_over_is_a_status(stack, narrow, hold):
    url = stack.start_gateway(first_chunk_wait_s=10)
    threading.Timer(0.4, hold).start()
    response = httpx.post(f"{url}/v1/completions", json=narrow_body("a" * 300), timeout=60)
    assert response.status_code == 400


def test_a_job_cancelled_elsewhere_ends_its_stream_with_an_error_event(stack, http, engine):
    engine.step_s = 0.02

    async def cancel(job_id: str) -> None:
        async with stack.client() as client:
            await client.cancel(job_id)

    with http.stream("POST", "/v1/completions", json=text_body("a" * 250, stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        stack.call(cancel(response.headers[JOB]))
        data = [line for line in lines if line.startswith("data: ")]
    assert json.loads(data[-1][6:])["error"]["code"] == "cancelled"


# Hang-ups. -------------------------------------------------------------------------------------------


def test_disconnect_cancels_the_jobs_of_a_stream(stack, http, engine):
    engine.step_s = 0.05
    with http.stream("POST", "/v1/completions", json=text_body(["a" * 250, "b" * 250], stream=True)) as response:
        next(response.iter_lines())
        job_ids = response.headers[JOB].split(", ")
    for job_id in job_ids:
        wait_until(lambda job_id=job_id: state_of(stack, job_id) == "cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_before_the_first_token_cancels_the_job(stack, hasty_url, hold, stream):
    before, address = open_jobs(stack, "narrow"), urlsplit(hasty_url)
    body = json.dumps({**narrow_body("hello"), "stream": stream})
    with closing(HTTPConnection(address.hostname, address.port)) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        wait_until(lambda: open_jobs(stack, "narrow") > before)
    wait_until(lambda: open_jobs(stack, "narrow") == before)


def test_a_repeated_idempotency_key_is_the_same_job(http):
    answers = [
        http.post("/v1/completions", json=text_body(["ab", "cd"]), headers={"Idempotency-Key": "again"})
        for _ in range(2)
    ]
    assert answers[0].headers[JOB] == answers[1].headers[JOB]
    assert [c["text"] for c in answers[1].json()["choices"]] == ["ab", "cd"]
    other = http.post("/v1/completions", json=text_body(["xy", "cd"]), headers={"Idempotency-Key": "again"})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"


def test_broken_stream_with_an_idempotency_key_can_be_requested_again(http, narrow):
    narrow.step_s = 0.02
    call = {"json": narrow_body("a" * 50), "headers": {"Idempotency-Key": "broken"}}
    with http.stream("POST", "/v1/completions", **call) as response:
        next(response.iter_lines())
        job_id = response.headers[JOB]
    again = http.post("/v1/completions", **call)
    assert again.headers[JOB] == job_id
    pieces = [json.loads(data) for _, data in events_of(again.content)[:-1]]
    assert "".join(p["choices"][0]["text"] for p in pieces) == "a" * 50


async def test_concurrent_streams_do_not_mix(url, engine):
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def said(prompt: str) -> str:
            response = (await http.post("/v1/completions", json=text_body(prompt, stream=True))).raise_for_status()
            pieces = [json.loads(data) for _, data in events_of(response.content)[:-1]]
            return "".join(p["choices"][0]["text"] for p in pieces)

        prompts = [f"prompt {i} " * 5 for i in range(100)]
        assert await asyncio.gather(*map(said, prompts)) == prompts


# Coming back. ----------------------------------------------------------------------------------------


def text_of(events) -> str:
    return "".join(json.loads(data)["choices"][0]["text"] for _, data in events if data != "[DONE]")


def cut_stream(http, body: dict[str, object], num_events: int) -> tuple[str, str]:
    """Return the text of the first events, and the last one's id."""
    with http.stream("POST", "/v1/completions", json=body, headers=IDS) as response:
        lines, raw = response.iter_lines(), ""
        while raw.count("data: ") < num_events:
            raw += next(lines) + "\n"
    seen = events_of((raw + "\n").encode())
    return text_of(seen), seen[-1][0]


@pytest.mark.parametrize("how", ["header", "query"])
@pytest.mark.parametrize("ended", [False, True])
def test_interrupted_stream_resumes_at_another_gateway(stack, http, narrow, how, ended):
    narrow.step_s = 0.02
    body = narrow_body("gates open by pressure")
    text, place = cut_stream(http, body, 5)
    job_id = place.partition(":")[0]
    if ended:
        with http.stream("POST", "/v1/completions", json=body, headers={"Last-Event-ID": place}) as response:
            response.read()
        with redis.Redis.from_url(stack.redis_url) as client:
            client.delete(f"penstock:{{narrow}}:log:{job_id}")
    asked = {"headers": {"Last-Event-ID": place}} if how == "header" else {"params": {"after": place}}
    rest = httpx.post(f"{stack.start_gateway()}/v1/completions", json=body, **asked, timeout=60)
    assert rest.headers[JOB] == job_id
    events = events_of(rest.content)
    assert events[0][0].startswith(f"{job_id}:5:")
    assert events[-1][1] == "[DONE]"
    assert text + text_of(events) == "gates open by pressure"


def test_interrupted_stream_that_is_not_resumed_is_canceled_after_a_while(stack, http, engine):
    engine.step_s = 0.05
    _, place = cut_stream(http, text_body("a" * 250, stream=True), 2)
    job_id = place.partition(":")[0]
    wait_until(lambda: state_of(stack, job_id) == "cancelled")
    body = text_body("a" * 250, stream=True)
    again = http.post("/v1/completions", json=body, headers={"Last-Event-ID": place})
    assert again.json()["error"]["message"] == "the job has no reader any more"


def test_a_stream_without_event_ids_is_cancelled_as_soon_as_its_caller_is_gone(stack, http, narrow):
    """The grace time of this pool is a minute."""
    narrow.step_s = 0.05
    with http.stream("POST", "/v1/completions", json=narrow_body("a" * 250)) as response:
        next(response.iter_lines())
    wait_until(lambda: state_of(stack, response.headers[JOB]) == "cancelled")


def cut_log_otherwise(stack, job_id: str, at: int) -> None:
    """Rewrite the log as another node would after Redis lost it: two chunks of one choice become one."""
    with redis.Redis.from_url(stack.redis_url) as client:
        key = f"penstock:{{echo}}:log:{job_id}"
        chunks = [msgpack.unpackb(entry) for entry in client.lrange(key, 0, -1)]
        first = chunks[at]
        second = next(chunk for chunk in chunks[at + 1 :] if chunk["c"] == first["c"])
        chunks.remove(second)
        first |= {name: first[name] + second[name] for name in ("t", "s", "l") if name in first}
        client.delete(key)
        client.rpush(key, *(msgpack.packb(chunk | {"i": i}) for i, chunk in enumerate(chunks)))


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"logprobs": 1}])
def test_resumed_stream_is_exact_although_its_log_has_other_chunk_borders(stack, http, engine, options):
    engine.step_s = 0.03
    body = text_body("abcdefgh", stream=True) | options
    whole = http.post("/v1/completions", json=body, headers=IDS)
    *events, _ = events_of(whole.content)
    assert len(events) > 4
    cut_log_otherwise(stack, whole.headers[JOB], 2)
    refused = []
    for at, (place, _) in enumerate(events):
        answer = http.post("/v1/completions", json=body, headers={"Last-Event-ID": place})
        if "stream_diverged" in answer.text:
            assert "choices" not in answer.text
            refused.append(at)
        else:
            assert sorted(text_of(events_of(answer.content))) == sorted(text_of(events[at + 1 :]))
    assert refused[:2] == [2, 3]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_resumed_stream_ends_with_the_usage_of_the_whole_answer(http, num_choices, monkeypatch):
    # It reads the usage from the job's record. A result would take memory that it has not claimed.
    monkeypatch.setattr(AsyncJob, "packed_result", None)
    options = {"include_usage": True, "include_event_ids": True}
    body = text_body("abc", stream=True, n=num_choices, stream_options=options)
    *whole, usage, _ = events_of(http.post("/v1/completions", json=body).content)
    assert json.loads(usage[1])["usage"]["completion_tokens"] == 3 * num_choices
    for place, _ in whole:
        *_, again, _ = events_of(http.post("/v1/completions", json=body, params={"after": place}).content)
        assert json.loads(again[1])["usage"] == json.loads(usage[1])["usage"]


@pytest.mark.parametrize("num_choices", [1, 2])
def test_resumed_chat_sends_the_role_once_for_each_choice(http, num_choices):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "stream": True, "n": num_choices}
    *whole, _ = events_of(http.post("/v1/chat/completions", json=body, headers=IDS).content)
    said = [json.loads(data)["choices"] for _, data in whole]
    for at, (place, _) in enumerate(whole):
        *rest, _ = events_of(http.post("/v1/chat/completions", json=body, params={"after": place}).content)
        assert [json.loads(data)["choices"] for _, data in rest] == said[at + 1 :]


@pytest.mark.parametrize(
    ("place", "options", "status"),
    [
        ("nonsense", {"stream": True}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:3", {"stream": True}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:x:3", {"stream": True}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:3:-1", {"stream": True}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:3:" + "9" * 10, {"stream": True}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:3:4", {"stream": False}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:3:4", {"stream": True, "prompt": ["a", "b"]}, 400),
        ("echo.01a1fa14-846e-7256-a773-ee21bc2d4d97:3:4", {"stream": True}, 404),
    ],
)
def test_invalid_stream_position_is_refused(http, place, options, status):
    answer = http.post("/v1/completions", json=text_body("hello") | options, headers={"Last-Event-ID": place})
    assert answer.status_code == status
    assert answer.json()["error"]["param" if status == 400 else "code"] == {400: "after", 404: "job_not_found"}[status]


def test_each_token_comes_in_an_event_of_its_own_if_steps_take_longer_than_sending(http, engine) -> None:
    engine.step_s = 0.05
    said = "one letter a step"
    with http.stream("POST", "/v1/completions", json=text_body(said, stream=True)) as response:
        texts = [json.loads(data)["choices"][0]["text"] for _, data in events_of(response.read()) if data != "[DONE]"]
    assert "".join(texts) == said
    assert sum(len(text) == 1 for text in texts) >= len(said) - 2, "two may come together on a machine under load"
