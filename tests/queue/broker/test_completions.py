"""A tenant's completions: each end of a job once, cursors across trims and losses, and what is kept."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgpack
import pytest
from fakes.queue.harness import CONFIG, POOL, RECORD, TENANT, FakeNode, P, Queue, new_id, new_job

from penstock.contract.errors import RequestError
from penstock.contract.output import Outcome, TerminalState
from penstock.contract.tasks import Tokenize
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.completions import (
    MAX_CURSOR_CHARS,
    MAX_CURSOR_POOLS,
    Completion,
    CompletionBroker,
    CompletionCursor,
    CompletionGap,
    FeedEvent,
    FeedPosition,
)
from penstock.queue.broker.node import NodeBroker

BEGIN = CompletionCursor(TENANT)
FEED = keys.ended(POOL, TENANT)


async def follow(
    queue: Queue, cursor: CompletionCursor = BEGIN, pools: Sequence[str] = (POOL,), count: int = 500
) -> list[FeedEvent]:
    """Return all that follows a cursor, read in pages. A reader's cursor travels as text."""
    broker, events = CompletionBroker(queue.redis), list[FeedEvent]()
    while (page := await broker.page(cursor, pools, count)).events:
        events += page.events
        cursor = CompletionCursor.parse(str(page.cursor), TENANT, cursor.pool)
    return events


def ids(events: Sequence[FeedEvent]) -> list[str]:
    return [event.item.job_id for event in events if isinstance(event.item, Completion)]


def gaps(events: Sequence[FeedEvent]) -> list[str]:
    return [event.item.reason for event in events if isinstance(event.item, CompletionGap)]


async def end(queue: Queue, node: FakeNode, state: TerminalState = "succeeded", **fields: Any) -> str:
    taken = await queue.running(node, **fields)
    await node.finish(taken, 0, 1, outcome=Outcome(state))
    return taken.job_id


async def ends(queue: Queue, node: FakeNode, count: int) -> list[str]:
    return [await end(queue, node) for _ in range(count)]


async def test_every_end_of_a_job_is_one_completion(queue: Queue) -> None:
    node = await queue.node(max_losses=1)
    done = await queue.running(node)
    await queue.change(done.job_id, tag1="red", tag2="green", extra=9)
    for _ in range(2):
        assert await node.finish(done, 0, 1) == "OK"
    cancelled = await queue.submit()
    await queue.producer.cancel(cancelled, TENANT)
    failed = await end(queue, node, "failed")
    expired = await queue.submit(deadline_ms=1000)
    await queue.redis.zadd(f"{P}:deadlines", {expired: 1})
    await queue.change(expired, deadline=1)
    await queue.sweep()
    dead = await queue.running(node)
    await queue.kill(node)

    found = await follow(queue)
    assert [(event.item.job_id, event.item.state) for event in found if isinstance(event.item, Completion)] == [
        (done.job_id, "succeeded"),
        (cancelled, "cancelled"),
        (failed, "failed"),
        (expired, "expired"),
        (dead.job_id, "dead"),
    ]
    first = found[0].item
    assert isinstance(first, Completion) and first.tags == ("red", "green") and first.pool == POOL
    finished_ms = int((await queue.record(done.job_id))["finished"])
    assert 0 <= first.finished_ms - finished_ms < 1000
    kept, following = await CompletionBroker(queue.redis).kept(TENANT, POOL, None, 10)
    assert following is None
    assert {(one.job_id, one.state, one.tags) for one in kept} == {
        (event.item.job_id, event.item.state, event.item.tags) for event in found if isinstance(event.item, Completion)
    }


async def test_tasks_and_jobs_that_ask_for_it_are_no_completions(queue: Queue) -> None:
    node = await queue.node()
    task = await queue.running(node, task=Tokenize())
    await node.finish(task, 0, 0)
    row = await end(queue, node, in_feed=False)
    other = await end(queue, node, tenant="rival")
    mine = await end(queue, node)
    assert ids(await follow(queue)) == [mine]
    kept, _ = await CompletionBroker(queue.redis).kept(TENANT, POOL, None, 10)
    assert [one.job_id for one in kept] == [mine]
    states = await CompletionBroker(queue.redis).states(TENANT, [task.job_id, row, other, new_id()])
    assert states == ["succeeded", "succeeded", None, None]


