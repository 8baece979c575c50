"""If Redis loses data or a result expires, there is no error row: the request is submitted again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes.fake_node import FakeNode
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError
from penstock.contract.output import Result
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch
from penstock.queue import keys
from penstock.queue.broker.producer import ProducerBroker
from tests.producer.batch.conftest import completion_row, rows_in, write_rows


def batch_in(tmp_path: Path) -> Batch:
    source = write_rows(tmp_path / "in.jsonl", [completion_row("row")])
    return Batch(str(source), str(tmp_path / "out.jsonl"))


async def test_row_whose_ended_job_redis_lost_is_submitted_again(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, codes = ProducerBroker.result, list[str]()

    async def lose_before_reading(broker: ProducerBroker, job_id: str, tenant: str) -> Result | None:
        if not codes:
            await redis.flushall()
        try:
            return await real(broker, job_id, tenant)
        except NotFoundError as error:
            codes.append(error.code)
            raise

    monkeypatch.setattr(ProducerBroker, "result", lose_before_reading)
    async with FakeNode(redis_url):
        done = await run_batch(redis_url, batch_in(tmp_path))
    assert codes == ["job_not_found"]
    assert (done.num_answered, done.num_failed) == (1, 0)


async def test_row_whose_result_has_expired_is_submitted_once_more(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    """As after a run that fetched a large result and was killed before it wrote the row."""
    batch, ids = batch_in(tmp_path), list[str]()
    async with FakeNode(redis_url):
        for _ in range(3):
            assert (await run_batch(redis_url, batch)).num_answered == 1
            ids += [row["response"]["request_id"] for row in rows_in(Path(batch.output))]
            os.unlink(batch.output)
            if len(ids) == 1:
                await redis.delete(keys.result(ids[0]))
    assert len(set(ids)) == 3, "results that a run has written are freed, so a further run computes them anew"
