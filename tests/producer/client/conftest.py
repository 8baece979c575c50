"""A client and a fake node on a real Redis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from fakes.fake_node import FakeNode

from penstock.producer.client import AsyncClient, ClientSettings

QUICK = ClientSettings(echo_interval_s=0.1, silent_after_s=0.4, reader_heartbeat_interval_s=0.2, outage_s=5.0)


@contextmanager
def node_on_thread(redis_url: str, step_s: float = 0.002) -> Iterator[FakeNode]:
    """Run a fake node on a thread of its own, for synchronous tests."""
    started, stop = threading.Event(), threading.Event()
    nodes: list[FakeNode] = []

    async def serve() -> None:
        async with FakeNode(redis_url, step_s=step_s) as node:
            nodes.append(node)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait()
    try:
        yield nodes[0]
    finally:
        stop.set()
        thread.join()


@pytest.fixture
async def node(redis_url: str) -> AsyncIterator[FakeNode]:
    """A node that takes jobs and steps by itself."""
    async with FakeNode(redis_url) as node:
        yield node


@pytest.fixture
async def told_node(redis_url: str) -> AsyncIterator[FakeNode]:
    """A node that acts only when the test calls it. Its logs expire soon."""
    async with FakeNode(redis_url, auto=False, log_ttl_ms=300) as node:
        yield node


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    """A client with the default timeouts."""
    async with AsyncClient(redis_url) as client:
        yield client


@pytest.fixture
async def quick_client(redis_url: str) -> AsyncIterator[AsyncClient]:
    """A client with short timeouts, which detects failures soon."""
    async with AsyncClient(redis_url, settings=QUICK) as client:
        yield client
