"""One tenant takes all that it can get, over HTTP; another tenant is served as if it were alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hostile.costs import MemoryWatch
from hostile.stack import POOL, Stack, running_stack

from penstock.contract.tenant import Terms

AT_ONCE = 16
LIMIT_PER_MINUTE = 1000
WORD = " water"
"""One token."""
MAX_GROWTH = 128 << 20
"""Bytes by which a gateway, its parser process and a node may grow together."""


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    """A small Redis. The attacker has a limit on tokens; each `flood` tenant has none."""
    terms = Terms(tokens_per_minute=LIMIT_PER_MINUTE)
    options: dict[str, Any] = {"maxmemory": "64mb", "terms": terms, "tenants": 3, "is_probed": False}
    with running_stack(model=tiny_model, dtype="bfloat16", **options) as stack:
        yield stack


class Line:
    """A connection that carries one request after another. A general client takes a millisecond for each."""

    def __init__(self, stack: Stack, tenant: str) -> None:
        address = urlsplit(stack.url)
        self._place = (address.hostname, address.port)
        self._head = f"Host: {address.netloc}\r\nAuthorization: Bearer {stack.keys[tenant]}\r\n"
        self._head += "Content-Type: application/json\r\nContent-Length: "

    async def __aenter__(self) -> Line:
        self._reader, self._writer = await asyncio.open_connection(*self._place)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer, which says its length."""
        self._writer.write(f"POST {path} HTTP/1.1\r\n{self._head}{len(body)}\r\n\r\n".encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        return int(head.split(b" ", 2)[1]), await self._reader.readexactly(length)


async def send_all(
    stack: Stack, tenant: str, path: str, bodies: list[dict[str, Any]], most_refused: float = math.inf
) -> Counter[str]:
    """Send bodies, several at once, until so many are refused. Return how often each status came, and its error."""
    answers: Counter[str] = Counter()
    left = iter(bodies)

    async def lane() -> None:
        async with Line(stack, tenant) as line:
            for body in left:
                if sum(answers[refusal] for refusal in answers if refusal.startswith("429")) > most_refused:
                    return
                status, answer = await line.post(path, json.dumps({"model": POOL, **body}).encode())
                code = json.loads(answer)["error"]["code"] if status >= 400 else ""
                answers[f"{status} {code}".strip()] += 1

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
    return answers


async def check_neighbor(stack: Stack) -> None:
    """Assert that a tenant that takes little gets its answers."""
    async with stack.client("neighbor") as http:
        for number in range(5):
            body = {"model": POOL, "prompt": f"Question {number}", "max_tokens": 4}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        answer = await http.post("/tokenize", json={"model": POOL, "prompt": "hello"})
        assert answer.status_code == 200, answer.text


async def test_stored_delayed_jobs_of_one_tenant_refuse_no_other(stack: Stack) -> None:
    bodies = [
        {"prompt": f"{i} " + "x" * 25_000, "not_before_s": 3600, "params": {"max_tokens": 8}} for i in range(3000)
    ]
    answers = await send_all(stack, "flood-0", "/v1/jobs", bodies, most_refused=100)
    assert answers["202"] > 500 and answers["429 memory_share_exceeded"] > 0, answers
    assert set(answers) == {"202", "429 memory_share_exceeded"}
    await check_neighbor(stack)


@pytest.mark.parametrize(
    ("path", "body", "accepted"),
    [
        ("/v1/jobs", {"tokens": [200] * 7000, "params": {"max_tokens": 2}, "background": False}, "202"),
        ("/v1/jobs", {"prompt": WORD * 7000, "params": {"max_tokens": 2}, "background": False}, "202"),
        ("/tokenize", {"prompt": WORD * 7000}, "200"),
    ],
    ids=["tokens", "text", "tokenization"],
)
async def test_a_token_limit_holds_for_requests_larger_than_a_minute_of_it(
    stack: Stack, path: str, body: dict[str, Any], accepted: str
) -> None:
    """The attacker's first request leaves a debt of several minutes, so the later cases accept none."""
    answers = await send_all(stack, "attacker", path, [body] * 115)
    assert answers["429 rate_limit_exceeded"] >= 114, answers
    assert answers[accepted] + answers["429 rate_limit_exceeded"] == 115
    await check_neighbor(stack)


async def test_large_texts_to_tokenize_take_little_memory_and_refuse_no_other(stack: Stack) -> None:
    watch = MemoryWatch(stack.pids)
    watching = asyncio.create_task(watch.run())
    async with stack.client("flood-2", timeout=180.0, limits=httpx.Limits(max_connections=None)) as http:
        # The large body starts the gateway's parser process, once for all that follow.
        warm = [{"model": POOL, "prompt": prompt} for prompt in ("warm", WORD * 60_000)]
        await asyncio.gather(*(http.post("/tokenize", json=body) for body in warm))
        watch.start_anew()
        text = json.dumps({"model": POOL, "prompt": WORD * 320_000, "return_token_strs": True}).encode()
        headers = {"content-type": "application/json"}
        posts = [asyncio.create_task(http.post("/tokenize", content=text, headers=headers)) for _ in range(12)]
        while not all(post.done() for post in posts):
            await check_neighbor(stack)
        statuses = {post.result().status_code for post in posts}
    watching.cancel()
    assert statuses <= {200, 400, 413, 429, 503}
    growth = watch.growth()
    assert growth["gateway"] + growth["gateway's child"] + growth["node"] <= MAX_GROWTH, growth


async def test_a_long_queue_of_one_tenant_refuses_no_other(stack: Stack) -> None:
    """The last test of this file: what it queues stays in Redis."""
    params = {"max_tokens": 2000, "ignore_eos": True}
    bodies = [{"prompt": f"{i}", "params": params} for i in range(300)]
    refused: Counter[str] = Counter()
    for _ in range(20):  # Background work is accepted until it has taken its part of Redis's memory.
        answers = await send_all(stack, "flood-1", "/v1/jobs", bodies)
        del answers["202"]
        refused += answers
        if sum(refused.values()) > 300:
            break
        await check_neighbor(stack)
    assert set(refused) <= {"429 redis_full", "429 memory_share_exceeded"}, "nothing is refused for its wait"
    await check_neighbor(stack)
