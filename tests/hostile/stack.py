"""Redis, a node and a gateway as processes, with API keys of two tenants."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fakes.processes.child_process import ChildProcess
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess

from penstock.contract.tenant import Terms
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import Finding, audit
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

PROBE = str(Path(__file__).parent / "probe.py")
POOL = "hostile"
STALL_AFTER_S = 30.0
"""A node whose engine hangs ends itself then; the default of two minutes would only make tests longer."""


class ProbedNode(NodeProcess):
    """A node whose loops are watched."""

    wrapper = (PROBE,)


class ProbedGateway(GatewayProcess):
    """A gateway whose loops are watched."""

    wrapper = (PROBE,)


@dataclass(frozen=True)
class Hold:
    """The cause and length of a hold of a process's event loop."""

    process: str
    at_s: float
    held_s: float
    frames: str


class Stack:
    """All processes, from `start` to `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exit = ExitStack()
        self.redis: RedisProcess
        self.processes: dict[str, ChildProcess] = {}
        self.url = ""
        self.keys: dict[str, str] = {}
        """API keys by tenant: `neighbor`, `attacker` and, for statistics of all tenants, `admin`."""

    def start(
        self,
        *,
        model: Path | None,
        maxmemory: str = "1gb",
        terms: Terms | None = None,
        tenants: int = 0,
        is_probed: bool = True,
        **node: Any,
    ) -> None:
        """Start all processes. `terms`: the attacker's limits. Without a model, the reference node serves.

        `tenants`: further tenants, `flood-0` and so on. `is_probed`: whether `holds` knows their loops, which takes a
        tenth of a core for each process.
        """
        options = {"appendonly": "no", "maxmemory": maxmemory, "maxmemory-policy": "noeviction"}
        self.redis = self._exit.enter_context(RedisProcess(self._folder / "redis", **options))
        self.keys = asyncio.run(_new_keys(self.redis.url, terms or Terms(), tenants))
        settings = {"pool": POOL, "stall_after_s": STALL_AFTER_S, **node}
        if model is not None:
            settings["model"] = model
        with self._probed("node"):
            node_process = (ProbedNode if is_probed else NodeProcess)(self.redis.url, **settings)
        with self._probed("gateway"):
            gateway = (ProbedGateway if is_probed else GatewayProcess)(self.redis.url)
        self.processes = {"node": node_process, "gateway": gateway}
        for process in self.processes.values():
            self._exit.callback(process.close)
        node_process.wait_ready()
        self.url = gateway.wait_ready().url

    @contextmanager
    def _probed(self, name: str) -> Iterator[None]:
        os.environ["LOOP_PROBE"] = str(self._folder / f"{name}.holds")
        try:
            yield
        finally:
            del os.environ["LOOP_PROBE"]

    def pids(self) -> dict[str, int]:
        """Return the running processes by name, Redis included."""
        alive = {name: process.pid for name, process in self.processes.items() if process.is_running}
        return alive | {"redis": self.redis.pid}

    def ended(self) -> dict[str, int]:
        """Return the exit statuses of ended processes."""
        return {name: process.wait() for name, process in self.processes.items() if not process.is_running}

    def holds(self, since_s: float, until_s: float) -> list[Hold]:
        """Return the holds of loops between two times of the monotonic clock."""
        return [hold for hold in self._all_holds() if since_s <= hold.at_s + hold.held_s and hold.at_s <= until_s]

    def _all_holds(self) -> Iterator[Hold]:
        for name in self.processes:
            path = self._folder / f"{name}.holds"
            for line in path.read_text().splitlines() if path.exists() else ():
                data = json.loads(line)
                yield Hold(name, data["at"], data["held_s"], data["frames"])

    def client(self, tenant: str, **options: Any) -> httpx.AsyncClient:
        """Return an HTTP client with a tenant's key."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, **{"timeout": 60.0, **options})

    async def audit(self) -> list[Finding]:
        """Return the disagreements between Redis's keys and the jobs."""
        redis = connect(self.redis.url)
        try:
            return await audit(AdminBroker(redis), POOL)
        finally:
            await redis.aclose()

    def close(self) -> None:
        """Close everything."""
        self._exit.close()


@contextmanager
def running_stack(**options: Any) -> Iterator[Stack]:
    """Run a stack in its own folder. The processes' logs are printed if the block fails."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    stack = Stack(folder)
    try:
        stack.start(**options)
        yield stack
    except BaseException:
        for name, process in stack.processes.items():
            print(f"== {name}, running: {process.is_running}\n{process.log[-8000:]}")
        raise
    finally:
        stack.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _new_keys(redis_url: str, terms: Terms, num_floods: int) -> dict[str, str]:
    redis = connect(redis_url)
    try:
        store = KeyStore(redis)
        neighbor, _ = await store.add("neighbor", ["infer"], Terms())
        attacker, _ = await store.add("attacker", ["infer"], terms)
        floods = {f"flood-{i}": (await store.add(f"flood-{i}", ["infer"], Terms()))[0] for i in range(num_floods)}
        admin, _ = await store.add("operator", ["infer", "admin"], Terms())
    finally:
        await redis.aclose()
    return {"neighbor": neighbor, "attacker": attacker, "admin": admin, **floods}
