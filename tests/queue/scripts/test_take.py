"""take: what fits, oldest first, most urgent class first; no job is passed; a repeated call gets the same answer."""

from __future__ import annotations

import pytest
from fakes.queue.harness import LEASE_MS, POOL, P, Queue, ids_of, new_job

from penstock.contract.errors import InvariantError
from penstock.contract.job import Priority, SamplingParams
from penstock.queue import keys
from penstock.queue.broker.node import Capacity, LeaseLostError, NodeBroker
from penstock.queue.wire import encode_request

CLASSES = (Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH)


async def test_oldest_job_is_first_whatever_its_tenant(queue: Queue) -> None:
    node = await queue.node()
    submitted = [await queue.submit(tenant=tenant) for tenant in ("a", "a", "b", "a", "c", "b")]
    for age, job_id in enumerate(submitted):
        await queue.redis.zadd(f"{P}:waiting:1", {job_id: 1000 + age})

    assert ids_of(await node.take(slots=4)) == submitted[:4]
    assert ids_of(await node.take()) == submitted[4:]


async def test_more_urgent_classes_first(queue: Queue) -> None:
    node = await queue.node()
    by_class = {p: await queue.submit(priority=p) for p in reversed(CLASSES)}
    answer = await node.take()
    assert ids_of(answer) == [by_class[p] for p in CLASSES]
    assert answer.depth[:3] == (0, 0, 0)


async def test_taken_job_has_what_its_node_must_know(queue: Queue) -> None:
    node = await queue.node()
    job = new_job(deadline_ms=60_000)
    await queue.submit(job, cost=77)

    taken = await node.take_one()

    assert (taken.job_id, taken.losses, taken.num_chunks, taken.cost) == (job.id, 0, 0, 77)
    assert taken.lease == "1:nonce-n1:1"
    assert 50_000 < taken.deadline_in_ms <= 60_000
    assert await queue.ids("running:n1") == {job.id}
    assert await queue.ids("waiting:1") == await queue.ids("deadlines") == set()
    record = await queue.record(job.id)
    assert (record["state"], record["node"], record["lease"]) == ("running", "n1", taken.lease)
    status = await queue.producer.status(job.id, "default")
    assert status.submitted_ms <= status.taken_ms
    request, nothing = await node.broker.requests([job.id, "m.nobody"])
    assert (request, nothing) == (encode_request(job), None)


async def test_head_that_does_not_fit_is_not_overtaken(queue: Queue) -> None:
    node = await queue.node()
    (big,) = await queue.submit_many(1, cost=500)
    small = await queue.submit(cost=1)
    batch = await queue.submit(cost=1, priority=Priority.BATCH)

    answer = await node.take(tokens=499)
    assert ids_of(answer) == []
    assert answer.depth[:3] == (0, 2, 1)

    assert ids_of(await node.take(tokens=502)) == [big, small, batch]


async def test_capacity_is_counted_per_class(queue: Queue) -> None:
    node = await queue.node()
    urgent = await queue.submit_many(3, cost=100, priority=Priority.INTERACTIVE)
    await queue.submit_many(1, cost=100, priority=Priority.BATCH)
    # 250 tokens for interactive jobs, of which 150 are held by running batch jobs.
    answer = await node.take(tokens=(250, 100, 100))
    assert ids_of(answer) == urgent[:2]
    assert answer.depth[:3] == (1, 0, 1)


async def test_job_reduces_the_capacity_of_its_class_and_of_less_urgent_ones_only(queue: Queue) -> None:
    node = await queue.node()
    standard = await queue.submit(cost=100)
    batch = await queue.submit(cost=100, priority=Priority.BATCH)
    assert ids_of(await node.take(tokens=(0, 100, 199))) == [standard]
    assert ids_of(await node.take(tokens=(0, 0, 100))) == [batch]


