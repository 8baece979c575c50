"""`penstock top` shows how far open batches, flows and tags are, how fast, and when they will end."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from fakes.command import run_command
from fakes.queue.harness import POOL, Queue
from redis.asyncio import Redis

from penstock.cli.top.reader import TopReader
from penstock.cli.top.sets import MAX_BATCHES, SetReader
from penstock.contract.job_actions import JobChange, JobFilter
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.pools import ActivityBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.broker.steering import BulkRequest, Steering
from penstock.queue.files.batch import FLOW_ENDPOINT, BatchSpec
from penstock.queue.files.batch_records import BatchRecords
from tests.queue.files.test_batch_records import commit, stored_file, taken


async def test_a_view_has_open_batches_flows_and_the_tag_that_it_is_asked_for(redis: Redis, redis_url: str) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    await node.finish(await queue.running(node, tags=("run:7",)), 0, 3)
    await queue.submit(tags=("run:7",))
    batches, lease = await taken(redis, num_rows=20)
    await commit(batches, lease, 0, range(5))
    lease.rows_per_s = 2.5
    await batches.keep([lease], 6.0, 0.0)
    flow = BatchSpec(await stored_file(redis), FLOW_ENDPOINT, "24h")
    await batches.create("batch_flow", "ann", flow, window_ms=10**6, max_open=0)
    actions = Steering(redis)
    jobs = BulkRequest(JobChange("cancel"), JobFilter(tag="run:7"), Terms())
    await actions.create(POOL, "a" * 32, "ann", jobs, is_dry_run=False)
    shown = (await asyncio.to_thread(run_command, "top", "--once", "--tag", "run:7", "--redis-url", redis_url)).stdout
    assert re.search(r"set +tenant +ended +of +failed +rate/s +ends", shown)
    assert re.search(r"tag run:7 +default +1 +2 +0 ", shown)
    assert re.search(rf"batch \w+…\w*{lease.batch_id[-8:]} +ann +5 +20 +0 +2\.5 +\d\d:\d\d:\d\d", shown), shown
    assert re.search(r"bulk a+…a+ +ann +0 +1 +0 +– +–", shown), shown
    assert re.search(r"flow batch_flow +ann +0 +0 +0 +– +–", shown)


async def test_the_batches_with_the_most_rows_left_are_shown_and_the_others_counted(redis: Redis) -> None:
    batches = BatchRecords(redis)
    spec = BatchSpec(await stored_file(redis), FLOW_ENDPOINT, "24h")
    for number in range(MAX_BATCHES + 3):
        await batches.create(f"batch_{number}", "ann", spec, window_ms=10**6, max_open=0)
        await set_rows(redis, f"batch_{number}", 10 * number)
    top = TopReader(ActivityBroker(redis), ProducerBroker(redis))
    frame = await SetReader(top, batches, Steering(redis), None, ()).read()
    assert [row.counts.total for row in frame.sets] == [10 * number for number in range(MAX_BATCHES + 2, 2, -1)]
    found = frame.as_json()
    assert (found["num_batches_left_out"], found["sets"][0]["kind"], found["sets"][0]["open"]) == (3, "flow", 100)


async def set_rows(redis: Any, batch_id: str, num_rows: int) -> None:
    await redis.hset(keys.batch(batch_id), "total", num_rows)