async def test_a_cursor_taken_before_continues_after_any_completion(queue: Queue) -> None:
    node = await queue.node()
    broker = CompletionBroker(queue.redis)
    empty = await broker.cursor(TENANT, [POOL])
    before = await ends(queue, node, 2)
    cursor = await broker.cursor(TENANT, [POOL])
    after = await ends(queue, node, 5)
    assert ids(await follow(queue, empty)) == [*before, *after]
    assert ids(await follow(queue, cursor, count=2)) == after
    events = await follow(queue, cursor)
    for at, event in enumerate(events):
        again = CompletionCursor.parse(str(event.cursor), TENANT)
        assert ids(await follow(queue, again)) == after[at + 1 :]
    assert gaps(await follow(queue, empty)) == []


async def test_a_pool_that_appears_later_is_read_from_its_first_completion(queue: Queue) -> None:
    node = await queue.node()
    first = await end(queue, node)
    (event,) = await follow(queue)
    other = FakeNode(queue.redis, "n2", "r1")
    other.broker = NodeBroker(queue.redis, "other", "n2", "r1")
    await other.broker.join(CONFIG, replace(RECORD, pool="other"))
    job_id = await queue.submit(new_job(new_id("other")))
    taken = await other.take_one()
    await other.finish(taken, 0, 1)
    found = await follow(queue, event.cursor, (POOL, "other"))
    assert ids(found) == [job_id]
    last = await end(queue, node)
    assert ids(await follow(queue, found[0].cursor, (POOL, "other"))) == [last]
    assert sorted(ids(await follow(queue, BEGIN, (POOL, "other")))) == sorted([first, job_id, last])


async def test_a_reader_behind_what_is_kept_is_told_once_and_continues(queue: Queue) -> None:
    node = await queue.node()
    broker = CompletionBroker(queue.redis)
    start = await broker.cursor(TENANT, [POOL])
    all_ids = await ends(queue, node, 6)
    cursor = (await follow(queue, start))[1].cursor
    await queue.redis.xtrim(FEED, maxlen=3, approximate=False)
    for known in (start, cursor):
        found = await follow(queue, known)
        assert (gaps(found), ids(found)) == (["trimmed"], all_ids[3:])
        gap = found[0].item
        assert isinstance(gap, CompletionGap)
        until = cast(Any, found[1].item).finished_ms
        assert (gap.pool, gap.from_ms, gap.until_ms) == (POOL, known.positions[POOL].entry.ms, until)
    assert gaps(await follow(queue, (await follow(queue, start))[-1].cursor)) == []


async def test_completions_expire_with_the_records_and_their_last_one_stays_a_cursor(queue: Queue) -> None:
    node = await queue.node()
    broker = CompletionBroker(queue.redis)
    start = await broker.cursor(TENANT, [POOL])
    old = await ends(queue, node, 3)
    found = await follow(queue, start)
    assert ids(found) == old
    await queue.redis.hset(keys.config(POOL), "result_ttl_ms", 0)
    await asyncio.sleep(0.005)
    await queue.redis.zadd(f"{P}:ended", {TENANT: 1})
    await queue.sweep()
    assert not await queue.keys("ended:*") and await queue.ids("ended") == set()
    await queue.redis.hset(keys.config(POOL), "result_ttl_ms", 86_400_000)
    assert [f for f in await audit(AdminBroker(queue.redis), POOL) if f.key == "ended"] == []

    last, earlier = found[-1].cursor, found[0].cursor
    assert str(await broker.cursor(TENANT, [POOL])) == str(last)
    assert (gaps(await follow(queue, last)), gaps(await follow(queue, earlier))) == ([], ["trimmed"])
    assert gaps(await follow(queue, start)) == ["trimmed"]
    new = await end(queue, node)
    for known, told in ((last, []), (earlier, ["trimmed"]), (start, ["trimmed"])):
        events = await follow(queue, known)
        assert (gaps(events), ids(events)) == (told, [new])


