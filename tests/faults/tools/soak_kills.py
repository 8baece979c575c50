"""The soak's faults, one at a time: nodes, gateways and Redis are killed, paused or drained."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fakes.processes.child_process import ChildProcess
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.report import Measurement

LEASE_S = 3.0
STEP_S = 0.02
TTL_MS = 180_000
"""Of logs, results and keys: short, so that Redis's memory comes to rest."""


class Fleet:
    """Redis, nodes and gateways. A process that ends is replaced."""

    def __init__(
        self,
        redis: RedisProcess,
        pool: str,
        *,
        num_nodes: int,
        num_gateways: int,
        keeps_ports: bool = False,
        **of_nodes: Any,
    ) -> None:
        """`keeps_ports`: a gateway gets the port of the one that it replaces. `of_nodes`: further settings of nodes."""
        self.redis = redis
        self._of_nodes = {"step_s": STEP_S, "max_num_seqs": 32, **of_nodes}
        self._ports = [free_port() if keeps_ports else 0 for _ in range(num_gateways)]
        self._pool = pool
        self._num_started = 0
        self.nodes: list[NodeProcess] = []
        self.gateways: list[GatewayProcess] = []
        self._sizes = (num_nodes, num_gateways)

    async def start(self) -> None:
        """Start all processes."""
        num_nodes, num_gateways = self._sizes
        self.nodes = [await self._start_node() for _ in range(num_nodes)]
        self.gateways = [await self._start_gateway(place) for place in range(num_gateways)]

    @property
    def holders(self) -> Sequence[Any]:
        """The processes that run batches."""
        return self.gateways

    @property
    def kinds(self) -> Sequence[str]:
        """What may be killed while a batch runs, the more often the more often it is named."""
        return ("gateway", "gateway", "node", "redis", "reader")

    async def begin(self) -> None:
        """Note that a batch is made, and will be disturbed."""

    async def end(self) -> None:
        """Note that the batch has ended: its result will be read."""

    def problems(self) -> list[str]:
        """Return what else was violated."""
        return []

    def measurements(self) -> dict[str, Measurement]:
        """Return what else was measured."""
        return {}

    def close(self) -> None:
        """Kill all processes except Redis."""
        for process in (*self.nodes, *self.gateways):
            process.close()

    def pids(self) -> dict[str, int]:
        """Return the process ids to watch, by name."""
        nodes = {f"node {i}": node.pid for i, node in enumerate(self.nodes)}
        return nodes | {f"gateway {i}": gateway.pid for i, gateway in enumerate(self.gateways)}

    async def _start_node(self) -> NodeProcess:
        self._num_started += 1
        ttls = {"log_ttl_ms": TTL_MS, "result_ttl_ms": TTL_MS, "idem_ttl_ms": TTL_MS}
        place = {"pool": self._pool, "name": f"n{self._num_started}", "lease_ms": int(LEASE_S * 1000), "drain_s": 0.5}
        node = NodeProcess(self.redis.url, **place, **(ttls | self._of_nodes))
        return await asyncio.to_thread(node.wait_ready)

    async def _start_gateway(self, place: int) -> GatewayProcess:
        return await asyncio.to_thread(GatewayProcess(self.redis.url, port=self._ports[place]).wait_ready)

    async def kill_node(self, rng: random.Random) -> None:
        """Send SIGKILL to a node and replace it."""
        await self._replace_node(rng, ChildProcess.kill)

    async def drain_node(self, rng: random.Random) -> None:
        """Send SIGTERM to a node, and replace it when it has ended without an error."""
        await self._replace_node(rng, _stop_well)

    async def freeze_node(self, rng: random.Random) -> None:
        """Pause a node for longer than a lease."""
        node = rng.choice(self.nodes)
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + 1)
        node.signal(signal.SIGCONT)

    async def kill_gateway(self, rng: random.Random) -> None:
        """Send SIGKILL to a gateway and replace it."""
        await self.kill_gateway_at(rng.randrange(len(self.gateways)))

    async def kill_gateway_at(self, place: int) -> None:
        """Send SIGKILL to the gateway at this place and replace it."""
        self.gateways[place].close()
        self.gateways[place] = await self._start_gateway(place)

    async def kill_holder_at(self, place: int) -> None:
        """Send SIGKILL to the process at this place of those that run batches, and replace it."""
        await self.kill_gateway_at(place)

    async def kill_redis(self, rng: random.Random) -> None:
        """Send SIGKILL to Redis and start it again after a while."""
        self.redis.kill()
        await asyncio.sleep(rng.uniform(0, 2))
        await asyncio.to_thread(self.redis.start)

    async def freeze_redis(self, rng: random.Random) -> None:
        """Pause Redis, sometimes for longer than a lease."""
        self.redis.pause()
        await asyncio.sleep(rng.uniform(0.5, LEASE_S + 1.5))
        self.redis.resume()

    async def _replace_node(self, rng: random.Random, end: Callable[[ChildProcess], None]) -> None:
        place = rng.randrange(len(self.nodes))
        await asyncio.to_thread(end, self.nodes[place])
        self.nodes[place].close()
        self.nodes[place] = await self._start_node()


def _stop_well(process: ChildProcess) -> None:
    assert process.stop() == 0, "a drain ends well"


async def kill_now_and_then(fleet: Fleet, rng: random.Random, *, every_s: float, until_s: float) -> Counter[str]:
    """Apply a random fault at intervals until the time is over. Return how often each was applied."""
    done: Counter[str] = Counter()
    clock = asyncio.get_running_loop().time
    faults: tuple[Callable[[random.Random], Awaitable[None]], ...] = (
        *(fleet.kill_node, fleet.kill_node, fleet.drain_node, fleet.freeze_node),
        *(fleet.kill_gateway, fleet.kill_redis, fleet.freeze_redis),
    )
    while clock() < until_s:
        next_s = clock() + every_s
        fault = rng.choice(faults)
        await fault(rng)
        done[fault.__name__] += 1
        await asyncio.sleep(max(0.0, next_s - clock()))
    return done
