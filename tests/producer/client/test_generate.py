"""Many jobs by one call: `generate` and `map` wait while the pool is busy, and neither lose nor repeat a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, cast

import pytest
from fakes.fake_node import KV_TOKENS, POOL, FakeJob, FakeNode, Say, fake_tokens
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.contract.errors import (
    BusyError,
    JobExpiredError,
    JobFailedError,
    NotFoundError,
    PromptTooLongError,
    RequestError,
    ResultTimeoutError,
    UnavailableError,
)
from penstock.contract.output import Result
from penstock.contract.pool import NodePressure
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.run import UNREAD_PER_OPEN, Window
from penstock.queue import keys

MAX_OPEN = 8
TOO_LONG: Any = list(range(5000))


@pytest.fixture
async def small_node(redis_url: str) -> AsyncIterator[FakeNode]:
    """A node of a pool that accepts few open jobs."""
    async with FakeNode(redis_url, max_open_jobs=MAX_OPEN, step_s=0.05) as node:
        # A node that is known to be fast lets refused callers return after a second.
        node.pressure = NodePressure(node.node_id, kv_tokens_available=KV_TOKENS, drain_cost_per_s=1e6)
        await node.heartbeat()
        yield node


@pytest.fixture
def refusals(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> list[BusyError]:
    """Every refusal of the client's submits."""
    met: list[BusyError] = []
    submit = client.submit

    async def noted(*args: Any, **options: Any) -> AsyncJob:
        try:
            return await submit(*args, **options)
        except BusyError as error:
            met.append(error)
            raise

    monkeypatch.setattr(client, "submit", noted)
    return met


class Endless(Iterator[str]):
    """An endless iterator of prompts that counts how many were read."""

    num_read = 0

    def __next__(self) -> str:
        self.num_read += 1
        return "hello"


async def num_submitted(redis: Redis) -> int:
    """How many jobs the pool has ever accepted."""
    lists = [f"{keys.prefix(POOL)}:jobs:{state}default" for state in ("", "running:", "succeeded:", "cancelled:")]
    return sum([int(await redis.zcard(name)) for name in lists])


async def is_canceled(job: FakeJob) -> bool:
    """Whether the node is told to end the job because it was canceled, not because it has no reader."""
    (answer,) = await job.node.emit([job.emission(job.next_chunks())], Say.PUBLISHED)
    return answer == "CANCEL"


def is_whole(result: Result, num_tokens: int) -> bool:
    return result.token_ids == tuple(fake_tokens(result.job_id, num_tokens))


async def test_results_have_the_order_of_their_prompts(client: AsyncClient, node: FakeNode, redis: Redis) -> None:
    # The prompt at index i has i + 1 token ids, so its usage tells which one it is.
    results = await client.generate([[7] * (i + 1) for i in range(40)], max_tokens=3)
    assert all(is_whole(result, 3) for result in results)
    ids = [result.job_id for result in results]
    assert ids == sorted(ids), "prompts are submitted in their order, and ids count the time"
    assert len(set(ids)) == await num_submitted(redis) == 40


async def test_generate_waits_while_the_pool_is_busy(
    client: AsyncClient, small_node: FakeNode, redis: Redis, refusals: list[BusyError]
) -> None:
    results = await client.generate([f"prompt {i}" for i in range(4 * MAX_OPEN)], max_tokens=4)
    assert refusals
    assert len(results) == len({result.job_id for result in results}) == await num_submitted(redis) == 4 * MAX_OPEN
    assert all(is_whole(result, 4) for result in results)


