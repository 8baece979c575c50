"""emit, finish, give_back: writes count only under the lease, and a repeated one changes nothing."""

from __future__ import annotations

import pytest
from fakes.queue.harness import LEASE_MS, POOL, TENANT, FakeNode, P, Queue, chunks_of, new_job

from penstock.contract.errors import InvariantError
from penstock.contract.output import Outcome, Usage
from penstock.gpu_node.publishing.sending import emit_batches
from penstock.queue import keys
from penstock.queue.broker.node import MAX_EMIT_BYTES, MAX_EMIT_JOBS, Emission, GivenBackJob, Taken
from penstock.queue.results import encode_result


async def test_chunks_are_appended_in_order(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    assert [await node.emit(taken, 0, 2), await node.emit(taken, 2, 1)] == ["OK", "OK"]
    assert await queue.log(taken.job_id) == list(chunks_of(taken.job_id, 0, 3))
    assert [chunk.index for chunk in await queue.producer.log(taken.job_id, 1)] == [1, 2]


async def test_first_token_is_timed_once(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.emit(taken, 0, 0)
    assert (await queue.producer.status(taken.job_id, "default")).first_ms == 0
    await node.emit(taken, 0, 1)
    await queue.change(taken.job_id, first=5)
    await node.emit(taken, 1, 1)
    assert (await queue.producer.status(taken.job_id, "default")).first_ms == 5


async def test_repeated_chunks_are_published_again_but_not_appended(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me")
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))
    chunks = chunks_of(taken.job_id, 0, 5)
    await node.emit(taken, 0, 3)

    assert await node.emit(taken, 0, 3) == "OK"
    assert await node.emit(taken, 1, 4) == "OK"

    assert await queue.log(taken.job_id) == list(chunks)
    assert await inbox.messages() == [b"".join(chunks[:3]), b"".join(chunks[:3]), b"".join(chunks[1:5])]


async def test_gap_is_answered_with_the_needed_index_and_writes_nothing(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me")
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))
    await node.emit(taken, 0, 2)
    await inbox.messages()

    assert await node.emit(taken, 3, 1) == "NEED 2"
    assert await node.finish(taken, 3, 1) == "NEED 2"

    assert len(await queue.log(taken.job_id)) == 2
    assert await inbox.messages() == []
    assert await queue.state(taken.job_id) == "running"
    assert await node.emit(taken, 2, 2) == "OK"


