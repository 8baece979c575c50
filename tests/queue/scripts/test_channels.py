"""Channels of jobs: their names, and messages in JSON, which any program can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.queue.harness import POOL, TENANT, Queue, new_id, new_job

from penstock.contract.channel import MAX_CHANNEL_NAME_CHARS, channel_of, channel_of_field
from penstock.contract.errors import ConflictError
from penstock.contract.output import Chunk, Outcome, TokenLogprobs, Usage
from penstock.gateway.apis.jobs.answers import chunk_object
from penstock.queue import keys
from penstock.queue.broker.node import Emission
from penstock.queue.broker.producer import Submission
from penstock.queue.wire import decode_chunks, encode_chunk

LONGEST = "n" * MAX_CHANNEL_NAME_CHARS
LOGPROBS = (TokenLogprobs((7,), (-0.5,), (b"x",)),)


async def events_of(queue: Queue, channel: str, **fields: Any) -> tuple[str, Any]:
    """Return the id of a job that is submitted with these fields, and a subscription to its channel."""
    job_id = new_id()
    heard = await queue.listen(keys.own_channel(job_id, fields.get("tenant", TENANT), channel))
    await queue.submit(new_job(job_id, **{"channel": {"name": channel} if channel else "json", **fields}))
    return job_id, heard


async def read(heard: Any) -> list[dict[str, Any]]:
    return [json.loads(message) for message in await heard.messages()]


def expected(job_id: str, chunk: Chunk) -> dict[str, Any]:
    return {"id": job_id, **json.loads(json.dumps(chunk_object(chunk)))}


async def test_json_messages_are_the_events_of_the_jobs_stream(queue: Queue) -> None:
    node = await queue.node()
    job_id, heard = await events_of(queue, "")
    taken = await node.take_one()
    text = 'a "quoted" \\ line\n\t\x00\x7f</b> \u2028 ünï 🐟'
    sent = (
        Chunk(job_id, 0, 0, 0, (0, 4_294_967_295), text, num_prompt_tokens=7),
        Chunk(job_id, 1, 1, 0, (), ""),
        Chunk(job_id, 2, 0, 2, (5,), "x", "stop", Usage(7, 3, 4)),
    )
    await node.broker.emit([Emission(job_id, taken.lease, 0, tuple(map(encode_chunk, sent[:2])))])
    last = Emission(job_id, taken.lease, 2, (encode_chunk(sent[2]),))
    assert await node.broker.finish(last, Outcome("succeeded"), b"result") == "OK"

    end = Chunk(job_id, 3, outcome=Outcome("succeeded"))
    assert await read(heard) == [expected(job_id, chunk) for chunk in (*sent, end)]


async def test_json_leaves_out_log_probabilities_which_stay_in_the_log(queue: Queue) -> None:
    node = await queue.node()
    job_id, heard = await events_of(queue, "")
    taken = await node.take_one()
    with_logprobs = Chunk(job_id, 0, 0, 0, (7,), "x", "stop", Usage(1, 1, 0), None, LOGPROBS, LOGPROBS)

    await node.broker.emit([Emission(job_id, taken.lease, 0, (encode_chunk(with_logprobs),))])

    assert await read(heard) == [expected(job_id, Chunk(job_id, 0, 0, 0, (7,), "x", "stop", Usage(1, 1, 0)))]
    assert decode_chunks((await queue.log(job_id))[0]) == [with_logprobs]


async def cancel(queue: Queue, job_id: str) -> None:
    await queue.producer.cancel(job_id, TENANT)


async def expire(queue: Queue, job_id: str) -> None:
    await queue.change(job_id, deadline=1)
    await queue.redis.zadd(keys.prefix(POOL) + ":deadlines", {job_id: 1})
    await queue.sweep()


async def lose(queue: Queue, job_id: str) -> None:
    for name in ("n1", "n2", "n3"):
        await (await queue.node(name)).take_one()
        await queue.change(job_id, avoid="")
        await queue.kill(await queue.node(name))


@pytest.mark.parametrize(("end", "state"), [(cancel, "cancelled"), (expire, "expired"), (lose, "dead")])
@pytest.mark.parametrize("name", ["", "all-of-mine"])
async def test_job_that_no_node_finished_has_a_last_message(queue: Queue, end: Any, state: str, name: str) -> None:
    await queue.node("idle")
    job_id, heard = await events_of(queue, name, deadline_ms=60_000)
    await end(queue, job_id)
    status = await queue.producer.status(job_id, TENANT)
    assert status.outcome is not None
    assert await read(heard) == [expected(job_id, Chunk(job_id, 0, outcome=status.outcome))]
    assert status.outcome.state == state


async def test_jobs_of_a_tenant_share_a_named_channel(queue: Queue) -> None:
    node = await queue.node()
    heard = await queue.listen(keys.own_channel(new_id(), TENANT, LONGEST))
    foreign = await queue.listen(keys.own_channel(new_id(), "other", LONGEST))
    named = {"name": LONGEST, "format": "json"}
    ids = [await queue.submit(channel=named) for _ in range(2)]
    strange = await queue.submit(channel=named, tenant="other")

    for taken in (await node.take()).jobs:
        await node.emit(taken, 0, 1)

    assert sorted(event["id"] for event in await read(heard)) == sorted(ids)
    assert [event["id"] for event in await read(foreign)] == [strange]
    assert len((await queue.record(ids[0]))["channel"]) <= 64


async def test_job_keeps_its_first_channel(queue: Queue) -> None:
    await queue.node()
    job = new_job(channel="json", idempotency_key="k")
    submitted = await queue.producer.submit(Submission(job, 1))
    own = keys.own_channel(job.id, TENANT)
    assert submitted.channel == (await queue.producer.status(job.id, TENANT)).channel == own
    other = new_job(channel={"name": "x"}, idempotency_key="k")
    for call in (
        queue.producer.attach(job.id, TENANT, channel=channel_of(True)),
        queue.producer.submit(Submission(other, 1)),
    ):
        with pytest.raises(ConflictError) as caught:
            await call
        assert (caught.value.code, caught.value.param) == ("channel_conflict", "channel")
    assert (await queue.producer.attach(job.id, TENANT, channel=channel_of("json"))).state == "queued"
    again = await queue.producer.submit(Submission(job.model_copy(update={"channel": None}), 1))
    assert again.existed
    assert (await queue.record(job.id))["channel"] == "j"


async def test_attach_adds_a_channel_to_an_open_job_alone(queue: Queue) -> None:
    node = await queue.node()
    open_job, ended = await queue.running(node), await queue.running(node)
    await node.finish(ended, 0, 1)
    heard = await queue.listen(keys.own_channel(open_job.job_id, TENANT))
    for taken in (open_job, ended):
        await queue.producer.attach(taken.job_id, TENANT, channel=channel_of("json"))
    await node.emit(open_job, 0, 1)
    assert [event["index"] for event in await read(heard)] == [0]
    assert [(await queue.record(one.job_id))["channel"] for one in (open_job, ended)] == ["j", "0"]


async def test_repeated_call_is_published_again_with_its_index(queue: Queue) -> None:
    node = await queue.node()
    _, heard = await events_of(queue, "")
    taken = await node.take_one()
    for start, count in ((0, 2), (0, 2), (1, 2)):
        await node.emit(taken, start, count)
    assert [event["index"] for event in await read(heard)] == [0, 1, 0, 1, 1, 2]


async def test_chunk_that_is_none_leaves_a_gap_and_the_job_ends(queue: Queue) -> None:
    node = await queue.node()
    job_id, heard = await events_of(queue, "")
    taken = await node.take_one()
    assert await node.broker.emit([Emission(job_id, taken.lease, 0, (b"\xc1 no chunk",))]) == ["OK"]
    assert await node.finish(taken, 1, 1) == "OK"
    assert [event["index"] for event in await read(heard)] == [1, 2]


@pytest.mark.parametrize(
    "given", [True, "json", "msgpack", {"name": "a.b_c-1"}, {"name": LONGEST, "format": "msgpack"}]
)
def test_field_of_a_record_names_format_and_name(given: Any) -> None:
    channel = channel_of(given)
    assert channel is not None
    assert channel_of_field(channel.field) == channel
    assert channel.field not in ("", "0")


@pytest.mark.parametrize("field", ["", "0", "1", "x:y"])
def test_other_fields_name_no_channel(field: str) -> None:
    assert channel_of_field(field) is None