async def test_job_of_several_choices_needs_as_many_slots(queue: Queue) -> None:
    node = await queue.node()
    (wide,) = await queue.submit_many(1, params=SamplingParams(n=4))
    narrow = await queue.submit()
    assert ids_of(await node.take(slots=3)) == []
    assert ids_of(await node.take(slots=4)) == [wide]
    assert ids_of(await node.take(slots=1)) == [narrow]


async def test_job_wider_than_the_node_counts_as_all_its_slots(queue: Queue) -> None:
    node = await queue.node()
    wide = await queue.submit(params=SamplingParams(n=16))
    assert ids_of(await node.take(slots=7, slots_total=8)) == []
    assert ids_of(await node.take(slots=8, slots_total=8)) == [wide]


async def test_job_larger_than_the_node_counts_as_the_whole_node(queue: Queue) -> None:
    node = await queue.node()
    huge = await queue.submit(cost=5000)
    assert ids_of(await node.take(tokens=999, kv_total=1000)) == []
    assert ids_of(await node.take(tokens=1000, kv_total=1000)) == [huge]


async def test_one_call_takes_a_bounded_number(queue: Queue) -> None:
    node = await queue.node()
    for _ in range(130):
        await queue.submit(cost=1)
    answer = await node.take(slots=1000, slots_total=1000)
    assert (len(answer.jobs), answer.depth[:3]) == (128, (0, 2, 0))
    assert len({job.lease for job in answer.jobs}) == 128


async def test_two_nodes_never_get_one_job(queue: Queue) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    submitted = await queue.submit_many(6)
    first = await one.take(slots=3)
    second = await two.take(slots=5)
    assert ids_of(first) + ids_of(second) == submitted


