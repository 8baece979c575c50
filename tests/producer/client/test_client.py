"""The client without failures."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, cast

import pytest
from fakes.fake_node import MODEL, POOL, PROMPT_TOKENS, FakeNode, Say, fake_text, fake_tokens
from fakes.other_version import REFUSAL, make_pool_of_other_version
from fakes.waiting import until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    JobCancelledError,
    JobExpiredError,
    NotFoundError,
    ProtocolVersionError,
    RequestError,
    UnavailableError,
)
from penstock.contract.job import Priority, SamplingParams
from penstock.contract.output import Usage
from penstock.contract.pool import NodePressure
from penstock.contract.tenant import Terms
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue import keys
from penstock.queue.wire import decode_chunks
from tests.producer.client.reading import check_whole, read_all, read_some


async def test_stream_is_whole_and_needs_no_log(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=50, n=3)
    chunks = await read_all(job.stream())
    check_whole(chunks, job, 50, num_choices=3)
    assert chunks[-1].outcome is not None
    assert chunks[-1].outcome.state == "succeeded"
    assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(PROMPT_TOKENS, 150)]
    assert (client.stats.log_reads, client.stats.gaps, client.stats.resubscribes) == (0, 0, 0)
    assert client.stats.chunks == 151


async def test_many_streams_at_once_need_no_log(client: AsyncClient, node: FakeNode) -> None:
    jobs = await asyncio.gather(*(client.submit("hello", max_tokens=20) for _ in range(100)))
    for job, chunks in zip(jobs, await asyncio.gather(*(read_all(job.stream()) for job in jobs)), strict=True):
        check_whole(chunks, job, 20)
    assert client.stats.log_reads == 0
    assert client.stats.messages < 0.2 * client.stats.chunks


async def test_stream_by_one_call(client: AsyncClient, node: FakeNode) -> None:
    text = "".join([chunk.text async for chunk in client.stream([1, 2, 3], params=SamplingParams(max_tokens=4))])
    assert len(text.split()) == 4


async def test_result_waits_for_the_end(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit([{"role": "user", "content": "hi"}], max_tokens=7)
    result = await job.result()
    assert result.choices[0].token_ids == tuple(fake_tokens(job.id, 7))
    assert result.choices[0].text == fake_text(fake_tokens(job.id, 7))
    assert result.usage == Usage(PROMPT_TOKENS, 7)
    assert await client.result(job.id) == result
    assert client.stats.log_reads == 0


async def test_result_and_two_streams_at_once(client: AsyncClient, node: FakeNode) -> None:
    node.step_s = 0.005
    job = await client.submit("hello", max_tokens=40)
    first, second, result = await asyncio.gather(read_all(job.stream()), read_all(job.stream()), job.result())
    check_whole(first, job, 40)
    check_whole(second, job, 40)
    assert result.choices[0].token_ids == tuple(fake_tokens(job.id, 40))


async def test_second_stream_after_the_end_reads_the_log(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=2500)
    reading = asyncio.create_task(read_all(job.stream()))
    [run] = await told_node.take()
    for _ in range(5):
        chunks = [chunk for _ in range(500) for chunk in run.next_chunks()]
        await told_node.emit([run.emission(chunks)], Say.PUBLISHED)
    check_whole((await read_some(second := job.stream(), 2500)), job, 2500, ended=False)
    await run.finish()
    check_whole(await reading, job, 2500)
    assert len(await read_all(second)) == 1
    assert client.stats.log_reads == 3


async def test_attach_continues_after_an_index(client: AsyncClient, told_node: FakeNode, redis_url: str) -> None:
    job = await client.submit("hello", max_tokens=20)
    [run] = await told_node.take()
    await run.say(10)
    async with AsyncClient(redis_url) as other:
        again = await other.attach(job.id, after=4)
        stream = again.stream()
        seen = await read_some(stream, 5)
        await run.say(10)
        await run.finish()
        seen += await read_all(stream)
    assert [chunk.index for chunk in seen] == list(range(5, 21))
    assert [t for chunk in seen for t in chunk.token_ids] == fake_tokens(job.id, 20)[5:]


async def test_attach_to_a_fresh_job_needs_no_log(client: AsyncClient, told_node: FakeNode, redis_url: str) -> None:
    job = await client.submit("hello", max_tokens=5)
    async with AsyncClient(redis_url) as other:
        again = await other.attach(job.id)
        [run] = await told_node.take()
        await run.say(5)
        await run.finish()
        check_whole(await read_all(again.stream()), job, 5)
        assert other.stats.log_reads == 0


@pytest.mark.parametrize("after", [-1, 3, 19, 20, 25])
@pytest.mark.parametrize("log_lives", [True, False])
async def test_attach_after_the_end_gets_exactly_the_rest(
    client: AsyncClient, told_node: FakeNode, redis: Redis, after: int, log_lives: bool
) -> None:
    job = await client.submit("hello", max_tokens=10, n=2)
    [run] = await told_node.take()
    await run.say(10)
    await run.finish()
    whole = await read_all(job.chunks())
    if not log_lives:
        await redis.delete(keys.log(job.id))
    seen = await read_all((await client.attach(job.id, after=after)).chunks())
    if after < 20:
        assert seen == whole[after + 1 :]
    else:  # the reader has it all: it is told the end
        assert [chunk.outcome for chunk in seen] == [whole[-1].outcome]


async def test_cancel_ends_a_running_job(client: AsyncClient, node: FakeNode) -> None:
    node.step_s = 0.01
    job = await client.submit("hello", max_tokens=3000)
    stream = job.stream()
    await read_some(stream, 3)
    assert await job.cancel() == "cancelling"
    with pytest.raises(JobCancelledError):
        await asyncio.wait_for(read_all(stream), 60)
    assert (await job.status()).state == "cancelled"
    assert await client.cancel(job.id) == "cancelled"


async def test_cancel_ends_a_queued_job(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello")
    assert (await client.status(job.id)).state == "queued"
    assert await client.cancel(job.id) == "cancelled"
    chunks = await read_all(job.chunks())
    assert [chunk.outcome.state for chunk in chunks if chunk.outcome] == ["cancelled"]
    assert (await job.result(check=False)).outcome.state == "cancelled"
    with pytest.raises(JobCancelledError):
        await job.result()


async def test_a_failed_job_raises_its_own_error(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello")
    [run] = await told_node.take()
    await run.say(2)
    await run.finish("expired", "deadline_exceeded")
    stream = job.stream()
    assert len(await read_some(stream, 3)) == 3
    with pytest.raises(JobExpiredError):
        await anext(stream)


async def test_leaving_a_non_background_job_cancels_it(client: AsyncClient, redis_url: str) -> None:
    async with FakeNode(redis_url, step_s=0.01, reattach_grace_ms=50) as node:
        job = await client.submit("hello", max_tokens=3000, background=False)
        background = await client.submit("hello", max_tokens=3000)
        for leaving in (job, background):
            async with aclosing(leaving.stream()) as stream:
                await anext(stream)
        await until(lambda: job.id not in node.jobs)
        assert (await client.result(job.id, check=False)).outcome.code == "unread"
        assert (await background.status()).state == "running"
        await background.cancel()


async def test_a_second_reader_keeps_a_non_background_job(client: AsyncClient, redis_url: str) -> None:
    async with FakeNode(redis_url, step_s=0.005, reattach_grace_ms=0):
        job = await client.submit("hello", max_tokens=60, background=False)
        second = job.stream()
        async with aclosing(job.stream()) as first:
            await anext(first)
            await anext(second)
        rest = await read_all(second)
        assert rest[-1].outcome is not None
        assert rest[-1].outcome.state == "succeeded"


async def test_job_whose_handle_is_dropped_is_canceled_unless_it_is_a_background_job(
    client: AsyncClient, redis_url: str
) -> None:
    async with FakeNode(redis_url, step_s=0.01, reattach_grace_ms=50) as node:
        job_id = (await client.submit("hello", max_tokens=3000, background=False)).id
        await until(lambda: job_id in node.jobs)
        await until(lambda: not node.jobs)
        assert (await client.status(job_id)).state == "cancelled"


async def test_detach_removes_the_reader_in_redis(client: AsyncClient, told_node: FakeNode, redis: Redis) -> None:
    job = await client.submit("hello", background=False)
    await job.detach()
    assert await redis.hget(keys.job(job.id), "inboxes") == b""


async def test_reader_may_attach_again(client: AsyncClient, node: FakeNode) -> None:
    node.step_s = 0.005
    job = await client.submit("hello", max_tokens=60)
    for num_chunks in (1, 5, 10):
        async with aclosing(job.stream()) as stream:
            await read_some(stream, num_chunks)
    check_whole(await read_all(job.stream()), job, 60)


async def test_same_id_is_the_same_job(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=5)
    await job.result()
    again = await client.submit("hello", max_tokens=5, job_id=job.id)
    check_whole(await read_all(again.stream()), job, 5)
    with pytest.raises(ConflictError):
        await client.submit("something else", max_tokens=5, job_id=job.id)


async def test_a_repeated_submission_of_an_ended_job_answers_at_once(client: AsyncClient, node: FakeNode) -> None:
    first = await client.submit("hello", max_tokens=5, idempotency_key="k")
    result = await first.result()
    for options in ({"job_id": first.id}, {"idempotency_key": "k"}):
        async with asyncio.timeout(2):
            again = await client.submit("hello", max_tokens=5, **options)  # type: ignore[arg-type]
            assert await again.result() == result
            again = await client.submit("hello", max_tokens=5, **options)  # type: ignore[arg-type]
            chunks, same = await asyncio.gather(read_all(again.stream()), again.result())
            check_whole(chunks, first, 5)
            assert same == result


async def test_same_idempotency_key_is_the_same_job(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit("hello", max_tokens=5, idempotency_key="k")
    again = await client.submit("hello", max_tokens=5, idempotency_key="k")
    assert again.id == job.id
    check_whole(await read_all(again.stream()), job, 5)
    with pytest.raises(ConflictError):
        await client.submit("something else", idempotency_key="k")


async def test_own_channel_carries_one_chunk_a_message(client: AsyncClient, told_node: FakeNode, redis: Redis) -> None:
    job = await client.submit("hello", max_tokens=3, channel=True)
    pubsub = redis.pubsub()
    await pubsub.subscribe(keys.own_channel(job.id, job.tenant))
    [run] = await told_node.take()
    await run.say(3)
    await run.finish()
    messages = [await pubsub.get_message(timeout=60) for _ in range(5)]
    await pubsub.aclose()  # type: ignore[no-untyped-call]
    assert [decode_chunks(m["data"])[0].index for m in messages[1:] if m] == [0, 1, 2, 3]


async def test_jobs_of_another_tenant_do_not_exist(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit("hello", tenant="other")
    for call in (client.attach, client.status, client.cancel, client.result):
        with pytest.raises(NotFoundError):
            await call(job.id)
    assert (await client.status(job.id, tenant="other")).job_id == job.id
    await job.result()


async def test_invalid_job_id_is_not_found(client: AsyncClient) -> None:
    for bad in ("", "nonsense", "fake.123", "fake.{x}:*"):
        with pytest.raises(NotFoundError):
            await client.attach(bad)


async def test_models_by_any_name(client: AsyncClient, node: FakeNode) -> None:
    for name in (None, POOL, MODEL, "faker"):
        assert (await client.submit("hello", model=name)).pool == POOL
    with pytest.raises(NotFoundError, match="acme/fake") as caught:
        await client.submit("hello", model="gpt-17")
    assert caught.value.param == "model"


async def test_a_model_is_known_as_soon_as_its_first_node_has_joined(client: AsyncClient, redis_url: str) -> None:
    with pytest.raises(UnavailableError):
        await client.submit("hello")
    async with FakeNode(redis_url):
        assert (await client.submit("hello", max_tokens=2)).pool == POOL
        async with FakeNode(redis_url, pool="second", model="acme/second"):
            assert (await client.submit("hello", model="acme/second", max_tokens=2)).pool == "second"
        async with FakeNode(redis_url, pool="third", model="acme/third"):
            assert (await client.submit("hello", job_id=f"third.{uuid7()}", max_tokens=2)).pool == "third"


async def test_model_must_be_named_where_there_are_two(client: AsyncClient, node: FakeNode, redis_url: str) -> None:
    async with FakeNode(redis_url, pool="second", model="acme/second"):
        with pytest.raises(RequestError) as caught:
            await client.submit("hello")
        assert caught.value.param == "model"
        assert (await client.submit("hello", model="acme/second", max_tokens=2)).pool == "second"


async def test_pressure_is_what_the_nodes_report(client: AsyncClient, told_node: FakeNode) -> None:
    await client.submit("hello", max_tokens=10)
    pressure = await client.pressure(POOL)
    assert pressure.nodes == (told_node.pressure,)
    await until(lambda: client.pressure(POOL), lambda seen: sum(seen.backlog_cost) > 10)


async def test_nothing_served_is_unavailable(client: AsyncClient) -> None:
    with pytest.raises(UnavailableError):
        await client.submit("hello")


async def test_a_pool_without_live_nodes_is_unavailable(client: AsyncClient, told_node: FakeNode, redis: Redis) -> None:
    await told_node.broker.leave()
    told_node.pressure = NodePressure(told_node.node_id, draining=True)
    await redis.delete(keys.pressure(POOL))
    with pytest.raises(UnavailableError) as caught:
        await client.submit("hello", background=False)
    assert caught.value.code == "no_node"


async def test_full_pool_says_when_to_retry(client: AsyncClient, told_node: FakeNode) -> None:
    told_node.pressure = NodePressure(told_node.node_id, kv_tokens_available=0, drain_cost_per_s=1.0)
    await told_node.heartbeat()
    await client.submit("hello", max_tokens=200, background=False)
    with pytest.raises(BusyError, match="would wait about") as caught:
        await client.submit("hello", max_tokens=200, background=False, priority=Priority.BATCH)
    assert caught.value.retry_after_ms >= 1000
    await client.submit("hello", max_tokens=200, background=False, tenant="another")


async def test_jobs_admitted_since_count(client: AsyncClient, told_node: FakeNode) -> None:
    told_node.pressure = NodePressure(told_node.node_id, kv_tokens_available=1000, drain_cost_per_s=1.0)
    await told_node.heartbeat()
    with pytest.raises(BusyError):
        await asyncio.gather(*(client.submit("hello", max_tokens=200, background=False) for _ in range(20)))


async def test_background_work_needs_no_node_and_waits_for_as_long_as_it_takes(
    client: AsyncClient, told_node: FakeNode
) -> None:
    told_node.pressure = NodePressure(told_node.node_id, kv_tokens_available=0, drain_cost_per_s=1.0)
    await told_node.heartbeat()
    jobs = [await client.submit("hello", max_tokens=200) for _ in range(20)]
    await told_node.broker.leave()
    jobs.append(await client.submit("hello", max_tokens=200))
    statuses = [await job.status() for job in jobs]
    assert {(status.state, status.priority, status.is_background) for status in statuses} == {
        ("queued", Priority.BATCH, True)
    }
    with pytest.raises(RequestError, match="max_wait_s limits the wait of foreground work") as refused:
        await client.submit("hello", max_wait_s=5)
    assert refused.value.param == "max_wait_s"


async def test_a_job_waits_for_its_time(client: AsyncClient, node: FakeNode) -> None:
    job = await client.submit("x", not_before_s=0.4, max_tokens=3)
    status = await job.status()
    assert (status.state, status.taken_ms) == ("scheduled", 0)
    result = await job.result()
    assert result.outcome.state == "succeeded"
    assert result.taken_ms >= result.submitted_ms == status.submitted_ms, "it stood in line from its time on"


async def test_weight_is_the_clients_or_the_terms(redis_url: str, told_node: FakeNode) -> None:
    async with AsyncClient(redis_url, settings=ClientSettings(weight=3)) as client:
        own = await client.submit("x")
        other = await client.submit("x", terms=Terms(weight=0.5))
    weights = [await cast(Any, told_node.redis.hget(keys.job(job.id), "weight")) for job in (own, other)]
    assert list(map(float, weights)) == [3.0, 0.5]


@pytest.mark.parametrize(
    ("prompt", "options", "param", "says"),
    [
        ("x", {"temperature": 11}, "temperature", "10"),
        ("x", {"top_p": 1.1}, "top_p", "1"),
        ("x", {"n": 17}, "n", "16"),
        ("x", {"max_tokens": 0}, "max_tokens", "1"),
        ("x", {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "must not exceed max_tokens"),
        ("x", {"stop": ["a"] * 17}, "stop", "16"),
        ("x", {"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "0"),
        ("x", {"temprature": 1}, "temprature", "unknown"),
        ("x", {"temperature": 1, "params": SamplingParams()}, "temperature", "not both"),
        ("x", {"deadline_s": 0}, "deadline_s", "31622400"),
        ("x", {"deadline_s": float("nan")}, "deadline_s", "31622400"),
        ("x", {"not_before_s": -1}, "not_before_s", "31622400"),
        ("x", {"not_before_s": 5, "deadline_s": 5}, "not_before_s", "must be less than deadline_s"),
        ("x", {"priority": 7}, "priority", "2"),
        ("x", {"tenant": "a b"}, "tenant", "pattern"),
        ("x", {"job_id": f"{POOL}.123"}, "job_id", "pattern"),
        ("x", {"job_id": "elsewhere.01a1f820-1cd2-775c-94d6-dde870154e3c"}, "job_id", "no served pool"),
        ("x", {"idempotency_key": ""}, "idempotency_key", "1 character"),
        ([], {}, "prompt", "empty"),
        (7, {}, "prompt", "text"),
        (b"bytes", {}, "prompt", "text"),
        ([1, -5], {}, "prompt[1]", "0"),
        ([1, "x"], {}, "prompt[1]", "integer"),
        (["1", "2"], {}, "prompt", "one text"),
        ([{"role": "robot", "content": "x"}], {}, "messages[0].role", "user"),
        ([{"role": "user"}], {}, "messages[0].content", "required"),
        ([1] * 5000, {}, "prompt", "4096"),
    ],
)
async def test_a_bad_argument_is_named(
    client: AsyncClient, told_node: FakeNode, prompt: object, options: dict[str, object], param: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        await client.submit(prompt, **options)  # type: ignore[arg-type]
    assert caught.value.param == param


async def test_a_client_without_redis_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    with pytest.raises(ConfigError, match="PENSTOCK_REDIS_URL"):
        AsyncClient()


async def test_connecting_to_nothing_is_unavailable_at_once() -> None:
    client = AsyncClient("unix:///nonexistent/redis.sock")
    with pytest.raises(UnavailableError):
        await client.connect()
    await client.close()


async def test_closed_client_raises_unavailable(redis_url: str, node: FakeNode) -> None:
    client = AsyncClient(redis_url)
    with pytest.raises(UnavailableError) as caught:
        await client.submit("hello")
    assert caught.value.code == "client_closed"
    async with client:
        job = await client.submit("hello", max_tokens=3000)
        reading = asyncio.create_task(read_all(job.stream()))
        await asyncio.sleep(0.05)
    with pytest.raises(UnavailableError) as caught:
        await reading
    assert caught.value.code == "client_closed"


async def test_a_closed_client_is_not_opened_again(redis_url: str, node: FakeNode) -> None:
    client = AsyncClient(redis_url)
    async with client:
        assert client.is_alive
    with pytest.raises(UnavailableError, match="another one") as caught:
        await client.connect()
    assert caught.value.code == "client_closed"


async def test_connecting_twice_at_once_subscribes_once(redis_url: str, redis: Redis) -> None:
    client = AsyncClient(redis_url)
    await asyncio.gather(client.connect(), client.connect())
    assert len(await redis.pubsub_channels("penstock:echo:*")) == 1
    await client.close()


async def test_a_model_of_another_version_is_refused_with_both_versions(client: AsyncClient, redis: Redis) -> None:
    job_id = await make_pool_of_other_version(redis, "old", "acme/older")
    for model in ("acme/older", "other", "old"):
        with pytest.raises(ProtocolVersionError, match=REFUSAL.format(pool="old")):
            await client.submit("hello", model=model)
    with pytest.raises(ProtocolVersionError, match=REFUSAL.format(pool="old")):
        await client.attach(job_id)


async def test_a_refused_number_of_attempts_is_counted_once(client: AsyncClient, told_node: FakeNode) -> None:
    with pytest.raises(RequestError, match="max_attempts"):
        await client.submit("Hi", check_output=bool, max_attempts=0)
    await client.submit("Hi", check_output=bool, max_attempts=2)
    assert client.stats.decisions == {"invalid": 1, "admitted": 1}
