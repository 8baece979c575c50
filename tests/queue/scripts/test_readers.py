"""attach, detach, reader_heartbeat, messages, and the rules by which a job without readers is canceled."""

from __future__ import annotations

import pytest
from fakes.queue.harness import CONFIG, LEASE_MS, POOL, TENANT, P, Queue, chunks_of, new_id

from penstock.contract.errors import NotFoundError
from penstock.contract.output import Chunk, Outcome
from penstock.queue import keys
from penstock.queue.broker.node import Emission, Taken
from penstock.queue.wire import decode_chunks, encode_chunk

ABANDONED_MS = 30_001
GRACE_MS = 5_001


async def unheard(queue: Queue, taken: Taken, *, swept_ms_ago: int | None = 0) -> bool:
    """Whether emit reports that the job has no reader, if the last sweep was this long ago."""
    await queue.note_sweep(swept_ms_ago)
    node_name = (await queue.record(taken.job_id))["node"]
    node = await queue.node(node_name)
    answer = await node.emit(taken, 0, 0)
    assert answer in ("OK", "UNREAD")
    return answer == "UNREAD"


# Messages


async def test_chunks_of_a_call_reach_an_inbox_back_to_back(queue: Queue) -> None:
    node = await queue.node()
    inbox, other = (
        await queue.listen(keys.inbox_channel(POOL, "me")),
        await queue.listen(keys.inbox_channel(POOL, "you")),
    )
    for reader in ("me", "me", "you"):
        await queue.submit(inbox=reader)
    jobs = (await node.take()).jobs

    await node.broker.emit([Emission(job.job_id, job.lease, 0, chunks_of(job.job_id, 0, 2)) for job in jobs])

    readers = [(await queue.record(job.job_id))["inboxes"] for job in jobs]
    mine = [chunk for job, reader in zip(jobs, readers, strict=True) if reader == "me" for chunk in chunks(job, 0, 2)]
    (message,) = await inbox.messages()
    assert decode_chunks(message) == mine
    (message,) = await other.messages()
    assert [chunk.index for chunk in decode_chunks(message)] == [0, 1]


def chunks(taken: Taken, start: int, count: int) -> list[Chunk]:
    return [chunk for data in chunks_of(taken.job_id, start, count) for chunk in decode_chunks(data)]


async def test_messages_stay_below_their_limit(queue: Queue) -> None:
    node = await queue.node()
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))
    taken = await queue.running(node, inbox="me")
    sent = tuple(encode_chunk(Chunk(taken.job_id, i, text="x" * 30_000)) for i in range(20))
    huge = encode_chunk(Chunk(taken.job_id, 20, text="y" * 300_000))

    await node.broker.emit([Emission(taken.job_id, taken.lease, 0, (*sent, huge))])

    messages = await inbox.messages()
    assert b"".join(messages) == b"".join((*sent, huge))
    assert [len(message) <= 64 * 1024 for message in messages] == [True] * 10 + [False]
    assert messages[-1] == huge


async def test_own_channel_carries_one_chunk_a_message(queue: Queue) -> None:
    node = await queue.node()
    job_id = await queue.submit(channel=True)
    channel = await queue.listen(keys.own_channel(job_id, TENANT))
    taken = await node.take_one()
    await node.emit(taken, 0, 2)
    await node.finish(taken, 2, 1)
    messages = await channel.messages()
    assert [[chunk.index for chunk in decode_chunks(message)] for message in messages] == [[0], [1], [2], [3]]
    assert decode_chunks(messages[-1])[0].outcome == Outcome("succeeded")


