"""Redis starts again with another clock, as after a fail-over to another machine: streams and deadlines go on.

The scripts' part is tested piece by piece in tests/queue/scripts/test_pool_clock.py, without libfaketime.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from faults.tools.redis_process import RedisProcess, find_libfaketime
from faults.tools.road import POOL, QUICK, all_ended, new_works, read, served, under_way
from faults.tools.work import PROMPT, check_settled, new_work

from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.connection import connect

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_libfaketime() is None, reason="libfaketime is not installed (Debian's libfaketime)"),
]


@pytest.mark.parametrize(
    "clock_s", [-600, 600, pytest.param(-3, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
async def test_streams_and_deadlines_go_on_when_redis_starts_with_another_clock(tmp_path: Path, clock_s: int) -> None:
    works = new_works(100)
    with RedisProcess(tmp_path / "redis") as server:
        async with served(server.url), AsyncClient(server.url, settings=QUICK) as client:
            later = new_work(POOL, 1, not_before_s=300, deadline_s=500, needs_reader=False)
            await client.submit_unread(PROMPT, **later.options)
            reading = await under_way(client, works, works[0])
            server.kill()
            server.clock_s = clock_s
            await asyncio.to_thread(server.start)
            new = new_work(POOL, 10, deadline_s=60)
            await asyncio.gather(*reading, read(client, new))
            async with connect(server.url) as redis:
                await all_ended(redis, [*works, new])
                assert (await client.status(later.id)).state == "scheduled"
                assert await client.cancel(later.id) == "cancelled"
                seconds, _ = await redis.time()
                assert seconds == pytest.approx(time.time() + clock_s, abs=2)
                events = await redis.zrange(keys.events(POOL, "node_"), 0, -1)
                assert [event for event in events if b"node_lost" in event] == []
                ahead_s = int(await cast(Any, redis.hget(keys.config(POOL), "ahead_ms")) or 0) / 1000
        # A jump forward by less than half a lease may be no gap: then the pool's clock takes part in it.
        assert ahead_s == pytest.approx(-clock_s, abs=1.5) or (clock_s == 3 and ahead_s == pytest.approx(0, abs=1.5))
        async with connect(server.url) as redis:
            await check_settled(redis, POOL)
