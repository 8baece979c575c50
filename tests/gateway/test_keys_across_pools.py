"""One Idempotency-Key and two pools of one model: every route gives the job of the first request again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fakes.fake_node import FakeNode

MODEL = "acme/twice"
COMPLETION = {"prompt": "hi", "max_tokens": 2}
CASES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/jobs": {"prompt": "hi", "params": {"max_tokens": 2}},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def two_pools(stack: Any, shared_engine: Any, redis_url: str) -> Iterator[str]:
    """A gateway beside two pools that serve one model."""
    nodes = AsyncExitStack()

    async def start() -> None:
        for pool in ("first", "second"):
            await nodes.enter_async_context(FakeNode(redis_url, pool=pool, model=MODEL))

    stack.call(start())
    yield str(stack.start_gateway())
    stack.call(nodes.aclose())


@pytest.mark.parametrize("path", CASES)
def test_repeated_requests_with_one_key_are_one_job(two_pools: str, path: str) -> None:
    with httpx.Client(base_url=two_pools, timeout=60) as http:
        for key in (uuid4().hex for _ in range(3)):
            body, headers = {"model": MODEL, **CASES[path]}, {"Idempotency-Key": key}
            answers = [http.post(path, json=body, headers=headers) for _ in range(4)]
            assert {answer.status_code for answer in answers} <= {200, 202}, answers[0].text
            assert len({answer.headers["x-penstock-job"] for answer in answers}) == 1


def test_repeated_request_with_many_prompts_gives_all_its_jobs_again(two_pools: str) -> None:
    with httpx.Client(base_url=two_pools, timeout=60) as http:
        body = {"model": MODEL, "prompt": ["a", "b", "c", "d"], "max_tokens": 2}
        headers = {"Idempotency-Key": uuid4().hex}
        answers = [http.post("/v1/completions", json=body, headers=headers) for _ in range(3)]
        assert len({answer.headers["x-penstock-job"] for answer in answers}) == 1
        first, *others = ({**answer.json(), "created": None} for answer in answers)
        assert others == [first] * 2
