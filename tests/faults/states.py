"""Drills of each state in which Redis or a machine may be: streams run beside it, and an audit follows.

Each prints what became of the streams, which alerts fired, and whether the log, `/ready`, the metrics and an answer
name the state. The times of the alert rules are a tenth of those of ops/observe/alerts.yml. A fault lists the alerts
that must fire; any other one is wrong, as is any under the same streams without a fault (`calm`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from fakes.processes.node_process import NodeProcess
from faults.tools.fast_alerts import FastAlerts, prometheus_program
from faults.tools.http_reader import HttpReading, http_client
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess, faked_clock, free_port
from faults.tools.sentinel import Replicated
from faults.tools.work import Work, check_settled, new_work
from prometheus_client.parser import text_string_to_metric_families

from penstock.queue.broker.connection import connect

POOL = "states"
NUM_STREAMS = 12
NUM_TOKENS = 1500
STEP_S = 0.01
HOLD_S = 15.0
"""How long a fault lasts. Callers wait for Redis for 30 s, so no stream ends with an error."""
BEFORE_S = 3.0
PATIENCE_S = 240.0
RESTART_S = 0.5
"""Interval at which a supervisor looks at its node."""
FLOOD_CLIENTS = 200
FLOOD_TOKENS = 60
FLOOD_RETRY_S = 4.0
"""An overload: clients that always have a request, and come back so long after a refusal. So it is one on a slow
machine too. Long steps keep the work of this machine small. Most of the node's slots are theirs, not those of streams.
"""
AFTER_S = 15.0
"""How long alerts are watched after a fault was mended."""
NODE: Mapping[str, Any] = {"pool": POOL, "step_s": STEP_S, "lease_ms": 3000, "max_wait_ms": 6000}
"""Jobs wait at most a tenth of the usual time, as all times of the rules are a tenth."""

Mend = Callable[[], Awaitable[None] | None]


@dataclass
class Drilled:
    """What was seen of one fault."""

    streams: int
    whole: int = 0
    """Streams whose text is that of a run without faults."""
    cut: int = 0
    """Times that a stream broke, and its reader came back."""
    longest_gap_s: float = 0.0
    nodes_ended: int = 0
    """How often a node that had ended was started again."""
    named_by: list[str] = field(default_factory=list)
    """Which of log, /ready, metric and answer had the state's name."""
    answers: dict[str, int] = field(default_factory=dict)
    """Status and code of answers to requests during the fault → their number."""
    alerts: dict[str, float] | None = None
    """Alert → seconds after the fault began; None without Prometheus."""
    missing_alerts: list[str] = field(default_factory=list)
    """Those that should have fired and did not."""
    wrong_alerts: list[str] = field(default_factory=list)
    """Those that fired and tell nothing of this fault."""

    @property
    def lost(self) -> int:
        """Streams that never came to their end."""
        return self.streams - self.whole


@dataclass(frozen=True)
class Staged:
    """The processes of a drill."""

    server: RedisProcess
    gateway: GatewayProcess
    node: NodeProcess
    answers: dict[str, int]
    """As in `Drilled`."""
    servers: Replicated | None = None


@dataclass(frozen=True)
class Fault:
    """A fault, and the name that it has in the log, `/ready`, the metrics and answers."""

    begin: Callable[[Staged], Mend]
    name: str
    said: tuple[str, ...] = ("log", "ready", "metric")
    """What must name it."""
    alerts: tuple[str, ...] = ()
    """What must fire: these and no others."""
    hold_s: float = HOLD_S
    num_tokens: int = NUM_TOKENS
    max_num_seqs: int = 64
    step_s: float = STEP_S
    slow_step_s: float = 0.0
    """If not 0, the pool has a second node, whose steps take so long."""
    clock_s: float = 0.0
    """By how much the gateway's clock is ahead."""
    has_sentinel: bool = False
    is_supervised: bool = True
    """Whether a node that ends is started again while the fault lasts, and not only after it."""


