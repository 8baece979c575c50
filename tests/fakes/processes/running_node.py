"""A node in the test's own process with an engine that the test passes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock.gpu_node.engine.worker import EngineLike
from penstock.gpu_node.node import Node
from penstock.gpu_node.settings import NodeSettings

PATIENCE_S = 60.0


def node_settings(url: str, *, pool: str, **settings: Any) -> NodeSettings:
    """Return settings of a node with the shortest lease."""
    return NodeSettings(**{"model": "reference", "pool": pool, "redis_url": url, "lease_ms": 3000, **settings})


@asynccontextmanager
async def running_node(url: str, engine: EngineLike, *, pool: str, **settings: Any) -> AsyncIterator[Node]:
    """Run a node while the block runs, then stop it with a drain."""
    node, ready = Node(node_settings(url, pool=pool, **settings), engine), asyncio.Event()
    task = asyncio.create_task(node.run(ready))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
    waiting.cancel()
    try:
        if task.done():
            task.result()
        yield node
    finally:
        node.stop()
        async with asyncio.timeout(PATIENCE_S):
            await task
