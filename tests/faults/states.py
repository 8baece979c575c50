"""Drills of each state in which Redis or a machine may be: streams run beside it, and an audit follows.

Each prints what became of the streams, which alerts fired, and whether the log, `/ready`, the metrics and an answer
name the state. The times of the alert rules are a tenth of those of ops/observe/alerts.yml.
"""

from __future__ import annotations

import asyncio
import os
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
PATIENCE_S = 120.0
NODE: Mapping[str, Any] = {"pool": POOL, "step_s": STEP_S, "lease_ms": 3000}

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
    """Nodes that the fault ended, and that were started again."""
    named_by: list[str] = field(default_factory=list)
    """Which of log, /ready, metric and answer had the state's name."""
    answers: dict[str, int] = field(default_factory=dict)
    """Status and code of answers to requests during the fault → their number."""
    alerts: dict[str, float] | None = None
    """Alert → seconds after the fault began; None without Prometheus."""

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
    hold_s: float = HOLD_S
    clock_s: float = 0.0
    """By how much the gateway's clock is ahead."""
    has_sentinel: bool = False


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
    """Send many more jobs than the node completes in the longest wait that admission allows."""
    body = {"model": POOL, "prompt": "more", "max_tokens": NUM_TOKENS, "background": False}
    ids = list[str]()
    with httpx.Client(base_url=staged.gateway.url, timeout=60) as http:
        for _ in range(5):
            for one in http.post("/v1/jobs", json=[body] * 100).json()["data"]:
                if "id" in one:
                    ids.append(one["id"])
                else:
                    _count(staged.answers, f"{one['status']} {one['error']['code']}")

    async def cancel() -> None:
        async with httpx.AsyncClient(base_url=staged.gateway.url, timeout=60) as http:
            for job_id in ids:
                await http.delete(f"/v1/jobs/{job_id}")

    return cancel


def _nothing(_: Staged) -> Mend:
    return lambda: None


_NO_CALLS = ("ACL", "SETUSER", "default", "-evalsha", "-eval", "-info")
FAULTS: Mapping[str, Fault] = {
    "restart": Fault(_restart, "away"),
    "pause": Fault(_pause, "away"),
    "maxmemory": Fault(
        _command("CONFIG", "SET", "maxmemory", "1mb", end=("CONFIG", "SET", "maxmemory", "0")),
        "full",
        said=("log", "ready", "metric", "answer"),
    ),
    "disk_full": Fault(_disk_full, "disk_full"),
    "rights": Fault(_command(*_NO_CALLS, end=("ACL", "SETUSER", "default", "+@all")), "no_rights"),
    "sentinel": Fault(_fail_over, "redis has a new history", said=("log",), has_sentinel=True),
    "skew": Fault(_nothing, "this machine's clock differs from that of redis", said=("log",), clock_s=600.0),
    "overload": Fault(_overload, "pool_busy", said=("answer", "log"), hold_s=20.0),
}


async def drill(name: str, folder: Path, *, num_streams: int = NUM_STREAMS, watches: bool = True) -> Drilled:
    """Run streams, cause the fault after a while, mend it, and wait for the ends of all streams."""
    fault, seen = FAULTS[name], Drilled(num_streams)
    with ExitStack() as stack:
        servers = stack.enter_context(Replicated(folder)) if fault.has_sentinel else None
        server = servers.master if servers else stack.enter_context(RedisProcess(folder / "redis", port=free_port()))
        url = servers.url if servers else server.url
        metrics_port = free_port()
        node = stack.enter_context(NodeProcess(url, **NODE, metrics_port=metrics_port))
        with _environment(faked_clock(fault.clock_s)):
            gateway = stack.enter_context(GatewayProcess(url))
        staged = Staged(server, gateway, node, seen.answers, servers)
        alerts = None
        if watches and prometheus_program():
            targets = {
                "penstock-gateway": [urlsplit(gateway.url).netloc],
                "penstock-node": [f"127.0.0.1:{metrics_port}"],
            }
            alerts = stack.enter_context(FastAlerts(folder / "prometheus", targets))
        async with http_client() as http:
            works = [new_work(POOL, NUM_TOKENS) for _ in range(num_streams)]
            readings = [TimedReading() for _ in works]
            reading = [
                asyncio.create_task(_read(http, gateway.url, *one, seen)) for one in zip(readings, works, strict=True)
            ]
            await asyncio.sleep(BEFORE_S)
            if alerts:
                alerts.begin()
            mend = await asyncio.to_thread(fault.begin, staged)
            named = await _watch(http, staged, fault, seen, alerts)
            if (ending := mend()) is not None:
                await ending
            if not node.is_running:
                # A node without rights ends, and its supervisor starts it again.
                node = await asyncio.to_thread(stack.enter_context, NodeProcess(url, **NODE, name="again"))
                seen.nodes_ended += 1
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*reading)
        for one, work in zip(readings, works, strict=True):
            one.check(work)
        seen.whole = len(works)
        seen.longest_gap_s = round(max(one.longest_gap_s for one in readings), 2)
        named |= {"log"} if fault.name in gateway.log else set()
        seen.named_by = sorted(named)
        seen.alerts = None if alerts is None else alerts.fired
        admin = connect(servers.replica.url if servers else server.url)
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


async def _watch(
    http: httpx.AsyncClient, staged: Staged, fault: Fault, seen: Drilled, alerts: FastAlerts | None
) -> set[str]:
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
        if alerts:
            await asyncio.to_thread(alerts.look)
        await asyncio.sleep(0.25)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    named |= {"answer"} if any(fault.name in answer for answer in seen.answers) else set()
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