async def test_a_refused_prompt_is_not_offered_before_the_pool_asks_for_it(
    client: AsyncClient, small_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, submit = asyncio.get_running_loop().time, client.submit
    free_s = 0.0
    early = []

    async def timed(*args: Any, **options: Any) -> AsyncJob:
        nonlocal free_s
        early.append(clock() < free_s)
        try:
            return await submit(*args, **options)
        except BusyError as error:
            free_s = clock() + error.retry_after_ms / 1000
            raise

    monkeypatch.setattr(client, "submit", timed)
    await client.generate(["hello"] * (2 * MAX_OPEN), max_tokens=4)
    assert free_s > 0
    assert not any(early)


async def test_map_waits_too_and_keeps_the_order(
    client: AsyncClient, small_node: FakeNode, refusals: list[BusyError]
) -> None:
    results = [result async for result in client.map((f"{i}" for i in range(2 * MAX_OPEN)), max_tokens=4)]
    assert refusals
    ids = [result.job_id for result in results]
    assert ids == sorted(ids)
    assert len(ids) == 2 * MAX_OPEN


async def test_map_reads_no_more_prompts_than_it_may_hold(client: AsyncClient, told_node: FakeNode) -> None:
    prompts = Endless()

    async with aclosing(client.map(prompts, max_in_flight=5)) as results:
        reading = asyncio.create_task(anext(results))
        first, *others = await told_node.take(5)
        await asyncio.sleep(0.1)
        assert prompts.num_read == 5, "none of the five has ended"
        for job in others:
            await job.finish()
        await until(lambda: prompts.num_read == 9)
        assert not reading.done(), "the first result comes first"
        await first.finish()
        assert (await reading).job_id == first.id
        assert prompts.num_read <= 5 * UNREAD_PER_OPEN


async def test_memory_is_bounded_while_the_first_job_takes_long(client: AsyncClient, told_node: FakeNode) -> None:
    prompts = Endless()

    async with aclosing(client.map(prompts, max_in_flight=2)) as results:
        reading = asyncio.create_task(anext(results))
        told_node.slots = 1
        (first,) = await told_node.take()
        while prompts.num_read < 2 * UNREAD_PER_OPEN:
            (later,) = await told_node.take()
            await later.finish()
        assert list(told_node.jobs) == [first.id]
        await asyncio.sleep(0.2)
        assert prompts.num_read == 2 * UNREAD_PER_OPEN
        reading.cancel()
        await asyncio.wait([reading])


async def test_prompts_may_come_slowly_from_an_asynchronous_source(client: AsyncClient, node: FakeNode) -> None:
    seen = asyncio.Event()

    async def prompts() -> AsyncIterator[str]:
        yield "the first prompt"
        await seen.wait()  # Its answer comes although the next prompt is not there yet.
        yield "the second prompt"

    results = []
    async for result in client.map(prompts(), max_tokens=2):
        results.append(result)
        seen.set()
    assert len(results) == 2


async def test_unordered_results_come_as_they_end(client: AsyncClient, told_node: FakeNode) -> None:
    async with aclosing(client.map_unordered([[1], [2], [3]])) as pairs:
        reading = asyncio.create_task(anext(pairs))
        jobs = await told_node.take(3)
        await jobs[1].finish()
        assert ((await reading)[0], (await reading)[1].job_id) == ([2], jobs[1].id)
        await jobs[0].finish()
        assert (await anext(pairs))[0] == [1]


@pytest.mark.parametrize("prompts", ["hello", [1, 2, 3], [{"role": "user", "content": "hello"}]])
async def test_a_single_prompt_is_a_list_of_one(client: AsyncClient, node: FakeNode, prompts: Any) -> None:
    (result,) = await client.generate(prompts, max_tokens=2)
    assert is_whole(result, 2)
    assert result.text == result.choices[0].text
    assert result.finish_reason == "length"


async def test_no_prompts_give_no_results(client: AsyncClient, node: FakeNode) -> None:
    assert await client.generate([]) == []
    assert [result async for result in client.map(iter(()))] == []


@pytest.mark.parametrize("prompts", [5, ["hello", 5], {"role": "user"}, b"hello"])
async def test_generate_refuses_what_is_no_list_of_prompts(client: AsyncClient, node: FakeNode, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        await client.generate(prompts)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"job_id": "fake.1"}, "job_id"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "long"}, "timeout"),
        ({"top_p": 2}, "top_p"),
    ],
)
async def test_a_wrong_option_is_named_at_once(
    client: AsyncClient, node: FakeNode, redis: Redis, options: Any, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await client.generate(["hello"] * 50, **options)
    assert caught.value.param == param
    assert await num_submitted(redis) == 0


async def test_map_refuses_a_single_text(client: AsyncClient, node: FakeNode) -> None:
    with pytest.raises(RequestError, match="iterable of prompts"):
        client.map("a text of which each character would be a prompt")


async def test_errors_that_waiting_does_not_cure_come_at_once(client: AsyncClient, node: FakeNode) -> None:
    with pytest.raises(NotFoundError):
        await client.generate(["hello"] * 50, model="unknown")
    with pytest.raises(PromptTooLongError):
        await client.generate(["hello", TOO_LONG])


async def test_without_a_node_generate_raises_at_once(client: AsyncClient) -> None:
    with pytest.raises(UnavailableError) as caught:
        await client.generate(["hello"])
    assert caught.value.code == "no_node"


async def test_a_failed_job_ends_generate_and_cancels_the_others(client: AsyncClient, told_node: FakeNode) -> None:
    call = asyncio.create_task(client.generate(["hello"] * 6))
    jobs = await told_node.take(6)
    await jobs.pop(3).finish("failed", "model_error")
    with pytest.raises(JobFailedError, match="the job failed"):
        await call
    assert [await is_canceled(job) for job in jobs] == [True] * 5


async def test_map_yields_the_results_before_a_failed_one(client: AsyncClient, told_node: FakeNode) -> None:
    seen: list[str] = []

    async def read() -> None:
        async for result in client.map(["hello"] * 4):
            seen.append(result.job_id)  # noqa: PERF401

    reading = asyncio.create_task(read())
    jobs = await told_node.take(4)
    await jobs[2].finish("expired")
    for job in jobs[:2]:
        await job.finish()
    with pytest.raises(JobExpiredError):
        await reading
    assert seen == [jobs[0].id, jobs[1].id]


async def test_unchecked_results_say_what_failed(client: AsyncClient, node: FakeNode) -> None:
    results = await client.generate(["hello", TOO_LONG, "hello"], max_tokens=2, check=False)
    assert [result.outcome.state for result in results] == ["succeeded", "failed", "succeeded"]
    assert results[1].outcome.code == "context_length_exceeded"
    assert results[1].text == ""


async def test_a_timeout_cancels_the_open_jobs(client: AsyncClient, told_node: FakeNode) -> None:
    call = asyncio.create_task(client.generate(["hello"] * 3, timeout=1.0))
    jobs = await told_node.take(3)
    with pytest.raises(ResultTimeoutError, match=r"0 prompts were answered within 1.0 s. The 3 open jobs are canceled"):
        await call
    assert [await is_canceled(job) for job in jobs] == [True] * 3


async def test_cancellation_cancels_the_open_jobs(client: AsyncClient, told_node: FakeNode) -> None:
    call = asyncio.create_task(client.generate(["hello"] * 3))
    jobs = await told_node.take(3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [await is_canceled(job) for job in jobs] == [True] * 3


async def test_jobs_that_need_no_reader_outlive_the_call(client: AsyncClient, told_node: FakeNode) -> None:
    call = asyncio.create_task(client.generate(["hello"] * 3, timeout=0.4, needs_reader=False))
    jobs = await told_node.take(3)
    with pytest.raises(ResultTimeoutError, match="left to the queue"):
        await call
    assert not any([await is_canceled(job) for job in jobs])


async def test_results_leave_redis_once_the_caller_has_them(client: AsyncClient, node: FakeNode, redis: Redis) -> None:
    results = await client.generate(["hello"] * 5, max_tokens=2)
    names = [key.decode() for key in cast("list[bytes]", await redis.keys("*"))]
    assert {result.outcome.state for result in results} == {"succeeded"}
    assert [name for name in names if ":result:" in name or ":log:" in name] == []
    assert len([name for name in names if ":job:" in name]) == 5


async def test_a_repeated_call_with_a_key_finds_the_jobs_of_the_first(
    client: AsyncClient, node: FakeNode, redis: Redis
) -> None:
    prompts = [f"prompt {i}" for i in range(5)]
    first = await client.generate(prompts, max_tokens=2, idempotency_key="run 7")
    again = await client.generate(prompts, max_tokens=2, idempotency_key="run 7")
    assert [result.job_id for result in first] == [result.job_id for result in again]
    assert await num_submitted(redis) == 5


async def test_closing_the_client_cancels_the_jobs_of_its_calls(redis_url: str, told_node: FakeNode) -> None:
    async with AsyncClient(redis_url) as client:
        call = asyncio.create_task(client.generate(["hello"] * 3))
        jobs = await told_node.take(3)
    with pytest.raises(UnavailableError) as caught:
        await call
    assert caught.value.code == "client_closed"
    assert [await is_canceled(job) for job in jobs] == [True] * 3


async def test_no_task_stays_behind(client: AsyncClient, node: FakeNode) -> None:
    await client.generate(["hello"] * 5, max_tokens=2)
    async with aclosing(client.map(Endless(), max_tokens=2)) as results:
        await anext(results)
    with pytest.raises(NotFoundError):
        await client.generate(["hello"], model="unknown")
    assert [task for task in asyncio.all_tasks() if "of a run" in task.get_name()] == []


def test_the_window_narrows_by_refusals_and_widens_slowly() -> None:
    window = Window(100)
    assert window.size == 100
    window.note_refused(50)
    assert window.size == 40
    for _ in range(40):
        window.note_accepted()
    assert window.size == 40
    for _ in range(8000):
        window.note_accepted()
    assert window.size == 100
    window.note_refused(0)
    assert window.size == 1
