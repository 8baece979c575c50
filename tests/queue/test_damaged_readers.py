"""Damaged records and keys beside everything that reads them: each reader answers, and a damaged record is named.

By script: each field, member and key × each way of `fakes.queue.damage_cells`. `make check-full` does all of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes.queue.damage_cells import Cell, Snapshot
from fakes.queue.harness import POOL, P, Queue
from redis.asyncio import Redis

from penstock.cli.top.reader import TopReader
from penstock.contract.errors import DamagedRecordError, NotFoundError, PenstockError
from penstock.contract.job_actions import JobChange, JobFilter
from penstock.contract.tenant import Terms
from penstock.contract.usage import UsageQuery
from penstock.contract.webhook import WebhookEndpoint, WebhookSecrets, new_secret
from penstock.queue import keys
from penstock.queue.broker.completions import CompletionBroker
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.node import config_of_pool
from penstock.queue.broker.pools import ActivityBroker, StatsBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.broker.steering import BulkRequest, Steering, report_of
from penstock.queue.broker.usage import UsageBroker
from penstock.queue.files.batch import BatchSpec, new_batch_id
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import FileRecords, NewFile, new_file_id
from penstock.queue.files.records_audit import audit_files, contents_of
from penstock.queue.webhooks.deliveries import DeliveryQueue, EndpointStore, WebhookEvent
from tests.queue.broker.test_audit import Scene

NUM_PARTS = 25
DAY_MS = 86_400_000
F = keys.prefix(keys.FILES)
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))]
_OF_BULKS = (
    b"request",
    b"begun",
    b"cursor",
    b"dry_run",
    b"changed",
    b"failed",
    b"failures",
    b"tenant",
    b"already_over",
    b"asked_to_stop",
)
Work = Callable[[], Awaitable[Any]]


async def problem_of(*works: Work, named: type[PenstockError] | tuple[type[PenstockError], ...]) -> str:
    """Return what goes wrong in any of these, but for errors that name the damaged object."""
    for work in works:
        try:
            await work()
        except named:
            continue
        except Exception as error:
            return repr(error)
    return ""


async def wrong_cells(snapshot: Snapshot, part: int, check: Callable[[Cell], Awaitable[str]]) -> list[str]:
    found = []
    for cell in list(snapshot.cells())[part::NUM_PARTS]:
        snapshot.restore()
        snapshot.damage(cell)
        if problem := await check(cell):
            found.append(f"{cell}: {problem}"[:300])
    return found


@pytest.mark.parametrize("part", PARTS)
async def test_readers_of_a_pool_leave_damage_out(queue: Queue, redis_url: str, part: int) -> None:
    redis = queue.redis
    scene = await Scene(queue, await queue.node()).fill()
    steering, bulk = Steering(redis), "bulk_1"
    await steering.pause(POOL, ["tenant:acme", "level:4"], on=True)
    change = BulkRequest(JobChange.of({"action": "cancel"}), JobFilter(POOL), Terms())
    await steering.create(POOL, bulk, "acme", change, is_dry_run=True)
    producer, completions = ProducerBroker(redis), CompletionBroker(redis)
    top = TopReader(ActivityBroker(redis), producer)
    cursor = (await completions.page(await completions.cursor("acme", [POOL]), [POOL])).cursor

    async def claimed() -> None:
        await steering.claim(POOL, bulk, "one")
        report_of(bulk, await steering.parts_of(bulk), None)

    works: list[Work] = [
        producer.pools,
        top.read,
        StatsBroker(redis).all,
        UsageBroker(redis).kept,
        claimed,
        lambda: producer.pressure(POOL),
        lambda: UsageBroker(redis).page(UsageQuery("day", None, None, None, None, None, None)),
        lambda: UsageBroker(redis).page(UsageQuery("hour", None, None, None, None, "default", "")),
        lambda: JobLists(redis).page(JobFilter(POOL)),
        lambda: completions.page(cursor, [POOL]),
        lambda: completions.cursor("default", [POOL]),
        lambda: completions.kept("default", POOL, None, 10),
        lambda: completions.states("acme", [scene.queued, scene.done]),
        lambda: steering.paused([POOL]),
        lambda: steering.open_bulks(POOL),
        lambda: config_of_pool(redis, POOL),
    ]

    async def check(_: Cell) -> str:
        return await problem_of(*works, named=(DamagedRecordError, NotFoundError))

    with Snapshot(redis_url, P, keys.POOLS) as snapshot:
        # Scripts read these, and the lists of jobs: tests/queue/test_damaged_records.py.
        own = (b":config", b":job:", b":jobs:", b":tagged:", b":bulk:")
        cells = list(snapshot.cells())
        kept = [one for one in cells if one.field in _OF_BULKS or not any(name in one.key for name in own)]
        snapshot.cells = lambda: iter(kept)  # type: ignore[method-assign]
        assert not (wrong := await wrong_cells(snapshot, part, check)), "\n".join(wrong)


async def new_file(redis: Redis, tenant: str, key: str | None = None) -> str:
    files, file_id = FileRecords(redis), new_file_id()
    await files.begin_upload(file_id, tenant, 10)
    return await files.save(NewFile(file_id, "rows.jsonl", "batch", 10, DAY_MS), tenant, idempotency_key=key)


@pytest.mark.parametrize("part", PARTS)
async def test_files_and_batches_of_others_go_on(redis: Redis, redis_url: str, part: int) -> None:
    files, batches = FileRecords(redis), BatchRecords(redis)
    ids = {tenant: await new_file(redis, tenant, "a key") for tenant in ("ann", "bob")}
    await files.begin_upload(new_file_id(), "ann", 5)
    made = {}
    for name in ("ann ended", "ann", "bob"):
        spec = BatchSpec(ids[name.partition(" ")[0]], "/v1/chat/completions", "24h")
        made[name] = await batches.create(
            new_batch_id(), name.partition(" ")[0], spec, window_ms=DAY_MS, max_open=9, key=name
        )
        if name.endswith("ended"):
            (lease,), _ = await batches.take(5, 6.0, 0.0)
            await batches.fail(lease, [], DAY_MS)

    async def bob_goes_on() -> None:
        leases, _ = await batches.take(5, 6.0, 0.0)
        mine = [lease for lease in leases if lease.batch_id == made["bob"]]
        await batches.start(mine[0], 3, 100)
        await batches.keep(leases, 6.0, 0.0)
        await files.expire(10)
        another = await new_file(redis, "bob")
        assert {ids["bob"], another} <= {one.file_id for one in await files.several([ids["bob"], another], "bob")}
        assert (await batches.find(made["bob"], "bob")).status == "in_progress"
        assert {made["bob"]} <= {one.batch_id for one in await batches.several([*made.values()])}
        await files.delete(another, "bob")

    works: list[Work] = [
        lambda: files.find(ids["ann"], "ann"),
        lambda: files.several([*ids.values()], "ann"),
        lambda: files.ids("ann", newest_first=True),
        lambda: batches.find(made["ann"], "ann"),
        lambda: batches.ids("ann"),
        lambda: batches.parts(made["ann"]),
        lambda: files.held_by("ann"),
        lambda: contents_of(redis),
        batches.num_rows_left,
    ]

    async def check(cell: Cell) -> str:
        is_bobs = any(one.encode() in cell.key for one in (ids["bob"], made["bob"], "bob"))
        is_list = (
            cell.key.endswith(b":open_batches") and cell.way == "wrong type"
        )  # `--repair` lists the batches again.
        problem = "" if is_bobs or is_list or cell.way == "absent" else await problem_of(bob_goes_on, named=())
        problem = problem or await problem_of(*works, named=(DamagedRecordError, NotFoundError))
        if problem:
            return problem
        await audit_files(redis)
        await audit_files(redis, repair=True)
        left = await audit_files(redis) or []
        return str([one for one in left if one.name != "lost_field"] or "")

    with Snapshot(redis_url, F) as snapshot:
        assert not (wrong := await wrong_cells(snapshot, part, check)), "\n".join(wrong)


@pytest.mark.parametrize("part", PARTS)
async def test_webhooks_of_others_are_delivered(redis: Redis, redis_url: str, part: int) -> None:
    store, queue = EndpointStore(redis), DeliveryQueue(redis)
    names = {"ann": "we_" + "a" * 16, "bob": "we_" + "b" * 16}
    for tenant, name in names.items():
        fields = {"id": name, "tenant": tenant, "name": "x", "url": "https://a.example", "event_types": ["job.failed"]}
        await store.create(WebhookEndpoint.model_validate(fields), WebhookSecrets(secret=new_secret()))

    async def event_of(tenant: str, number: int) -> str:
        event = WebhookEvent("job.failed", f"{POOL}.{number}", tenant, 1, (names[tenant],))
        await queue.record(event)
        return event.event_id

    events = [await event_of("ann", number) for number in range(3)]
    await queue.end_attempt((await queue.take(1, 9, 1000))[0], "dead", "status 500")
    await queue.end_attempt((await queue.take(1, 9, 1000))[0], "delivered", "status 200")

    async def bob_is_served() -> None:
        event_id = await event_of("bob", 1)
        taken = [one for one in await queue.take(20, 9, 1000) if one.endpoint.tenant == "bob"]
        assert [one.event_id for one in taken] == [event_id]
        assert await store.secrets_of([names["bob"]])
        assert await queue.end_attempt(taken[0], "delivered", "status 200")
        assert [one.state for one in (await queue.page(names["bob"], "delivered", None, 9)).deliveries] == ["delivered"]
        assert [one.id for one in await store.of("bob")] == [names["bob"]]

    works: list[Work] = [
        lambda: store.of("ann"),
        lambda: store.get(names["ann"], "ann"),
        lambda: store.known_of([*names.values()]),
        lambda: store.secrets_of([*names.values()]),
        *(lambda state=state: queue.page(names["ann"], state, None, 9) for state in ("pending", "delivered", "dead")),
        *(lambda one=one: queue.get(names["ann"], one) for one in events),
        lambda: queue.again(names["ann"], events),
        lambda: queue.take(20, 9, 1000),
        queue.stats,
    ]

    async def check(cell: Cell) -> str:
        is_all = cell.field is None or cell.way == "wrong type"
        is_bobs = any(one.encode() in (cell.field or b"") + cell.key for one in (names["bob"], "bob"))
        problem = "" if is_bobs or is_all else await problem_of(bob_is_served, named=())
        return problem or await problem_of(*works, named=(DamagedRecordError, NotFoundError))

    with Snapshot(redis_url, keys.WEBHOOKS, keys.WEBHOOK_SECRETS) as snapshot:
        assert not (wrong := await wrong_cells(snapshot, part, check)), "\n".join(wrong)