async def test_repeated_call_gets_the_same_jobs_with_the_same_leases(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit_many(3)
    answer = await node.take(slots=2)
    assert await node.take_again(slots=2) == answer
    assert await queue.ids("running:n1") == set(ids_of(answer))


async def test_repeated_call_leaves_out_what_has_moved_on(queue: Queue) -> None:
    node = await queue.node()
    submitted = await queue.submit_many(3)
    first, second, third = (await node.take()).jobs
    await node.finish(first, 0)
    await node.give_back(second)
    assert (await node.take_again()).jobs == (third,)
    assert third.job_id == submitted[2]


async def test_empty_answer_is_repeated_as_empty(queue: Queue) -> None:
    node = await queue.node()
    await node.take()
    await queue.submit()
    again = await node.take_again()
    assert (again.jobs, again.depth[:3]) == ((), (0, 1, 0))


async def test_older_call_is_stale_and_takes_nothing(queue: Queue) -> None:
    node = await queue.node()
    await node.take()
    await node.take()
    job_id = await queue.submit()
    node.call = 1
    with pytest.raises(InvariantError, match="STALE"):
        await node.take_again()
    assert await queue.state(job_id) == "queued"


async def test_answer_is_remembered_for_a_minute(queue: Queue) -> None:
    node = await queue.node()
    await node.take()
    assert 0 < await queue.redis.pttl(f"{P}:last_take:n1") <= 60_000


async def test_node_that_is_not_alive_gets_nothing(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit()
    stranger = NodeBroker(queue.redis, POOL, "stranger", "r1")
    with pytest.raises(LeaseLostError):
        await stranger.take(1, "nonce", Capacity((9,) * 6, (9,) * 6, 9, 9))
    await queue.kill(node)
    with pytest.raises(LeaseLostError):
        await node.take()


async def test_given_back_job_avoids_its_node_for_a_while(queue: Queue) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(one)
    behind = await queue.submit()
    await one.give_back(taken)

    answer = await one.take()
    assert ids_of(answer) == [behind]
    assert 0 < answer.again_in_ms <= 2000

    assert ids_of(await two.take()) == [taken.job_id]


async def test_given_back_job_returns_once_its_node_was_avoided_long_enough(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.give_back(taken)
    await queue.change(taken.job_id, avoid_until=await queue.now_ms() - 1)
    answer = await node.take()
    assert (ids_of(answer), answer.again_in_ms) == ([taken.job_id], 0)


async def test_log_is_continued_by_its_own_revision_only(queue: Queue) -> None:
    old, new = await queue.node("old", "r1"), await queue.node("new", "r2")
    taken = await queue.running(old)
    await old.emit(taken, 0, 5)
    await old.give_back(taken)

    assert ids_of(await new.take()) == []

    other = await queue.node("other", "r1")
    (again,) = (await other.take()).jobs
    assert (again.job_id, again.num_chunks) == (taken.job_id, 5)


async def test_job_without_tokens_changes_revision_freely(queue: Queue) -> None:
    old, new = await queue.node("old", "r1"), await queue.node("new", "r2")
    taken = await queue.running(old)
    await old.give_back(taken)
    assert ids_of(await new.take()) == [taken.job_id]
    assert (await queue.record(taken.job_id))["revision"] == "r2"


async def test_log_of_a_revision_that_nobody_serves_ends_failed(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    old, new = await queue.node("old", "r1"), await queue.node("new", "r2")
    taken = await queue.running(old)
    await old.emit(taken, 0, 5)
    await old.give_back(taken)
    await queue.age("revisions", "r1", LEASE_MS + 1)

    assert ids_of(await new.take()) == [], "no sweep has run since Redis came up, so nobody is judged"
    assert (await queue.producer.status(taken.job_id, "default")).state == "queued"
    await queue.note_sweep()
    assert ids_of(await new.take()) == []

    status = await queue.producer.status(taken.job_id, "default")
    assert status.outcome is not None
    assert (status.state, status.outcome.code, status.num_chunks) == ("failed", "revision_gone", 6)
    (line,) = (vars(record) for record in caplog.records if record.message == "job.ended")
    assert (line["job_id"], line["finish_reason"], line["code"]) == (taken.job_id, "failed", "revision_gone")


async def test_expired_job_is_ended_not_taken(queue: Queue) -> None:
    node = await queue.node()
    expired = await queue.submit(deadline_ms=60_000)
    await queue.change(expired, deadline=await queue.now_ms() - 1)
    other = await queue.submit()

    answer = await node.take()

    assert (ids_of(answer), answer.depth[:3]) == ([other], (0, 0, 0))
    assert await queue.state(expired) == "expired"
    assert await queue.ids("open") == {other}


async def test_job_that_lost_its_last_reader_is_ended_not_taken(queue: Queue) -> None:
    node = await queue.node()
    read, unread = [await queue.submit(background=False, inbox="me") for _ in range(2)]
    for job_id in (read, unread):
        await queue.producer.detach(job_id, "me")
    await queue.change(unread, unread=await queue.now_ms() - 5001)
    await queue.note_sweep()

    assert ids_of(await node.take()) == [read]

    outcome = (await queue.producer.status(unread, "default")).outcome
    assert outcome is not None
    assert (outcome.state, outcome.code) == ("cancelled", "unread")


async def test_job_of_a_dead_reader_is_ended_when_looked_at(queue: Queue) -> None:
    node = await queue.node()
    alone = await queue.submit(background=False, inbox="dead")
    shared = await queue.submit(background=False, inbox="dead")
    await queue.producer.attach(shared, "default", inbox="alive")
    await queue.note_sweep()
    await queue.age("readers", "dead", 30_001)

    assert ids_of(await node.take()) == [shared]

    assert (await queue.producer.status(alone, "default")).state == "cancelled"


async def test_takers_read_request_and_log(queue: Queue) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(one)
    await one.emit(taken, 0, 7)
    await one.give_back(taken)
    again = await two.take_one()

    log = await two.broker.log(again.job_id, again.num_chunks, page=3)

    assert [chunk.index for chunk in log] == list(range(7))
    assert await two.broker.requests([again.job_id]) == [await queue.redis.get(keys.request(again.job_id))]
    assert await two.broker.requests([]) == []
