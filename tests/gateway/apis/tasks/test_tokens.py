"""`/tokenize` and `/detokenize` over HTTP, and the same through the Python clients."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from fakes.announced_pools import announcing, withdrawing
from fakes.waiting import wait_until

from penstock import AsyncClient, Client, RequestError, UnsupportedKindError
from penstock.contract.pool import PoolRecord
from penstock.contract.tasks import MAX_TASK_TOKENS, Tokenize
from penstock.queue.broker.connection import connect
from tests.gateway.conftest import MAX_MODEL_LEN, MODEL, EchoEngine, Stack

HI = [72, 105]


def error_of(answer: httpx.Response) -> tuple[int, str, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"], error["message"]


def test_text_becomes_tokens_in_vllms_shape(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "Hi"})
    assert answer.status_code == 200
    assert answer.json() == {"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": HI, "token_strs": None}
    assert answer.headers["X-Penstock-Job"].startswith("echo.")


def test_token_strings_come_if_asked_for(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": MODEL, "prompt": "Hi", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["<72>", "<105>"]


def test_model_may_be_omitted_if_only_one_is_served(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "Hi"}).json()["tokens"] == HI
    assert http.post("/detokenize", json={"tokens": HI}).json() == {"prompt": "Hi"}


def test_chat_is_tokenized_with_its_tools_and_options(http: httpx.Client, engine: EchoEngine) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}

    assert http.post("/tokenize", json=body).json()["tokens"] == HI
    assert engine.tokenizer.last_options == (True, False)
    assert engine.tokenizer.last_chat is not None
    assert json.loads(engine.tokenizer.last_chat[1] or "") == [tool]

    http.post("/tokenize", json={**body, "add_generation_prompt": False, "add_special_tokens": True})
    assert engine.tokenizer.last_options == (False, True)


def test_adapter_uses_its_models_tokenizer(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"model": "echo-tuned", "prompt": "Hi"}).json()["tokens"] == HI


def test_tokens_become_text(http: httpx.Client) -> None:
    answer = http.post("/detokenize", json={"model": MODEL, "tokens": [*"grüße 👋".encode()]})
    assert answer.json() == {"prompt": "grüße 👋"}


def test_long_text_is_tokenized_whole_and_sent_in_pieces(http: httpx.Client) -> None:
    text = "word " * 60_000
    body = {"model": MODEL, "prompt": text, "return_token_strs": True}
    answer = http.post("/tokenize", json=body)
    assert "content-length" not in answer.headers
    found = answer.json()
    assert found["tokens"] == [*text.encode()]
    assert found["count"] == len(found["token_strs"]) == len(text)
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("tokenize", {}, "messages", "send either prompt or messages"),
        ("tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages", "either prompt or"),
        ("tokenize", {"messages": []}, "messages", "at least 1 items"),
        ("tokenize", {"prompt": 5}, "prompt", "must be a string"),
        ("tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, None, "tools may be"),
        ("tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message", "not supported"),
        ("tokenize", {"prompt": "x", "chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ("tokenize", {"prompt": "x", "max_tokens": 5}, "max_tokens", "unknown field"),
        ("tokenize", {"prompt": "x", "stream": True}, "stream", "unknown field"),
        ("detokenize", {"tokens": []}, "tokens", "at least 1 items"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]", "must be at least 0"),
        ("detokenize", {"tokens": ["x"]}, "tokens[0]", "must be an integer"),
        ("detokenize", {"tokens": [72, 300]}, "tokens", "token id 300 is not in the model's vocabulary"),
    ],
)
def test_wrong_body_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    status, _, found, text = error_of(http.post(f"/{path}", json={"model": MODEL, **body}))
    assert (status, found) == (400, param)
    assert message in text


def test_too_many_tokens_are_refused_by_name(http: httpx.Client) -> None:
    body = b'{"tokens":[' + b"1," * MAX_TASK_TOKENS + b"1]}"
    status, _, param, message = error_of(
        http.post("/detokenize", content=body, headers={"content-type": "application/json"})
    )
    assert (status, param) == (400, "tokens")
    assert str(MAX_TASK_TOKENS) in message


def test_text_of_too_many_tokens_is_refused_by_the_node(http: httpx.Client) -> None:
    status, _, param, message = error_of(http.post("/tokenize", json={"prompt": "x" * (MAX_TASK_TOKENS + 1)}))
    assert (status, param) == (400, "prompt")
    assert f"{MAX_TASK_TOKENS + 1} tokens" in message


def test_unknown_model_is_refused(http: httpx.Client) -> None:
    assert error_of(http.post("/tokenize", json={"model": "nope", "prompt": "x"}))[:2] == (404, "model_not_found")


def test_same_idempotency_key_gives_the_same_job(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "tokens-once"}
    first, again = (http.post("/tokenize", json={"prompt": "Hi"}, headers=headers) for _ in range(2))
    assert first.headers["X-Penstock-Job"] == again.headers["X-Penstock-Job"]
    assert first.json() == again.json()


def test_tokenization_does_not_wait_for_a_full_engine(stack: Stack) -> None:
    engine = EchoEngine()
    engine.num_kv_tokens, engine.step_s = 256, 0.05
    stack.start_node(engine, model="acme/full", pool="full", max_num_seqs=1)
    url = stack.start_gateway()
    with httpx.Client(base_url=url, timeout=60) as client:
        long_job = {"model": "acme/full", "prompt": "y" * 200, "max_tokens": 200}
        running = [
            threading.Thread(target=lambda: client.post("/v1/completions", json=long_job), daemon=True)
            for _ in range(3)
        ]
        for thread in running:
            thread.start()
        wait_until(engine.has_work)
        assert client.post("/tokenize", json={"model": "acme/full", "prompt": "Hi"}).json()["tokens"] == HI
        assert running[0].is_alive()
        assert running[1].is_alive()
        engine.step_s = 0
        for thread in running:
            thread.join()


def test_usage_counts_the_job_and_no_tokens(stack: Stack, http: httpx.Client) -> None:
    def counted() -> dict[str, int]:
        rows = http.get("/v1/usage?all=true").json()["data"]
        names = ("jobs", "prompt_tokens", "completion_tokens")
        return {name: sum(row[name] for row in rows if row["pool"] == "echo") for name in names}

    before = counted()
    http.post("/tokenize", json={"model": MODEL, "prompt": "Hi"})
    after = counted()
    assert after == {**before, "jobs": before["jobs"] + 1}


def test_python_clients_tokenize_count_and_detokenize(url: str, redis_url: str, engine: EchoEngine) -> None:
    with Client(redis_url) as client:
        found = client.tokenize("Hi", model=MODEL, return_token_strs=True)
        assert (found.num_tokens, found.max_model_len) == (2, MAX_MODEL_LEN)
        assert (found.token_ids, found.token_strs) == ((72, 105), ("<72>", "<105>"))
        chat = [{"role": "user", "content": "Hello"}]
        assert client.count_tokens(chat, model=MODEL, add_generation_prompt=False) == 5
        assert engine.tokenizer.last_options == (False, False)
        assert client.detokenize(HI, model=MODEL) == "Hi"
        with pytest.raises(RequestError, match="must be token ids"):
            client.detokenize("Hi", model=MODEL)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="must be a text or a chat"):
            client.tokenize(HI, model=MODEL)
        with pytest.raises(RequestError, match="vocabulary"):
            client.detokenize([300], model=MODEL)
        with pytest.raises(RequestError, match=f"limit of a task is {MAX_TASK_TOKENS}"):
            client.detokenize([1] * (MAX_TASK_TOKENS + 1), model=MODEL)


def test_result_of_a_task_is_kept_like_any_result(url: str, redis_url: str, engine: EchoEngine) -> None:
    with Client(redis_url) as client:
        job = client.submit("Hi", model=MODEL, task=Tokenize())
        assert job.result().output == client.result(job.id).output
        assert [chunk.outcome for chunk in job.chunks()][-1] is not None
        assert job.status().state == "succeeded"


def test_pool_of_older_nodes_refuses_the_kind_by_name(url: str, redis_url: str, stack: Stack) -> None:
    async def submit_to_nodes_without_the_kind() -> str:
        redis = connect(redis_url)
        for command in announcing(PoolRecord("older", "acme/older", max_model_len=64)):
            await redis.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            async with AsyncClient(redis_url) as client:
                with pytest.raises(UnsupportedKindError) as caught:
                    await client.tokenize("Hi", model="acme/older")
            return caught.value.message
        finally:
            for command in withdrawing("older"):
                await redis.execute_command(*command)  # type: ignore[no-untyped-call]
            await redis.aclose()

    assert "'tokenize'" in stack.call(submit_to_nodes_without_the_kind())
