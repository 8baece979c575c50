"""The adapters that a node announces, and how often it checks them."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.queue.broker.producer import ProducerBroker

POOL = "m"


class Adapted(ReferenceEngine):
    """An engine that lists the adapters that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.num_looks = 0

    def adapters(self) -> dict[str, str]:
        self.num_looks += 1
        return dict(self.found)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gpu_node.node.ANNOUNCE_S", 0.01)


async def until_served(broker: ProducerBroker, adapters: set[str]) -> None:
    await until(broker.pools, lambda seen: set(seen[POOL].adapters) == adapters)


async def test_adapters_added_to_or_removed_from_the_folder_are_announced(
    redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    engine, broker = Adapted(), ProducerBroker(redis)
    async with running_node(redis_url, engine, pool=POOL, lora_dir=tmp_path):
        for found in ({"sql"}, {"sql", "law"}, {"law"}, set()):
            engine.found = dict.fromkeys(found, "0" * 32)
            await until_served(broker, found)


async def test_node_without_adapters_scans_no_folder(redis_url: str, tmp_path: Path) -> None:
    looking, plain = Adapted(), Adapted()
    async with (
        running_node(redis_url, plain, pool=POOL),
        running_node(redis_url, looking, pool=POOL, lora_dir=tmp_path),
    ):
        await until(lambda: looking.num_looks >= 5)
        assert plain.num_looks == 1
