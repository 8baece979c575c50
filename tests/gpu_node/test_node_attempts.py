"""Further attempts of jobs: after errors of a node, and after outputs that a check refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from fakes.processes.reference_engine import ReferenceEngine, reference_tokens, text_of
from fakes.processes.running_node import PATIENCE_S, running_node
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.contract.errors import JobFailedError, RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Result
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.node import Node
from penstock.producer.batch.answer import answer
from penstock.producer.batch.endpoints import COMPLETIONS_URL
from penstock.producer.batch.request import request_of
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit

POOL = "ref"
LENGTH = 12
PROMPT = "hello"
ANY_TEXT, NO_TEXT = r"[a-z]+", r"[0-9]+"


class FailingEngine(ReferenceEngine):
    """Fails at the fifth token of a choice, as often as told."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures

    def _advance(self, live: Any) -> StepOutput:
        if self.num_failures and len(live.tokens) == 5:
            self.num_failures -= 1
            self._live.remove(live)
            return StepOutput(live.request_id, live.choice, 5, (), "", "error", None)
        return super()._advance(live)


@asynccontextmanager
async def serving(
    url: str, engine: ReferenceEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[AsyncClient, Node]]:
    node = running_node(url, engine or ReferenceEngine(), pool=POOL, avoid_ms=0, **settings)
    async with node as running, AsyncClient(url) as client, asyncio.timeout(PATIENCE_S):
        yield client, running


def text_for(job_id: str, **params: Any) -> str:
    tokens = reference_tokens(job_id, SamplingParams(max_tokens=LENGTH, **params), list(PROMPT.encode()))
    return text_of(tokens)


@pytest.mark.parametrize("of_pool", [False, True], ids=["of the job", "of the pool"])
async def test_a_job_goes_on_after_its_last_token_when_its_engine_failed(
    redis: Redis, redis_url: str, of_pool: bool
) -> None:
    pool = {"max_attempts": 3, "retry_backoff_ms": 1} if of_pool else {}
    own: dict[str, Any] = {} if of_pool else {"max_attempts": 3, "retry_backoff_s": 0.001}
    async with serving(redis_url, FailingEngine(2), **pool) as (client, node):
        job = await client.submit(PROMPT, max_tokens=LENGTH, **own)
        result, status = await job.result(), await job.status()
        assert result.text == text_for(job.id)
        assert status.attempt == 3
        failed = [event for event in status.ledger.events() if event.event == "attempt_failed"]
        assert [(event.reason, event.node_id) for event in failed] == [("model_error", node.node_id)] * 2
        assert result.usage is not None
        assert result.usage.completion_tokens == LENGTH
        assert node.held_jobs.counts.given_back_failed == 2
    assert not await audit(AdminBroker(redis), POOL)


async def test_the_last_attempt_fails_with_the_error_of_the_engine(redis_url: str) -> None:
    async with serving(redis_url, FailingEngine(9)) as (client, _):
        job = await client.submit(PROMPT, max_tokens=LENGTH, max_attempts=2, retry_backoff_s=0)
        result = await job.result(check=False)
        assert (result.outcome.code, (await job.status()).attempt) == ("model_error", 2)


async def test_an_error_that_is_not_named_ends_the_job(redis_url: str) -> None:
    async with serving(redis_url, FailingEngine(1)) as (client, _):
        job = await client.submit(PROMPT, max_tokens=LENGTH, max_attempts=3, retry_on=["output_rejected"])
        assert (await job.result(check=False)).outcome.code == "model_error"


async def test_a_pause_comes_before_the_next_attempt(redis_url: str) -> None:
    async with serving(redis_url, FailingEngine(1)) as (client, node):
        job = await client.submit(PROMPT, max_tokens=LENGTH, max_attempts=2, retry_backoff_s=3000)
        await until(lambda: node.held_jobs.counts.given_back_failed)
        status = await job.status()
        assert status.state == "scheduled"
        assert 1_499 <= (status.submitted_ms - status.accepted_ms) / 1000 <= 4_501
        await client.control.reschedule(job.id, 0)
        assert (await job.result()).text == text_for(job.id)


async def refused_once(client: AsyncClient, **options: Any) -> tuple[Result, str]:
    """Return the result of a job whose first output its check refuses, and the id of the first attempt."""
    while True:
        # The first letter is random by the job's id; about every second job is refused.
        job = await client.submit(
            PROMPT, max_tokens=LENGTH, max_attempts=8, retry_backoff_s=0, check_output={"regex": "[a-m].*"}, **options
        )
        result = await job.result()
        if result.job_id != job.id:
            return result, job.id


async def test_a_refused_output_is_followed_by_a_job_with_a_new_seed(redis: Redis, redis_url: str) -> None:
    async with serving(redis_url) as (client, _):
        result, first = await refused_once(client, tags=["t"], metadata={"a": "b"}, custom_id="row 1")
        assert result.text == text_for(result.job_id)
        assert "a" <= result.text[0] <= "m"
        before, after = await client.status(first), await client.status(result.job_id)
        assert (before.state, before.outcome and before.outcome.code) == ("failed", "output_rejected")
        assert (after.state, after.tags, after.metadata, after.custom_id) == ("succeeded", ("t",), {"a": "b"}, "row 1")
        chain = before
        while chain.retried_as is not None:
            following = await client.status(chain.retried_as)
            assert (following.retry_of, following.attempt) == (chain.job_id, chain.attempt + 1)
            chain = following
        assert chain.job_id == result.job_id
        assert result.usage is not None
        assert result.usage.completion_tokens == LENGTH * chain.attempt
        assert after.ledger.usage is not None
        assert after.ledger.usage.completion_tokens == LENGTH
        # The first id leads to the last result, in this process and another one.
        assert (await client.result(first)).text == result.text
        packed = await client.packed_result(first)
        assert packed is not None
        assert packed.choices[0].text == result.text
    assert not await audit(AdminBroker(redis), POOL)