async def test_progress_reaches_inboxes_before_the_chunks_and_is_stored_nowhere(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me", channel=True)
    inbox, channel = (
        await queue.listen(keys.inbox_channel(POOL, "me")),
        await queue.listen(keys.own_channel(taken.job_id, TENANT)),
    )
    chunks = chunks_of(taken.job_id, 0, 1)

    alone = Emission(taken.job_id, taken.lease, 0, (), b"half")
    assert await node.broker.emit([alone]) == ["OK"]
    status = await queue.producer.status(taken.job_id, "default")
    assert (status.first_ms, await queue.log(taken.job_id)) == (0, [])
    assert await node.broker.emit([Emission(taken.job_id, taken.lease, 0, chunks, b"whole")]) == ["OK"]
    lost = Emission(taken.job_id, "another lease", 0, (), b"fenced")
    assert await node.broker.emit([lost]) == ["FENCED"]

    assert await inbox.messages() == [b"half", b"whole" + chunks[0]]
    assert await channel.messages() == [*chunks]
    assert await queue.log(taken.job_id) == [*chunks]


async def test_one_call_serves_many_jobs_and_a_damaged_job_affects_no_other(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit_many(3)
    one, two, three = (await node.take()).jobs
    await queue.redis.delete(keys.log(two.job_id))
    await queue.redis.set(keys.log(two.job_id), "no list")

    answers = await node.broker.emit(
        [
            Emission(one.job_id, one.lease, 0, chunks_of(one.job_id, 0, 2)),
            Emission(two.job_id, two.lease, 0, chunks_of(two.job_id, 0, 1)),
            Emission("m.unknown", "lease", 0, ()),
            Emission(three.job_id, "another lease", 0, chunks_of(three.job_id, 0, 1)),
            Emission(three.job_id, three.lease, 0, chunks_of(three.job_id, 0, 1)),
        ]
    )

    assert answers[0] == answers[4] == "OK"
    assert answers[1].startswith("ERR") and "WRONGTYPE" in answers[1]
    assert answers[2:4] == ["GONE", "FENCED"]
    assert len(await queue.log(one.job_id)) == 2
    assert len(await queue.log(three.job_id)) == 1


def test_emissions_are_split_into_calls_by_jobs_and_by_bytes() -> None:
    small = Emission("m.small", "lease", 0, (b"x",))
    large = Emission("m.large", "lease", 0, (b"x" * (MAX_EMIT_BYTES - 1),))
    assert emit_batches([]) == []
    assert [*map(len, emit_batches([small] * (2 * MAX_EMIT_JOBS + 1)))] == [MAX_EMIT_JOBS, MAX_EMIT_JOBS, 1]
    assert emit_batches([small, large, small, large, large]) == [[small, large], [small, large], [large]]


async def test_thousands_of_chunks_go_in_one_call(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    assert await node.emit(taken, 0, 2500) == "OK"
    assert await node.finish(taken, 2000, 2500) == "OK"
    log = await node.broker.log(taken.job_id, 10_000)
    assert [chunk.index for chunk in log] == list(range(4501))


async def test_emit_counts_as_a_sign_of_life_only_of_a_known_node(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.age("nodes", "n1", LEASE_MS)
    await node.emit(taken, 0, 0)
    assert await queue.redis.zscore(f"{P}:nodes", "n1") == pytest.approx(await queue.now_ms(), abs=1000)

    await queue.redis.zrem(f"{P}:nodes", "n1")
    await node.emit(taken, 0, 0)
    assert await queue.ids("nodes") == set()


async def test_flagged_and_expired_jobs_are_named_after_their_chunks_are_kept(queue: Queue) -> None:
    node = await queue.node()
    await queue.submit(new_job(deadline_ms=60_000))
    await queue.submit(new_job(deadline_ms=60_000))
    cancelled, expired = (await node.take()).jobs
    await queue.producer.cancel(cancelled.job_id, "default")
    await queue.change(expired.job_id, deadline=await queue.now_ms())

    assert await node.emit(cancelled, 0, 1) == "CANCEL"
    assert await node.emit(expired, 0, 1) == "EXPIRED"

    assert len(await queue.log(cancelled.job_id)) == len(await queue.log(expired.job_id)) == 1
    assert await queue.state(cancelled.job_id) == await queue.state(expired.job_id) == "running"


@pytest.mark.parametrize("how", ["swept", "given back", "taken again", "ended"])
async def test_nothing_is_written_after_the_lease_is_lost(queue: Queue, how: str) -> None:
    zombie, other = await queue.node("zombie"), await queue.node("other")
    taken = await queue.running(zombie, inbox="me")
    await zombie.emit(taken, 0, 2)
    await lose(queue, zombie, taken, how)
    if how == "taken again":
        assert (await other.take_one()).job_id == taken.job_id
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))
    before = (await queue.record(taken.job_id), await queue.log(taken.job_id), await queue.keys())

    assert await zombie.emit(taken, 2, 3) == "FENCED"
    assert await zombie.give_back(taken) == "FENCED"
    if how != "ended":
        assert await zombie.finish(taken, 2, 3) == "FENCED"

    assert (await queue.record(taken.job_id), await queue.log(taken.job_id), await queue.keys()) == before
    assert await inbox.messages() == []


async def lose(queue: Queue, node: FakeNode, taken: Taken, how: str) -> None:
    match how:
        case "swept":
            await queue.kill(node)
        case "given back" | "taken again":
            await node.give_back(taken)
        case "ended":
            await node.finish(taken, 2)


async def test_lease_of_another_node_is_no_lease(queue: Queue) -> None:
    one, two = await queue.node("n1"), await queue.node("n2")
    taken = await queue.running(one)
    assert await two.emit(taken, 0, 1) == await two.finish(taken, 0, 1) == await two.give_back(taken) == "FENCED"
    assert await queue.log(taken.job_id) == []


async def test_earlier_lease_of_the_same_node_is_no_lease(queue: Queue) -> None:
    node = await queue.node()
    earlier = await queue.running(node)
    await node.give_back(earlier)
    await queue.change(earlier.job_id, avoid_until=0)
    await node.take_one()
    answers = {await node.emit(earlier, 0, 1), await node.finish(earlier, 0, 1), await node.give_back(earlier)}
    assert answers == {"FENCED"}
    assert await queue.log(earlier.job_id) == []


async def test_finish_keeps_the_last_chunks_the_result_and_the_times(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await node.emit(taken, 0, 2)
    last = Emission(taken.job_id, taken.lease, 1, chunks_of(taken.job_id, 1, 3))
    result = encode_result((), Usage(3, 4), [(0, 1, 3)] * 4)

    assert await node.broker.finish(last, Outcome("succeeded"), result) == "OK"

    stored = await queue.producer.result(taken.job_id, "default")
    assert stored is not None
    assert (stored.outcome, stored.usage, stored.cuts) == (Outcome("succeeded"), Usage(3, 4), ((0, 1, 3),) * 4)
    assert 0 < stored.submitted_ms <= stored.taken_ms <= stored.first_ms <= stored.finished_ms
    log = await queue.producer.log(taken.job_id, 0)
    assert [chunk.index for chunk in log] == [0, 1, 2, 3, 4]
    assert [chunk.outcome for chunk in log] == [None] * 4 + [Outcome("succeeded")]
    assert (await queue.producer.status(taken.job_id, "default")).num_chunks == 5
    assert await queue.ids("open") == await queue.ids("running:n1") == await queue.ids("tenant:default:open") == set()


async def test_repeated_finish_is_answered_ok_and_changes_nothing(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node, inbox="me")
    await node.finish(taken, 0, 2)
    inbox = await queue.listen(keys.inbox_channel(POOL, "me"))
    before = (await queue.record(taken.job_id), await queue.log(taken.job_id))

    assert await node.finish(taken, 0, 2) == "OK"
    assert await node.finish(taken, 0, 2, outcome=Outcome("failed", "late")) == "OK"

    assert (await queue.record(taken.job_id), await queue.log(taken.job_id)) == before
    assert await inbox.messages() == []


async def test_finish_in_no_terminal_state_is_a_bug(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    with pytest.raises(InvariantError, match="BAD_STATE"):
        await node.finish(taken, 0, outcome=Outcome("running"))  # type: ignore[arg-type]
    assert await queue.state(taken.job_id) == "running"


async def test_given_back_job_keeps_its_age_and_gets_its_true_cost(queue: Queue) -> None:
    node, other = await queue.node(), await queue.node("other")
    taken = await queue.running(node, cost=100)
    submitted = (await queue.record(taken.job_id))["submitted"]
    behind = await queue.submit(cost=1)
    await queue.redis.zadd(f"{P}:waiting:1", {behind: int(submitted) + 1})

    assert await node.give_back(taken, cost=130) == "OK"

    assert (await queue.producer.pressure("m")).backlog_cost[:3] == (0, 131, 0)
    assert await queue.keys("requeued:*") == {"requeued:1:default"}
    status = await queue.producer.status(taken.job_id, "default")
    assert (status.state, status.preemptions, status.losses, status.num_waiting_ahead) == ("queued", 1, 0, 0)
    first, second = (await other.take()).jobs
    assert (first.job_id, first.cost, second.job_id) == (taken.job_id, 130, behind)
    assert first.lease != taken.lease
    assert await queue.keys("requeued:*") == set()


async def test_giving_back_ends_what_may_not_run_any_more(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.producer.cancel(taken.job_id, "default")
    assert await node.give_back(taken) == "OK"
    assert await queue.state(taken.job_id) == "cancelled"
    assert await queue.ids("open") == await queue.ids("waiting:1") == set()


async def test_many_jobs_are_given_back_in_bounded_calls(queue: Queue) -> None:
    node = await queue.node()
    for _ in range(140):
        await queue.submit(cost=1)
    taken = (*(await node.take()).jobs, *(await node.take()).jobs)
    returns = [GivenBackJob(job.job_id, job.lease, 1, 1) for job in (*taken, taken[0])]
    answers = await node.broker.give_back(returns)
    assert answers == ["OK"] * 140 + ["FENCED"]
    assert len(await queue.ids("waiting:1")) == 140


async def test_everything_is_gone_when_redis_lost_all(queue: Queue) -> None:
    node = await queue.node()
    taken = await queue.running(node)
    await queue.redis.flushdb()
    assert await node.emit(taken, 0, 1) == await node.finish(taken, 0, 1) == await node.give_back(taken) == "GONE"
    assert await queue.redis.dbsize() == 0
