"""`max_tokens` beyond the model's context is lowered to what the prompt leaves, in every API, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fakes.waiting import wait_until

from penstock.contract.errors import PromptTooLongError
from penstock.gpu_node.engine.records import EngineRequest
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch
from tests.gateway.conftest import EchoEngine, Stack
from tests.gateway.socket_client import socket_to

MODEL = "acme/strict"
MAX_MODEL_LEN = 256
HEADER = "X-Penstock-Max-Tokens"
PROMPT = "p" * 200
LEFT = MAX_MODEL_LEN - len(PROMPT)
MESSAGES = [{"role": "user", "content": PROMPT}]
FORMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": MESSAGES},
}
FIELDS = {"/v1/responses": "max_output_tokens"}
ENDS = {
    "/v1/chat/completions": '"finish_reason":"length"',
    "/v1/completions": '"finish_reason":"length"',
    "/v1/responses": '"incomplete_details":{"reason":"max_output_tokens"}',
    "/v1/messages": '"stop_reason":"model_context_window_exceeded"',
}


class StrictEngine(EchoEngine):  # type: ignore[misc]  # a conftest module has no types
    """Refuses a prompt and `max_tokens` that exceed its small context together, as the real engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.max_model_len = MAX_MODEL_LEN

    def add(self, request: EngineRequest) -> None:
        num_prompt_tokens, asked = len(request.prompt_token_ids), request.params.max_tokens or 1
        if num_prompt_tokens < self.max_model_len < num_prompt_tokens + asked:
            raise PromptTooLongError(f"prompt and max_tokens ({asked}) are too long", param="max_tokens")
        super().add(request)


@pytest.fixture(scope="module")
def strict_engine(stack: Stack) -> EchoEngine:
    engine = StrictEngine()
    stack.start_node(engine, model=MODEL, pool="strict")
    return engine