async def test_a_sweep_trims_what_is_older_than_records(queue: Queue) -> None:
    node = await queue.node()
    now_ms = await queue.now_ms()
    for number in range(1000):
        await queue.redis.xadd(FEED, {"j": f"old-{number} succeeded"}, id=f"{now_ms - 90_000_000 + number}-0")
    recent = await end(queue, node)
    await queue.redis.zadd(f"{P}:ended", {TENANT: 1})
    await queue.sweep()
    # Whole nodes of the stream are dropped, so a few older entries may stay.
    assert 1 <= await queue.redis.xlen(FEED) < 300
    next_ms = await queue.redis.zscore(f"{P}:ended", TENANT)
    assert next_ms is not None and next_ms >= now_ms + 10_000
    assert ids(await follow(queue))[-1] == recent


async def test_the_number_of_completions_is_bounded(queue: Queue) -> None:
    node = await queue.node()
    first = await end(queue, node)
    fill = "for i = 1, 210000 do redis.call('XADD', KEYS[1], '*', 'j', ARGV[1]) end"
    await queue.redis.eval(fill, 1, FEED, f"{first.partition('.')[2]} succeeded")
    last = await end(queue, node)
    assert 200_000 <= await queue.redis.xlen(FEED) < 200_500
    newest: Any = await queue.redis.xrevrange(FEED, count=1)
    assert newest[0][1][b"j"].decode() == f"{last.partition('.')[2]} succeeded"
    assert (await queue.redis.memory_usage(FEED, samples=0) or 0) < 100 * 200_000


async def test_a_flushed_redis_is_told_once_its_pool_is_back(queue: Queue) -> None:
    node = await queue.node()
    broker = CompletionBroker(queue.redis)
    none_yet = await broker.cursor(TENANT, [POOL])
    await ends(queue, node, 2)
    last = (await follow(queue))[-1].cursor
    await queue.redis.flushall()
    assert await follow(queue, last) == []
    node = await queue.node("n2")
    new = await ends(queue, node, 2)
    for known in (none_yet, last):
        found = await follow(queue, known)
        assert (gaps(found), ids(found)) == (["lost"], new)
    assert gaps(await follow(queue, found[-1].cursor)) == []


async def test_lost_writes_are_told_and_the_last_minute_comes_again(queue: Queue) -> None:
    node = await queue.node()
    now_ms = await queue.now_ms()
    for age_ms in (300_000, 200_000, 50_000):
        await queue.redis.xadd(FEED, {"j": f"{age_ms} succeeded", "after": "0-0"}, id=f"{now_ms - age_ms}-0")
    lost = await end(queue, node)
    cursor = (await follow(queue))[-1].cursor
    newest: Any = await queue.redis.xrevrange(FEED, count=1)
    await queue.redis.xdel(FEED, newest[0][0])
    assert (found := await follow(queue, cursor)) and gaps(found) == ["lost"]
    assert ids(found) == [f"{POOL}.50000"]
    new = await end(queue, node)
    found = await follow(queue, cursor)
    assert (gaps(found), ids(found)) == (["lost"], [f"{POOL}.50000", new])
    assert lost not in ids(found)
    assert await follow(queue, found[-1].cursor) == []

    await queue.redis.delete(FEED)
    found = await follow(queue, cursor)
    assert (gaps(found), ids(found)) == (["lost"], [])
    assert await follow(queue, found[-1].cursor) == []


async def test_a_damaged_list_of_completions_keeps_no_job_from_ending(queue: Queue) -> None:
    node = await queue.node()
    await queue.redis.set(FEED, "damaged")
    job_id = await end(queue, node)
    assert await queue.state(job_id) == "succeeded"
    await queue.redis.zadd(f"{P}:ended", {TENANT: 1})
    await queue.sweep()
    after = await end(queue, node)
    assert ids(await follow(queue)) == [after]