async def test_a_row_has_the_answer_of_its_last_attempt(redis_url: str) -> None:
    """Rows of batches and flows, and Celery tasks, are answered so."""
    body = {"model": POOL, "prompt": PROMPT, "max_tokens": LENGTH, "max_attempts": 8, "retry_backoff_s": 0}
    request, attempt = request_of(COMPLETIONS_URL, {**body, "check_output": {"regex": "[a-m].*"}}), 1
    async with serving(redis_url) as (client, _):
        for number in count():
            if attempt > 1:
                break
            job_id, answered = await answer(client, request, f"row {number}")
            assert "a" <= answered["choices"][0]["text"][0] <= "m"
            attempt = (await client.status(job_id)).attempt
            assert answered["usage"]["completion_tokens"] == LENGTH * attempt
            # A run that is repeated finds the same job, and so the same answer.
            assert (await answer(client, request, f"row {number}"))[0] == job_id


async def test_a_callers_seed_changes_with_each_attempt(redis_url: str) -> None:
    async with serving(redis_url) as (client, _):
        seed = next(seed for seed in range(99) if text_for("", seed=seed)[0] >= "n")
        job = await client.submit(
            PROMPT, max_tokens=LENGTH, seed=seed, max_attempts=8, retry_backoff_s=0, check_output={"regex": "[a-m].*"}
        )
        result = await job.result()
        assert any(result.text == text_for("", seed=seed + at) for at in range(1, 8))


@pytest.mark.parametrize(
    ("check", "code"),
    [
        ({"regex": NO_TEXT}, "output_rejected"),
        ({"json_schema": {"type": "object"}}, "output_rejected"),
        ({"json_schema": {"type": 7}}, "invalid_request"),
    ],
)
async def test_the_last_refused_output_ends_as_failed_with_its_text(
    redis_url: str, check: dict[str, Any], code: str
) -> None:
    async with serving(redis_url) as (client, _):
        job = await client.submit(PROMPT, max_tokens=40, check_output=check, max_attempts=2, retry_backoff_s=0)
        result = await job.result(check=False)
        assert (result.outcome.code, result.outcome.param) == (code, "check_output")
        assert len(result.text) == 40
        assert (result.job_id != job.id) == (code == "output_rejected")


async def test_tokens_go_on_while_an_output_is_checked(redis_url: str) -> None:
    async with serving(redis_url) as (client, node):
        slow = await client.submit(PROMPT, max_tokens=40, check_output={"regex": "(([a-z])+.)+[A-Z]([a-z])+"})
        await until(lambda: any(job.is_settling for job in node.held_jobs))
        assert len(await client.generate([PROMPT] * 8, max_tokens=LENGTH)) == 8
        assert (await slow.status()).outcome is None
        assert (await slow.result(check=False)).outcome.code == "too_costly"
        # Its end of the process disturbs no other check.
        good = await client.submit(PROMPT, max_tokens=LENGTH, check_output={"regex": ANY_TEXT})
        assert (await good.result()).state == "succeeded"


async def test_a_caller_checks_results_itself(redis_url: str) -> None:
    seen = list[str]()

    def accepts(result: Result) -> bool:
        seen.append(result.job_id)
        return len(seen) == 3

    async with serving(redis_url) as (client, _):
        job = await client.submit(PROMPT, max_tokens=LENGTH, max_attempts=4, retry_backoff_s=0, check_output=accepts)
        result = await job.result()
        assert result.job_id == seen[-1]
        assert (await client.status(seen[1])).retry_of == seen[0] == job.id
        assert result.usage is not None
        assert result.usage.completion_tokens == 3 * LENGTH
        refused = await client.submit(PROMPT, max_attempts=2, retry_backoff_s=0, check_output=lambda _: False)
        with pytest.raises(JobFailedError, match="attempt 2") as error:
            await refused.result()
        assert error.value.code == "output_rejected"


async def test_a_cancel_reaches_the_last_attempt(redis: Redis, redis_url: str) -> None:
    engine = ReferenceEngine()
    async with serving(redis_url, engine) as (client, _):
        job = await client.submit(
            PROMPT, max_tokens=LENGTH, max_attempts=2, retry_backoff_s=600, check_output={"regex": NO_TEXT}
        )
        status = await until(lambda: client.status(job.id), lambda status: status.retried_as is not None)
        assert (await client.status(status.retried_as)).state == "scheduled"
        assert await job.cancel() == "cancelled"
        assert (await job.result(check=False)).outcome.state == "cancelled"
    assert await redis.scard(keys.open_jobs(POOL)) == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_attempts": 0}, "max_attempts"),
    ({"max_attempts": 9}, "max_attempts"),
    ({"retry_backoff_s": -1}, "retry_backoff_s"),
    ({"retry_on": ["node_lost"]}, "retry_on[0]"),
    ({"retry_on": []}, "retry_on"),
    ({"check_output": {"regex": "("}}, "check_output.regex"),
    ({"check_output": {"json_schema": json.dumps([1])}}, "check_output.json_schema"),
    ({"check_output": {"regex": "a" * 70_000}}, "check_output.regex"),
    ({"check_output": {"grammar": "x"}}, "check_output.grammar"),
    ({"check_output": lambda _: True, "max_attempts": 0}, "max_attempts"),
]


async def test_wrong_terms_are_refused_by_name(redis_url: str) -> None:
    async with serving(redis_url) as (client, _):
        for options, param in WRONG:
            with pytest.raises(RequestError) as error:
                await client.submit(PROMPT, **options)
            assert error.value.param == param
            assert not (param == "retry_on[0]" and error.value.also), "the list has an item"