@pytest.fixture
def strict(url: str, strict_engine: EchoEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client
    strict_engine.waits_after = 1
    strict_engine.may_go_on.set()


def ask(http: httpx.Client, path: str, max_tokens: int, **more: Any) -> httpx.Response:
    body = {"model": MODEL, FIELDS.get(path, "max_tokens"): max_tokens, **FORMS[path], **more}
    return http.post(path, json=body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("max_tokens", [LEFT + 1, 32_000])
def test_the_limit_is_lowered_to_what_the_prompt_leaves(
    strict: httpx.Client, strict_engine: EchoEngine, path: str, max_tokens: int, stream: bool
) -> None:
    answer = ask(strict, path, max_tokens, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == str(LEFT)
    assert ENDS[path] in answer.text.replace(": ", ":").replace(", ", ",")
    assert strict_engine.last_params.max_tokens == LEFT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_a_limit_that_fits_is_left_alone(strict: httpx.Client, path: str, stream: bool) -> None:
    answer = ask(strict, path, LEFT, stream=stream)
    assert (answer.status_code, HEADER in answer.headers) == (200, False)


def test_the_usage_says_the_exact_limit(strict: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        assert ask(strict, path, 32_000).json()["usage"]["max_tokens"] == LEFT
        assert "max_tokens" not in ask(strict, path, LEFT).json()["usage"]


def test_the_usage_of_a_response_says_the_exact_limit_at_every_reading(strict: httpx.Client) -> None:
    assert "max_output_tokens" not in ask(strict, "/v1/responses", LEFT).json()["usage"]
    strict_client = openai.OpenAI(
        base_url=f"{strict.base_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )
    asked: dict[str, Any] = {"model": MODEL, "input": PROMPT, "max_output_tokens": 32_000}
    with strict_client as client:
        whole = client.responses.create(**asked)
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.incomplete"
        *_, again = client.responses.retrieve(last.response.id, stream=True)
        assert again.type == "response.incomplete"
        read = client.responses.retrieve(last.response.id)
    for response in (whole, last.response, again.response, read):
        assert response.usage is not None and response.usage.to_dict()["max_output_tokens"] == LEFT
        assert response.max_output_tokens == 32_000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("max_tokens", "shown"), [(LEFT + 1, None), (32_000, str(MAX_MODEL_LEN - 1))])
def test_a_head_sent_before_the_prompt_is_tokenized_has_what_the_context_leaves_at_most(
    stack: Stack, strict: httpx.Client, strict_engine: EchoEngine, path: str, max_tokens: int, shown: str | None
) -> None:
    url = stack.start_gateway(first_chunk_wait_s=0.5)
    more = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    with httpx.Client(base_url=url, timeout=60) as client:
        # The first request of a gateway takes longest, and its head has no job's header if it was sent before the job.
        assert ask(client, path, 1).status_code == 200
        strict_engine.waits_after = 0
        strict_engine.may_go_on.clear()
        body = {"model": MODEL, "max_tokens": max_tokens, "stream": True, **FORMS[path], **more}
        with client.stream("POST", path, json=body) as answer:
            strict_engine.may_go_on.set()
            assert answer.headers.get(HEADER) == shown
            text = answer.read().decode()
    assert f'"max_tokens":{LEFT}' in text, "the usage says the exact limit"


def test_of_several_prompts_the_smallest_limit_is_shown(strict: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [PROMPT, "q" * 10, "r" * 50], "max_tokens": 240}
    answer = strict.post("/v1/completions", json=body)
    assert (answer.headers[HEADER], answer.json()["usage"]["max_tokens"]) == (str(LEFT), LEFT)
    reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
    assert reasons == ["length", "stop", "stop"]


def test_many_logprobs_are_counted_up_to_the_context(stack: Stack, strict: httpx.Client) -> None:
    url = stack.start_gateway(max_logprobs=2 * MAX_MODEL_LEN)
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = ask(client, "/v1/completions", 32_000, logprobs=0)
    assert answer.status_code == 200, answer.text


def test_a_prompt_that_does_not_fit_is_refused(strict: httpx.Client) -> None:
    for path, form in FORMS.items():
        text = json.dumps(form).replace(PROMPT, "p" * (MAX_MODEL_LEN + 1))
        body = {"model": MODEL, FIELDS.get(path, "max_tokens"): 10, **json.loads(text)}
        answer = strict.post(path, json=body)
        assert answer.status_code == 400
        assert "context length" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", FORMS)
def test_a_setting_restores_the_refusal(stack: Stack, strict: httpx.Client, path: str) -> None:
    url = stack.start_gateway(max_tokens_beyond_context="refuse")
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = ask(client, path, LEFT + 1)
        assert answer.status_code == 400
        assert "max_tokens" in answer.json()["error"]["message"]
        assert ask(client, path, LEFT).status_code == 200


def test_a_repeated_idempotency_key_gives_the_same_lowered_answer(strict: httpx.Client) -> None:
    body = {"model": MODEL, "max_tokens": 32_000, "messages": MESSAGES}
    headers = {"Idempotency-Key": "lowered-1"}
    first, second = (strict.post("/v1/messages", json=body, headers=headers) for _ in range(2))
    assert first.json() == second.json()
    assert first.headers[HEADER] == second.headers[HEADER] == str(LEFT)


@pytest.mark.parametrize(
    ("max_tokens", "at_most", "exact"), [(LEFT, None, None), (LEFT + 1, None, LEFT), (32_000, MAX_MODEL_LEN - 1, LEFT)]
)
def test_a_job_is_lowered_too_and_says_it(
    strict: httpx.Client, max_tokens: int, at_most: int | None, exact: int | None
) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "params": {"max_tokens": max_tokens}}
    delayed = strict.post("/v1/jobs", json={**asked, "not_before_s": 3600})
    assert delayed.headers.get(HEADER) == (None if at_most is None else str(at_most))
    path = delayed.json()["links"]["self"]
    assert strict.get(path).json().get("max_tokens") == at_most
    strict.delete(path)

    submitted = strict.post("/v1/jobs", json=asked)
    assert submitted.headers.get(HEADER) == delayed.headers.get(HEADER)
    path = submitted.json()["links"]["self"]
    wait_until(lambda: strict.get(path).json()["state"] == "succeeded")
    job = strict.get(path).json()
    (choice,) = job["result"]["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("length", PROMPT[:LEFT])
    assert job.get("max_tokens") == exact
    (listed,) = (one for one in strict.get("/v1/jobs").json()["data"] if one["id"] == job["id"])
    assert listed.get("max_tokens") == exact


def test_a_socket_says_the_limit_of_a_job(url: str, strict: httpx.Client) -> None:
    with socket_to(url) as socket:
        socket.submit("s", PROMPT, path="/v1/jobs", body={"model": MODEL, "params": {"max_tokens": 32_000}})
        accepted = socket.until_end_of("s")["s"][0]
        assert (accepted["type"], accepted["max_tokens"]) == ("accepted", MAX_MODEL_LEN - 1)


def test_a_websocket_says_the_limit(url: str, strict: httpx.Client) -> None:
    with socket_to(url) as socket:
        socket.submit("s", PROMPT, body={"model": MODEL, "max_tokens": 32_000})
        accepted = socket.until_end_of("s")["s"][0]
        assert (accepted["type"], accepted["max_tokens"]) == ("accepted", LEFT)


def test_rows_of_a_batch_are_lowered(stack: Stack, strict: httpx.Client, tmp_path: Any) -> None:
    body = {"model": MODEL, "max_tokens": 32_000, "messages": MESSAGES}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    batch = Batch(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    stack.call(run_batch(stack.redis_url, batch))
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["max_tokens"]) == ("length", LEFT)