async def test_the_audit_compares_lists_of_completions_with_their_index(queue: Queue) -> None:
    node = await queue.node()
    await end(queue, node)
    await queue.redis.zrem(f"{P}:ended", TENANT)
    await queue.redis.zadd(f"{P}:ended", {"gone": 1})
    broker = AdminBroker(queue.redis)
    for expected in ([("missing", TENANT), ("stray", "gone")], []):
        found = [f for f in await audit(broker, POOL, repair=True) if f.key == "ended"]
        assert [(f.name, f.subject) for f in found] == expected
    assert await queue.ids("ended") == {TENANT}


async def test_forgetting_a_pool_removes_its_completions(queue: Queue) -> None:
    node = await queue.node()
    await end(queue, node)
    await node.broker.leave()
    await AdminBroker(queue.redis).forget(POOL)
    assert not await queue.keys("ended*")


def encoded(*values: Any) -> str:
    return base64.urlsafe_b64encode(msgpack.packb(values)).decode().rstrip("=")


DIGEST = msgpack.unpackb(base64.urlsafe_b64decode(str(BEGIN) + "=="))[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "x" * 50,
        "ä",
        "a b",
        "A" * (MAX_CURSOR_CHARS + 4),
        encoded(2, DIGEST, "", []),
        encoded(1, DIGEST, 7, []),
        encoded(1, DIGEST, "", 7),
        encoded(1, DIGEST, "", [["m", 1, 2]]),
        encoded(1, DIGEST, "", [["m", 1, 2, -1]]),
        encoded(1, DIGEST, "", [["m", 1, 2, 1 << 63]]),
        encoded(1, DIGEST, "", [["m", 1.5, 2, 3]]),
        encoded(1, DIGEST, "", [["no name", 1, 2, 3]]),
        encoded(1, DIGEST, "", [[b"m", 1, 2, 3]]),
        encoded(1, DIGEST, "", [[f"m{i}", 1, 2, 3] for i in range(MAX_CURSOR_POOLS + 1)]),
        encoded(1, msgpack.ExtType(1, b"x"), "", []),
    ],
)
def test_what_is_no_cursor_is_refused_with_field_and_limit(text: str) -> None:
    with pytest.raises(RequestError, match=f"after: not a cursor .* at most {MAX_CURSOR_CHARS} characters") as caught:
        CompletionCursor.parse(text, TENANT)
    assert caught.value.param == "after"


def test_a_cursor_belongs_to_its_tenant_and_pool() -> None:
    known = BEGIN.moved(POOL, FeedPosition(7)).moved("other", FeedPosition(8))
    assert CompletionCursor.parse(str(known), TENANT) == known
    assert CompletionCursor.parse(str(known), TENANT, POOL) == CompletionCursor(TENANT, POOL, {POOL: FeedPosition(7)})
    with pytest.raises(RequestError, match="after: this cursor belongs to another tenant") as caught:
        CompletionCursor.parse(str(known), "rival")
    assert caught.value.param == "after"
    of_pool = str(CompletionCursor(TENANT, POOL))
    for pool in (None, "other"):
        with pytest.raises(RequestError, match=f"after: this cursor belongs to pool '{POOL}' alone"):
            CompletionCursor.parse(of_pool, TENANT, pool)


def test_a_cursor_of_many_pools_names_those_with_completions() -> None:
    many = {f"p{i}": FeedPosition(1) for i in range(300)}
    cursor = CompletionCursor(TENANT, None, many)
    assert CompletionCursor.parse(str(cursor), TENANT).positions == {}
    full = CompletionCursor(
        TENANT, None, {name: FeedPosition(1, one.entry._replace(ms=5)) for name, one in many.items()}
    )
    with pytest.raises(RequestError, match=f"300 pools; name one, or use at most {MAX_CURSOR_POOLS}") as caught:
        str(full)
    assert caught.value.param == "pool"
    longest = {f"{'m' * 60}{i:04}~9999": FeedPosition((1 << 63) - 1, full.positions["p1"].entry) for i in range(128)}
    assert len(str(CompletionCursor(TENANT, "x", longest))) <= MAX_CURSOR_CHARS
