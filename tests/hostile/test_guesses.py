"""No number that a tenant gets says whether another tenant has sent the text that it guesses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile.stack import POOL, Stack, running_stack

SECRET = "The board sells the northern mill to its founders on the ninth of May, and no newspaper may hear of it. " * 8
"""Long enough for several cached blocks."""
OF_TEMPLATE = 31
"""Tokens that a chat template writes before every text are fewer. A tenant finds those of its own earlier chats."""
_numbers = count()


def new_secret() -> str:
    """Return a text that no earlier test has sent."""
    return f"Minutes, part {next(_numbers)}. {SECRET}"


@contextmanager
def client_of(stack: Stack, tenant: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {stack.keys[tenant]}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=60.0) as http:
        yield http


@dataclass(frozen=True)
class Tenants:
    """The one that sends the secrets, and the one that guesses them."""

    neighbor: httpx.Client
    attacker: httpx.Client


@contextmanager
def tenants_of(model: Path) -> Iterator[Tenants]:
    with (
        running_stack(model=model, max_model_len=1024, is_probed=False) as stack,
        client_of(stack, "neighbor") as neighbor,
        client_of(stack, "attacker") as attacker,
    ):
        yield Tenants(neighbor, attacker)


@pytest.fixture(scope="module")
def tenants(tiny_model: Path) -> Iterator[Tenants]:
    """Tenants of a model that computes a prompt at once."""
    with tenants_of(tiny_model) as tenants:
        yield tenants


@pytest.fixture(scope="module")
def neighbor(tenants: Tenants) -> httpx.Client:
    return tenants.neighbor


@pytest.fixture(scope="module")
def attacker(tenants: Tenants) -> httpx.Client:
    return tenants.attacker


@pytest.fixture(scope="module")
def tenants_of_slow_prompts(demo_file: Path) -> Iterator[Tenants]:
    """Tenants of a model that takes a while for a prompt: a report on it reaches only a stream that is open then."""
    with tenants_of(demo_file) as tenants:
        yield tenants


def answer_to(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json={"model": POOL, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached_of_chat(http: httpx.Client, text: str, **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
    return int(answer_to(http, "/v1/chat/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def cached_of_completion(http: httpx.Client, text: str, **fields: Any) -> int:
    usage = answer_to(http, "/v1/completions", {"prompt": text, "max_tokens": 2, **fields})["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def cached_of_response(http: httpx.Client, text: str, **fields: Any) -> int:
    usage = answer_to(http, "/v1/responses", {"input": text, "max_output_tokens": 2, **fields})["usage"]
    return int(usage["input_tokens_details"]["cached_tokens"])


def cached_of_message(http: httpx.Client, text: str, **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
    return int(answer_to(http, "/v1/messages", body)["usage"]["cache_read_input_tokens"])


def cached_of_ledger(http: httpx.Client, text: str, **params: Any) -> int:
    answer = http.post("/v1/jobs", json={"model": POOL, "prompt": text, "params": {"max_tokens": 2, **params}})
    assert answer.status_code == 202, answer.text
    place = f"/v1/jobs/{answer.json()['id']}"
    with http.stream("GET", f"{place}/stream") as stream:
        stream.read()  # until the job has ended
    job = http.get(place).json()
    in_ledger, in_result = (int(job[part]["usage"]["cached_tokens"]) for part in ("ledger", "result"))
    assert in_ledger == in_result
    return in_ledger


class TooLateError(Exception):
    """A stream began behind the reports on its prompt, as on a machine with other work."""


def progress_events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the reports on the prompt that a stream carries."""
    events = []
    with http.stream("POST", path, json={"model": POOL, "stream": True, "return_progress": True, **body}) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                progress = event if event.get("type") == "penstock:prompt_progress" else event.get("prompt_progress")
                events += [progress] if progress else []
    if not events:
        raise TooLateError
    return events


def cached_of_progress(http: httpx.Client, text: str, **fields: Any) -> int:
    events = progress_events(http, "/v1/completions", {"prompt": text, "max_tokens": 2, **fields})
    return max(int(event["cache"]) for event in events)


def cached_of_progress_of_response(http: httpx.Client, text: str, **fields: Any) -> int:
    events = progress_events(http, "/v1/responses", {"input": text, "max_output_tokens": 2, **fields})
    return max(int(event["cache"]) for event in events)