class Supervisor:
    """Starts the node of a drill again whenever it has ended, as systemd would."""

    def __init__(self, stack: ExitStack, node: NodeProcess, start: Callable[[int], NodeProcess]) -> None:
        """`start`: starts a node with that number."""
        self._stack = stack
        self._node = node
        self._start = start
        self.num_started = 0

    async def run(self) -> None:
        """Look at the node until canceled."""
        while True:
            self.look()
            await asyncio.sleep(RESTART_S)

    def look(self) -> None:
        """Start the node again if it does not run."""
        if not self._node.is_running:
            self.num_started += 1
            self._node = self._start(self.num_started)
            self._stack.callback(self._node.close)


class TimedReading(HttpReading):
    """A reading that knows its longest gap between two events."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_gap_s = 0.0
        self._last_s: float | None = None

    def _take_in(self, data: str) -> None:
        now_s = time.monotonic()
        if self._last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        super()._take_in(data)


def _restart(staged: Staged) -> Mend:
    staged.server.kill()

    async def start() -> None:
        await asyncio.to_thread(staged.server.start)

    return start


def _pause(staged: Staged) -> Mend:
    staged.server.pause()
    return staged.server.resume


def _command(*begin: str, end: tuple[str, ...]) -> Callable[[Staged], Mend]:
    def start(staged: Staged) -> Mend:
        with staged.server.client() as client:
            client.execute_command(*begin)

        def mend() -> None:
            with staged.server.client() as admin:
                admin.execute_command(*end)

        return mend

    return start


def _disk_full(staged: Staged) -> Mend:
    """Let a snapshot fail: Redis then refuses writes, as with a full disk."""
    snapshot = staged.server.folder / "dump.rdb"
    with staged.server.client() as client:
        client.config_set("save", "3600 1000000")
        snapshot.unlink(missing_ok=True)
        snapshot.mkdir()
        client.bgsave()

    def mend() -> None:
        snapshot.rmdir()
        with staged.server.client() as admin:
            admin.bgsave()

    return mend


def _fail_over(staged: Staged) -> Mend:
    assert staged.servers is not None
    staged.servers.fail_over()
    servers = staged.servers

    async def wait() -> None:
        await asyncio.to_thread(servers.wait_for_promotion)

    return wait


def _overload(staged: Staged) -> Mend:
    """Let more clients ask than the node has slots, and places in the longest wait that admission allows."""
    body = {"model": POOL, "prompt": "more", "max_tokens": FLOOD_TOKENS}
    is_over = threading.Event()

    async def ask(http: httpx.AsyncClient) -> None:
        while not is_over.is_set():
            # It waits for its turn, however long: a time-out of one would end the flood.
            answer = await http.post("/v1/completions", json=body, timeout=None)
            if answer.is_error:
                _count(staged.answers, f"{answer.status_code} {answer.json()['error']['code']}")
                await asyncio.sleep(FLOOD_RETRY_S)

    async def flood() -> None:
        async with http_client() as http, asyncio.TaskGroup() as group:
            http.base_url = httpx.URL(staged.gateway.url)
            for _ in range(FLOOD_CLIENTS):
                group.create_task(ask(http))
                await asyncio.sleep(FLOOD_RETRY_S / FLOOD_CLIENTS)

    thread = threading.Thread(target=lambda: asyncio.run(flood()))
    thread.start()

    async def end() -> None:
        is_over.set()
        await asyncio.to_thread(thread.join)

    return end


def _end_node(staged: Staged) -> Mend:
    staged.node.kill()
    return lambda: None


def _nothing(_: Staged) -> Mend:
    return lambda: None


_NO_CALLS = ("ACL", "SETUSER", "default", "-evalsha", "-eval", "-info")
FAULTS: Mapping[str, Fault] = {
    "calm": Fault(_nothing, "", said=(), hold_s=40.0),
    "restart": Fault(_restart, "away", alerts=("PenstockRedisDown", "PenstockRedisChanged")),
    "pause": Fault(_pause, "away", alerts=("PenstockRedisDown",)),
    "maxmemory": Fault(
        _command("CONFIG", "SET", "maxmemory", "1mb", end=("CONFIG", "SET", "maxmemory", "0")),
        "full",
        said=("log", "ready", "metric", "answer"),
        alerts=("PenstockRedisFull",),
    ),
    "disk_full": Fault(_disk_full, "disk_full", alerts=("PenstockRedisNotWritten",)),
    "rights": Fault(
        _command(*_NO_CALLS, end=("ACL", "SETUSER", "default", "+@all")),
        "no_rights",
        alerts=("PenstockRedisProblem", "PenstockTargetDown", "PenstockErrorBudgetBurnsFast"),
    ),
    "sentinel": Fault(
        _fail_over, "redis has a new history", said=("log",), alerts=("PenstockRedisChanged",), has_sentinel=True
    ),
    "skew": Fault(
        _nothing,
        "this machine's clock differs from that of redis",
        said=("log",),
        alerts=("PenstockClockSkew",),
        clock_s=600.0,
    ),
    "overload": Fault(
        _overload,
        "pool_busy",
        said=("answer", "log"),
        alerts=("PenstockBacklog", "PenstockCallersRefused", "PenstockPoolRefuses"),
        hold_s=130.0,
        max_num_seqs=48,
        num_tokens=NUM_TOKENS // 5,
        step_s=5 * STEP_S,
    ),
    "no_node": Fault(
        _end_node,
        "no_node",
        said=("answer", "log"),
        alerts=(
            "PenstockTargetDown",
            "PenstockCallersWithoutNode",
            "PenstockOldestWait",
            "PenstockErrorBudgetBurnsFast",
            "PenstockErrorBudgetBurns",
            "PenstockNoNode",
        ),
        hold_s=150.0,
        is_supervised=False,
    ),
    "slow_node": Fault(
        _nothing, "", said=(), alerts=("PenstockSlowNode",), hold_s=140.0, num_tokens=4000, slow_step_s=2.5 * STEP_S
    ),
}


def _stage(stack: ExitStack, fault: Fault, folder: Path, seen: Drilled) -> tuple[Staged, Supervisor, FastAlerts | None]:
    """Start the processes of a drill."""
    servers = stack.enter_context(Replicated(folder)) if fault.has_sentinel else None
    server = servers.master if servers else stack.enter_context(RedisProcess(folder / "redis", port=free_port()))
    url = servers.url if servers else server.url
    settings = {**NODE, "max_num_seqs": fault.max_num_seqs, "step_s": fault.step_s}
    ports = [free_port() for _ in range(2 if fault.slow_step_s else 1)]

    def again(number: int) -> NodeProcess:
        return NodeProcess(url, **settings, name=f"again{number}", metrics_port=ports[0])

    node = stack.enter_context(NodeProcess(url, **settings, metrics_port=ports[0]))
    if fault.slow_step_s:
        slow = {**settings, "step_s": fault.slow_step_s, "name": "slow", "metrics_port": ports[1]}
        stack.enter_context(NodeProcess(url, **slow))
    with _environment(faked_clock(fault.clock_s)):
        gateway = stack.enter_context(GatewayProcess(url))
    alerts = None
    if prometheus_program():
        targets = {
            "penstock-gateway": [urlsplit(gateway.url).netloc],
            "penstock-node": [f"127.0.0.1:{port}" for port in ports],
        }
        alerts = stack.enter_context(FastAlerts(folder / "prometheus", targets))
    return Staged(server, gateway, node, seen.answers, servers), Supervisor(stack, node, again), alerts


async def drill(name: str, folder: Path, *, num_streams: int = NUM_STREAMS) -> Drilled:
    """Run streams, cause the fault after a while, mend it, and wait for the ends of all streams."""
    fault, seen = FAULTS[name], Drilled(num_streams)
    with ExitStack() as stack:
        staged, supervisor, alerts = _stage(stack, fault, folder, seen)
        async with http_client() as http:
            works = [new_work(POOL, fault.num_tokens) for _ in range(num_streams)]
            readings = [TimedReading() for _ in works]
            reading = [
                asyncio.create_task(_read(http, staged.gateway.url, *one, seen))
                for one in zip(readings, works, strict=True)
            ]
            await asyncio.sleep(BEFORE_S)
            if alerts:
                alerts.begin()
                watching = asyncio.create_task(_look(alerts))
            mend = await asyncio.to_thread(fault.begin, staged)
            supervising = asyncio.create_task(supervisor.run()) if fault.is_supervised else None
            named = await _watch(http, staged, fault, seen)
            if (ending := mend()) is not None:
                await ending
            supervising = supervising or asyncio.create_task(supervisor.run())
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*reading)
            if alerts:
                await asyncio.sleep(AFTER_S)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
            seen.nodes_ended = supervisor.num_started
        for one, work in zip(readings, works, strict=True):
            one.check(work)
        seen.whole = len(works)
        seen.longest_gap_s = round(max(one.longest_gap_s for one in readings), 2)
        named |= {"log"} if fault.name and fault.name in staged.gateway.log else set()
        seen.named_by = sorted(named)
        if alerts:
            seen.alerts = alerts.fired
            seen.missing_alerts = sorted(set(fault.alerts) - set(alerts.fired))
            seen.wrong_alerts = sorted(set(alerts.fired) - set(fault.alerts))
        admin = connect((staged.servers.replica if staged.servers else staged.server).url)
        await check_settled(admin, POOL)
        await admin.aclose()
    return seen


async def _read(http: httpx.AsyncClient, url: str, reading: TimedReading, work: Work, seen: Drilled) -> None:
    while not reading.is_whole:
        try:
            await reading.read(http, url, work, key=work.id)
        except httpx.HTTPStatusError as error:
            # A gateway without rights answers 500 bad_config.
            assert error.response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        if not reading.is_whole:
            seen.cut += 1
            await asyncio.sleep(0.1)


async def _look(alerts: FastAlerts) -> None:
    """Note until canceled which alerts fire."""
    while True:
        await asyncio.to_thread(alerts.look)
        await asyncio.sleep(0.5)


async def _watch(http: httpx.AsyncClient, staged: Staged, fault: Fault, seen: Drilled) -> set[str]:
    """Ask the gateway again and again while the fault lasts. Return what names it."""
    named, ends_s = set[str](), time.monotonic() + fault.hold_s
    asking = asyncio.create_task(_ask(http, staged, seen))
    while time.monotonic() < ends_s:
        with suppress(httpx.TransportError):
            ready = (await http.get(f"{staged.gateway.url}/ready", timeout=5)).json()
            message = ready.get("error", {}).get("message", "")
            named |= {"ready"} if ready.get("redis") == fault.name or f"({fault.name})" in message else set()
            named |= {"ready"} if fault.name == "away" and ready.get("error", {}).get("code") == "redis_away" else set()
            text = (await http.get(f"{staged.gateway.url}/metrics", timeout=5)).text
            named |= {"metric"} if fault.name in _problems(text) else set()
        await asyncio.sleep(0.25)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    named |= {"answer"} if fault.name and any(fault.name in answer for answer in seen.answers) else set()
    return named


async def _ask(http: httpx.AsyncClient, staged: Staged, seen: Drilled) -> None:
    """Send small requests, and note how they are answered."""
    while True:
        body = {"model": POOL, "prompt": "one more", "max_tokens": 1}
        with suppress(httpx.TransportError):
            answer = await http.post(f"{staged.gateway.url}/v1/completions", json=body)
            code = "" if answer.is_success else f" {answer.json()['error']['code']}"
            _count(seen.answers, f"{answer.status_code}{code}")
        await asyncio.sleep(0.5)


def _count(answers: dict[str, int], answer: str) -> None:
    answers[answer] = answers.get(answer, 0) + 1


def _problems(text: str) -> set[str]:
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {one.labels["state"] for one in samples if one.name == "penstock_redis_problem" and one.value}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let processes that the block starts have these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