async def test_job_without_a_channel_publishes_on_none(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me")
    channel = await queue.listen(keys.own_channel(taken.job_id, TENANT))
    await node.emit(taken, 0, 1)
    assert await channel.messages() == []


# Attach and detach


async def test_attached_reader_gets_what_comes_after_the_answer(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.emit(taken, 0, 3)
    inbox = await queue.listen(keys.inbox_channel(POOL, "late"))

    attached = await queue.producer.attach(taken.job_id, "default", inbox="late")
    await queue.producer.attach(taken.job_id, "default", inbox="late")
    await node.emit(taken, 3, 1)

    assert (attached.state, attached.num_chunks, attached.pushed) == ("running", 3, True)
    assert await inbox.messages() == list(chunks_of(taken.job_id, 3, 1))


async def test_ended_job_is_attached_to_by_its_number_of_chunks(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.finish(taken, 0, 4)
    await queue.redis.delete(keys.log(taken.job_id))

    attached = await queue.producer.attach(taken.job_id, "default", inbox="me")

    assert (attached.state, attached.num_chunks) == ("succeeded", 5)
    assert await queue.producer.log(taken.job_id, 0) == []
    assert (await queue.record(taken.job_id))["inboxes"] == ""


async def test_only_its_tenant_sees_a_job(queue: Queue) -> None:
    await queue.node()
    job_id = await queue.submit(tenant="acme")
    for unknown, tenant in ((job_id, "other"), (new_id(), "acme"), ("nopool.x", "acme")):
        for call in (queue.producer.attach, queue.producer.status, queue.producer.result, queue.producer.cancel):
            with pytest.raises(NotFoundError) as caught:
                await call(unknown, tenant)
            assert caught.value.code == "job_not_found"
    assert await queue.state(job_id) == "queued"


async def test_job_pushes_to_sixteen_readers_and_sends_further_ones_to_the_log(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="r0")
    answers = [await queue.producer.attach(taken.job_id, "default", inbox=f"r{i}") for i in range(17)]
    assert [answer.pushed for answer in answers] == [True] * 16 + [False]
    inbox, late = (
        await queue.listen(keys.inbox_channel(POOL, "r15")),
        await queue.listen(keys.inbox_channel(POOL, "r16")),
    )
    await node.emit(taken, 0, 1)
    assert (len(await inbox.messages()), len(await late.messages())) == (1, 0)


async def test_detached_reader_gets_nothing_more(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="one")
    await queue.producer.attach(taken.job_id, "default", inbox="two")
    one, two = await queue.listen(keys.inbox_channel(POOL, "one")), await queue.listen(keys.inbox_channel(POOL, "two"))

    await queue.producer.detach(taken.job_id, "one")
    await node.emit(taken, 0, 1)

    assert (len(await one.messages()), len(await two.messages())) == (0, 1)
    assert (await queue.record(taken.job_id))["unread"] == ""
    await queue.producer.detach(new_id(), "one")


async def test_reader_whose_name_begins_like_that_of_another_is_separate(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me-too")
    await queue.producer.attach(taken.job_id, "default", inbox="me")
    assert (await queue.record(taken.job_id))["inboxes"] == "me-too me"


# Unheard


async def test_job_whose_only_reader_fell_silent_is_unread(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), background=False, inbox="me")
    assert not await unheard(queue, taken)
    await queue.age("readers", "me", ABANDONED_MS)
    assert await unheard(queue, taken)
    await queue.producer.reader_heartbeat("m", "me")
    assert not await unheard(queue, taken)
    await queue.redis.zrem(f"{P}:readers", "me")
    assert await unheard(queue, taken)


async def test_one_live_reader_keeps_a_job(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), background=False, inbox="dead")
    await queue.producer.attach(taken.job_id, "default", inbox="alive")
    await queue.age("readers", "dead", ABANDONED_MS)
    assert not await unheard(queue, taken)


async def test_background_job_needs_no_reader(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me")
    await queue.age("readers", "me", ABANDONED_MS)
    assert not await unheard(queue, taken)
    await queue.producer.detach(taken.job_id, "me")
    await queue.change(taken.job_id, unread=await queue.now_ms() - GRACE_MS)
    assert not await unheard(queue, taken)
    assert await node.give_back(taken) == "OK"
    assert await queue.state(taken.job_id) == "queued"


async def test_job_with_its_own_channel_is_never_unread(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), background=False, inbox="me", channel=True)
    await queue.age("readers", "me", ABANDONED_MS)
    await queue.producer.detach(taken.job_id, "me")
    assert not await unheard(queue, taken)


async def test_detached_job_has_a_grace_time_to_be_read_again(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), background=False, inbox="me")
    await queue.producer.detach(taken.job_id, "me")
    assert not await unheard(queue, taken)
    await queue.change(taken.job_id, unread=await queue.now_ms() - GRACE_MS)
    assert await unheard(queue, taken)
    await queue.producer.attach(taken.job_id, "default")
    assert await unheard(queue, taken)
    await queue.producer.attach(taken.job_id, "default", inbox="again")
    assert not await unheard(queue, taken)


@pytest.mark.parametrize("own_ms", [0, 10_000, 120_000])
async def test_job_of_a_reader_that_stops_waits_as_long_as_after_a_kill(queue: Queue, own_ms: int) -> None:
    own = {"background": True, "reader_grace_ms": own_ms} if own_ms else {"background": False}
    taken = await queue.running(await queue.node(), inbox="me", **own)
    await queue.producer.detach(taken.job_id, "me", stops=True)
    stamp = int((await queue.record(taken.job_id))["unread"])
    wait_ms = max(own_ms, CONFIG["abandon_after_ms"])
    await queue.change(taken.job_id, unread=stamp - wait_ms + 2000)
    assert not await unheard(queue, taken)
    await queue.change(taken.job_id, unread=stamp - wait_ms - 2000)
    assert await unheard(queue, taken)
    await queue.producer.attach(taken.job_id, "default", inbox="again")
    assert not await unheard(queue, taken)


async def test_job_submitted_without_a_reader_has_the_grace_time_too(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), background=False)
    assert not await unheard(queue, taken)
    await queue.change(taken.job_id, unread=await queue.now_ms() - GRACE_MS)
    assert await unheard(queue, taken)


async def test_job_with_a_grace_of_its_own_is_unread_after_that_time_alone(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), inbox="me", background=True, reader_grace_ms=120_000)
    await queue.age("readers", "me", 119_000)
    assert not await unheard(queue, taken)
    await queue.age("readers", "me", 121_000)
    assert await unheard(queue, taken)
    await queue.producer.detach(taken.job_id, "me")
    await queue.change(taken.job_id, unread=await queue.now_ms() - 119_000)
    assert not await unheard(queue, taken)
    await queue.change(taken.job_id, unread=await queue.now_ms() - 121_000)
    assert await unheard(queue, taken)


async def test_a_short_grace_gives_a_reader_that_may_be_alive_the_usual_time(queue: Queue) -> None:
    taken = await queue.running(await queue.node(), inbox="me", background=True, reader_grace_ms=1_000)
    await queue.age("readers", "me", ABANDONED_MS - 1_000)
    assert not await unheard(queue, taken)
    await queue.age("readers", "me", ABANDONED_MS)
    assert await unheard(queue, taken)


@pytest.mark.parametrize("swept_ms_ago", [None, -5000, LEASE_MS // 2 + 200, LEASE_MS])
async def test_silent_readers_do_not_count_as_gone_while_the_pool_is_not_swept(
    queue: Queue, swept_ms_ago: int | None
) -> None:
    taken = await queue.running(await queue.node(), background=False, inbox="me")
    await queue.age("readers", "me", ABANDONED_MS)
    assert not await unheard(queue, taken, swept_ms_ago=swept_ms_ago)
    assert await unheard(queue, taken)