def cached_of_usage_report(http: httpx.Client, text: str, **fields: Any) -> int:
    """Return by how much the key's usage grows; it is written with the end of the job."""
    before = _cached_of_key(http)
    cached_of_completion(http, text, **fields)
    return _cached_of_key(http) - before


def _cached_of_key(http: httpx.Client) -> int:
    answer = http.get("/v1/usage")
    assert answer.status_code == 200, answer.text
    return sum(int(row["cached_tokens"]) for row in answer.json()["data"])


GUESSES = {
    "usage of a chat": cached_of_chat,
    "usage of a completion": cached_of_completion,
    "usage of a response": cached_of_response,
    "usage of a message": cached_of_message,
    "ledger": cached_of_ledger,
    "/v1/usage": cached_of_usage_report,
}
GUESSES_BY_PROGRESS = {
    "prompt_progress": cached_of_progress,
    "prompt_progress of a response": cached_of_progress_of_response,
}


def check_guess(tenants: Tenants, cached_of: Callable[..., int], secret: str) -> None:
    cached_of(tenants.neighbor, secret)
    assert cached_of(tenants.neighbor, secret) > 100  # its own
    assert cached_of(tenants.attacker, secret) <= OF_TEMPLATE
    assert cached_of(tenants.attacker, secret) > 100


def check_salt(tenants: Tenants, cached_of: Callable[..., int], secret: str) -> None:
    found = [
        cached_of(tenants.neighbor, secret, cache_salt=salt) > 100 for salt in ("a user", "a user", "another user")
    ]
    assert found == [False, True, False]
    assert cached_of(tenants.attacker, secret, cache_salt="a user") <= OF_TEMPLATE
    assert cached_of(tenants.neighbor, secret) <= OF_TEMPLATE


@pytest.mark.parametrize("place", GUESSES)
def test_a_guess_finds_nothing_of_another_tenant(tenants: Tenants, place: str) -> None:
    check_guess(tenants, GUESSES[place], new_secret())


@pytest.mark.parametrize("place", GUESSES)
def test_a_salt_divides_a_tenants_prefixes_and_never_leaves_the_tenant(tenants: Tenants, place: str) -> None:
    check_salt(tenants, GUESSES[place], new_secret())


@pytest.mark.model
@pytest.mark.parametrize("check", [check_guess, check_salt])
@pytest.mark.parametrize("place", GUESSES_BY_PROGRESS)
def test_reports_on_prompts_say_nothing_of_other_tenants_and_salts(
    tenants_of_slow_prompts: Tenants, place: str, check: Callable[..., None]
) -> None:
    """A new secret is taken if a stream of one began too late."""
    for _ in range(10):
        with suppress(TooLateError):
            return check(tenants_of_slow_prompts, GUESSES_BY_PROGRESS[place], new_secret())
    pytest.fail("no stream carries a report on its prompt")


def test_tenant_and_salt_are_not_one_text(neighbor: httpx.Client, attacker: httpx.Client) -> None:
    secret = new_secret()
    cached_of_completion(neighbor, secret, cache_salt="x")
    for salt in ("neighbor", "neighborx", "x", "neighbor\0x", "', 'x"):
        assert cached_of_completion(attacker, secret, cache_salt=salt) == 0


def test_counted_tokens_leave_nothing_to_guess(neighbor: httpx.Client, attacker: httpx.Client) -> None:
    """The prompt of `count_tokens` passes through the engine as those of answers do."""
    secret = new_secret()
    body = {"messages": [{"role": "user", "content": secret}], "cache_salt": "a user"}
    assert answer_to(neighbor, "/v1/messages/count_tokens", body)["input_tokens"] > 100
    assert cached_of_message(neighbor, secret) <= OF_TEMPLATE
    assert cached_of_message(attacker, secret, cache_salt="a user") <= OF_TEMPLATE


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_salt_is_refused_by_name_where_nothing_is_generated(
    neighbor: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = neighbor.post(path, json={"model": POOL, "cache_salt": "a user", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize("salt", ["", "s" * 257, 7])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ],
)
def test_a_wrong_salt_is_refused_by_name(neighbor: httpx.Client, path: str, body: dict[str, Any], salt: object) -> None:
    raw = json.dumps({"model": POOL, "cache_salt": salt, **body})
    answer = neighbor.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "cache_salt" in answer.text
