"""`make upgrades`: a rolling upgrade from release N to N+1 and back, under load, for each kind of change in N+1.

Two nodes with a small model and two gateways run on N. 200 streams are open all the time: most by HTTP, the others by
Python clients of both releases. The nodes, then the gateways are replaced by those of N+1, one after the other; then
all of that the other way round. Each stream must equal, token by token, what a lone node of N or of N+1 answers.
tests/faults/tools/releases.py states the changes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
from faults.tools.processes import READER
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.releases import CHANGES, TAG, VERSION, Release, ReleasedProcess, install, new_cache
from faults.tools.report import Measurement, record
from fixtures.tiny_model import make_tiny_model
from uuid_utils import uuid7

from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import connect

POOL, OLD = "upgraded", "N"
NUM_NODES = NUM_GATEWAYS = 2
NUM_JOBS = 24
MAX_TOKENS = 200
CLIENT_SHARE = 8
"""One stream of so many is read by the client of each release."""
TIMEOUT_S = 300.0
PAUSE_S = 0.3
Tokens = tuple[int, ...]
COME_BACK = (429, 503)
GONE = "revision_gone"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One rolling upgrade and its way back."""

    change: str
    drain_s: float
    """How long the nodes that are replaced let their jobs run."""
    outcomes: frozenset[str] = frozenset(("succeeded",))
    """How jobs may end."""


SCENARIOS = {
    "fields": Scenario("fields", 0),
    "defaults": Scenario("defaults", 0),
    "caches": Scenario("caches", 0),
    "arithmetic": Scenario("arithmetic", TIMEOUT_S),
    "arithmetic, without a drain": Scenario("arithmetic", 0, frozenset(("succeeded", GONE))),
}
TITLES = {
    "fields": "fields on the wire",
    "defaults": "settings of the pool",
    "caches": "packed weights under another key",
    "arithmetic": "arithmetic, old nodes drain to the end",
    "arithmetic, without a drain": "arithmetic, old nodes do not drain",
}


def options_of(number: int) -> dict[str, Any]:
    """How a job samples."""
    return {"temperature": 1.0, "seed": number, "max_tokens": MAX_TOKENS, "ignore_eos": True}


def _new_id() -> str:
    return f"{POOL}.{uuid7()}"


def prompt_of(number: int) -> str:
    """What a job asks."""
    return f"the gate opens by pressure, and the turbine has number {number}"


class Fleet:
    """Redis, nodes and gateways, each of one of the two releases."""

    def __init__(self, folder: Path, model: Path, drain_s: float) -> None:
        self._folder = folder
        self._model = model
        self._drain_s = drain_s
        self._stack = ExitStack()
        self.redis = RedisProcess(folder / "redis")
        self.nodes: dict[str, ReleasedProcess] = {}
        self.gateways: dict[str, ReleasedProcess] = {}
        """By their URLs, of which each new gateway gets that of the old one."""
        self.num_replaced = 0

    def __enter__(self) -> Fleet:
        self._stack.enter_context(self.redis)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_node(self, release: Release, name: str, pool: str = POOL) -> ReleasedProcess:
        """Start a node; settings of the pool have their defaults but for one."""
        settings = {"pool": pool, "name": name, "drain_s": self._drain_s, "num_threads": 1, "runner": "native"}
        settings |= {"dtype": "bfloat16", "num_kv_blocks": 2048, "max_num_seqs": 128}
        # A reader may take seconds to come back on a busy machine; it is not what this is about.
        settings |= {"reattach_grace_ms": 60_000}
        env = {f"PENSTOCK_NODE_{key.upper()}": str(value) for key, value in settings.items()}
        env |= {"PENSTOCK_REDIS_URL": self.redis.url, "PENSTOCK_NODE_PROGRESS": "json"}
        return self._started(release, ["-m", "penstock", "node", str(self._model)], env)

    def start_gateway(self, release: Release, url: str) -> ReleasedProcess:
        """Start a gateway that cuts its streams off soon when it is stopped."""
        env = {"PENSTOCK_GATEWAY_PORT": url.rpartition(":")[2], "PENSTOCK_GATEWAY_DRAIN_S": "1"}
        env |= {"PENSTOCK_REDIS_URL": self.redis.url, "PENSTOCK_GATEWAY_PROGRESS": "json"}
        return self._started(release, ["-m", "penstock", "gateway"], env)

    def start_client(self, release: Release, numbers: dict[str, int], tags: tuple[str, ...] = ()) -> ReleasedProcess:
        """Start a Python client that reads these jobs at once and then ends. `numbers`: job id → number."""
        shared = {"background": False, "tags": tags}
        jobs = [
            {"options": {"job_id": job_id, "prompt": prompt_of(number), **shared, **options_of(number)}}
            for job_id, number in numbers.items()
        ]
        env = {"PENSTOCK_REDIS_URL": self.redis.url, "READER_JOBS": json.dumps(jobs)}
        return self._started(release, [READER], env)

    def start_all(self, release: Release) -> None:
        """Start both nodes and both gateways."""
        for number in range(NUM_NODES):
            self.nodes[f"n{number}"] = self.start_node(release, f"n{number}")
        for _ in range(NUM_GATEWAYS):
            url = f"http://127.0.0.1:{free_port()}"
            self.gateways[url] = self.start_gateway(release, url)

    def replace_node(self, release: Release, name: str) -> None:
        """Start a node of this release, then let its predecessor drain and end."""
        new = f"m{self.num_replaced}"
        self.nodes[new] = self.start_node(release, new)
        assert self.nodes.pop(name).stop() == 0
        self.num_replaced += 1

    def replace_gateway(self, release: Release, url: str) -> None:
        """Stop a gateway, then start one of this release at its address."""
        assert self.gateways[url].stop() == 0
        self.gateways[url] = self.start_gateway(release, url)
        self.num_replaced += 1

    def _started(self, release: Release, command: list[str], env: dict[str, str]) -> ReleasedProcess:
        process = release.start(command, env)
        self._stack.callback(process.close)
        return process.wait_ready()


@dataclass
class Load:
    """Open streams, and what became of them."""

    fleet: Fleet
    expected: dict[str, list[Tokens]]
    """The tokens of each job, by the name of the release that computes them."""
    outcomes: frozenset[str]
    counts: Counter[str] = field(default_factory=Counter)
    clients: set[str] = field(default_factory=set)
    """Releases whose Python clients read at present."""
    is_over: bool = False

    async def run(self, num_http: int, rng: random.Random) -> None:
        """Read one job after another by HTTP, with so many readers, until the load is over."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as http, asyncio.TaskGroup() as group:
            for _ in range(num_http):
                group.create_task(self._read_jobs(http, random.Random(rng.random())))

    async def run_clients(self, release: Release, count: int, rng: random.Random) -> None:
        """Run one Python client of a release after another, each with so many jobs, as long as `clients` has it."""
        self.clients.add(release.name)
        while not self.is_over and release.name in self.clients:
            numbers = {_new_id(): rng.randrange(NUM_JOBS) for _ in range(count)}
            tags = () if release.name == OLD else (TAG,)
            client = await asyncio.to_thread(self.fleet.start_client, release, numbers, tags)
            tokens, ends = await asyncio.to_thread(_chunks_of, client)
            assert client.wait() == 0, client.log
            for job_id, number in numbers.items():
                # The client says no code.
                end = GONE if ends[job_id] == "failed" and GONE in self.outcomes else ends[job_id]
                self._note(number, tuple(tokens[job_id]), end)
            self.counts[f"by clients of {'N' if release.name == OLD else 'N+1'}"] += count

    async def until_more(self, count: int) -> None:
        """Wait until so many more jobs have ended."""
        goal = self.counts["streams"] + count
        async with asyncio.timeout(TIMEOUT_S):
            while self.counts["streams"] < goal:
                await asyncio.sleep(0.05)

    async def _read_jobs(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self.is_over:
            number = rng.randrange(NUM_JOBS)
            stream = HttpStream(number)
            async with asyncio.timeout(TIMEOUT_S):
                while not stream.end:
                    await stream.read(http, rng.choice([*self.fleet.gateways]))
                    if not stream.end:
                        await asyncio.sleep(PAUSE_S)
            self.counts["refused at first"] += stream.num_refused
            self.counts["resumed elsewhere"] += stream.num_resumed
            self._note(number, tuple(stream.tokens), stream.end)

    def _note(self, number: int, tokens: Tokens, end: str) -> None:
        assert end in self.outcomes, f"a job ended as {end}"
        self.counts["streams"] += 1
        self.counts["tokens"] += len(tokens)
        answers = {name: known[number] for name, known in self.expected.items()}
        if end == "succeeded":
            assert tokens in answers.values(), f"job {number} has tokens of neither release"
            is_both = len(set(answers.values())) == 1
            self.counts["equal" if is_both else f"equal to {'N' if tokens == answers[OLD] else 'N+1'}"] += 1
        else:
            assert any(tokens == answer[: len(tokens)] for answer in answers.values())
            self.counts[end] += 1


class HttpStream:
    """One completion, read from any gateway until its end."""

    def __init__(self, number: int) -> None:
        self._body = {"model": POOL, "prompt": prompt_of(number), "stream": True, "return_token_ids": True}
        self._body |= options_of(number)
        self._key = secrets.token_hex(8)
        self._last_id = ""
        self.tokens: list[int] = []
        self.end = ""
        self.num_refused = self.num_resumed = 0

    async def read(self, http: httpx.AsyncClient, url: str) -> None:
        """Ask with the stream's idempotency key, and go on behind the last event."""
        self.num_resumed += bool(self._last_id)
        headers = {"Idempotency-Key": self._key, "Last-Event-ID": self._last_id}
        try:
            async with http.stream("POST", f"{url}/v1/completions", json=self._body, headers=headers) as response:
                if response.status_code in COME_BACK:
                    self.num_refused += 1
                    return
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    self._end_with(response.json())
                    return
                next_id = ""
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        next_id = line.removeprefix("id: ")
                    if line.startswith("data: "):
                        self._take_in(line.removeprefix("data: "), next_id)
        except httpx.TransportError:
            return

    def _take_in(self, data: str, event_id: str) -> None:
        if data == "[DONE]":
            self.end = self.end or "succeeded"
            return
        event = json.loads(data)
        if "error" in event:
            self._end_with(event)
            return
        self._last_id = event_id
        for choice in event["choices"]:
            self.tokens += choice.get("token_ids") or ()

    def _end_with(self, event: dict[str, Any]) -> None:
        # A gateway that stops, or lost its Redis, has not ended the job.
        if event["error"]["code"] != "gateway_stopped":
            self.end = event["error"]["code"]


def _chunks_of(client: ReleasedProcess) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Return the tokens and the end of each job of a client."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    while (event := client.next_event()) is not None:
        _, _, ids, _, _, end = event["chunk"]
        tokens.setdefault(event["job"], []).extend(ids)
        if end:
            ends[event["job"]] = end
    assert ends.keys() == tokens.keys(), client.log
    return tokens, ends


async def undisturbed(fleet: Fleet, release: Release) -> list[Tokens]:
    """What a lone node of a release answers."""
    pool = f"alone-{release.name}"
    node = await asyncio.to_thread(fleet.start_node, release, "alone", pool)
    async with AsyncClient(fleet.redis.url) as client:
        jobs = [await client.submit(prompt_of(n), model=pool, **options_of(n)) for n in range(NUM_JOBS)]
        results = [await job.result() for job in jobs]
    assert await asyncio.to_thread(node.stop) == 0
    return [tuple(result.choices[0].token_ids) for result in results]


async def roll(load: Load, release: Release) -> None:
    """Replace nodes and gateways by those of a release: nodes first on the way up, gateways first on the way back."""
    fleet = load.fleet

    async def nodes() -> None:
        for name in [name for name, node in fleet.nodes.items() if node.release is not release]:
            await asyncio.to_thread(fleet.replace_node, release, name)
            await load.until_more(10)

    async def gateways() -> None:
        for url in [*fleet.gateways]:
            await asyncio.to_thread(fleet.replace_gateway, release, url)
            await load.until_more(10)

    first, second = (gateways, nodes) if release.name == OLD else (nodes, gateways)
    await first()
    await second()


@asynccontextmanager
async def loaded(load: Load, num_streams: int, old: Release, rng: random.Random) -> AsyncIterator[asyncio.TaskGroup]:
    """Keep so many streams open while the block runs, those of a Python client of N included."""
    async with asyncio.TaskGroup() as group:
        of_client = num_streams // CLIENT_SHARE
        group.create_task(load.run(num_streams - 2 * of_client, rng))
        group.create_task(load.run_clients(old, of_client, random.Random(rng.random())))
        await load.until_more(1)
        yield group
        load.is_over = True


async def check_early_field(fleet: Fleet, new: Release) -> None:
    """Before any node knows a new field, a job with it is refused by its name, and not computed without it."""
    client = await asyncio.to_thread(fleet.start_client, new, {_new_id(): 0}, (TAG,))
    tokens, ends = await asyncio.to_thread(_chunks_of, client)
    assert [*ends.values()] == ["failed"] and not any(tokens.values()), (tokens, ends)
    async with AsyncClient(fleet.redis.url) as reader:
        status = await reader.status(next(iter(ends)))
        assert status.outcome is not None
        assert (status.outcome.code, "'later'" in status.outcome.message) == ("unsupported_kind", True), status.outcome


async def run(
    scenario: Scenario, releases: tuple[Release, Release], model: Path, folder: Path, *, num_streams: int, seed: int
) -> Counter[str]:
    """Upgrade and roll back under load; return the counts."""
    old, new = releases
    rng = random.Random(seed)
    with Fleet(folder, model, scenario.drain_s) as fleet:
        load = Load(fleet, {one.name: await undisturbed(fleet, one) for one in releases}, scenario.outcomes)
        are_equal = load.expected[old.name] == load.expected[new.name]
        assert are_equal == (scenario.change != "arithmetic")
        await asyncio.to_thread(fleet.start_all, old)
        async with connect(fleet.redis.url) as redis:
            before = await cast(Any, redis.hgetall(keys.config(POOL)))
            if scenario.change == "fields":
                await check_early_field(fleet, new)
            files = _packed_files(old)
            async with loaded(load, num_streams, old, rng) as group:
                # One node of each release, and callers of both.
                (first, *_) = fleet.nodes
                await asyncio.to_thread(fleet.replace_node, new, first)
                client = group.create_task(load.run_clients(new, num_streams // CLIENT_SHARE, rng))
                await load.until_more(num_streams)
                await roll(load, new)
                load.clients.remove(old.name)
                await load.until_more(num_streams)
                # Clients go back first.
                load.clients.remove(new.name)
                await client
                await roll(load, old)
                await load.until_more(num_streams // 2)
            after = await cast(Any, redis.hgetall(keys.config(POOL)))
            assert {name: after[name] for name in before} == before, "the pool keeps its settings"
            await check_end(fleet, load)
        assert files.items() <= _packed_files(old).items(), "N finds its packed weights again"
        load.counts["packed files"] = len(_packed_files(old))
        return load.counts


async def check_end(fleet: Fleet, load: Load) -> None:
    """Assert that nothing is open, lost or inconsistent."""
    async with connect(fleet.redis.url) as redis:
        async with asyncio.timeout(60):
            while await audit(AdminBroker(redis), POOL) or await cast(Any, redis.scard(f"{keys.prefix(POOL)}:open")):
                await asyncio.sleep(0.2)
        events = {
            name.decode(): int(count) for name, count in (await cast(Any, redis.hgetall(keys.counts(POOL)))).items()
        }
    assert not events.get("losses") and not events.get("dead_letters"), events
    load.counts["given back"] = events.get("given_back_drain", 0)
    load.counts["given to a newer node"] = events.get("given_back_lacking", 0)
    load.counts["processes replaced"] = fleet.num_replaced


def _packed_files(release: Release) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (release.cache / "weights").glob("*.weights")}


async def main_async(args: argparse.Namespace, folder: Path) -> None:
    """Install the releases of each scenario, and run it."""
    model, cache = make_tiny_model(folder / "tiny"), new_cache(folder / "cache")
    old = await asyncio.to_thread(install, folder, OLD, (), cache)
    installed: dict[str, Release] = {}
    for number, name in enumerate(args.scenarios or SCENARIOS):
        scenario = SCENARIOS[name]
        if scenario.change not in installed:
            changes = (*VERSION, *CHANGES[scenario.change])
            new = await asyncio.to_thread(install, folder, f"N1-{scenario.change}", changes, cache)
            assert new.version != old.version
            installed[scenario.change] = new
        began_s = time.monotonic()
        place = folder / f"run{number}"
        counts = await run(
            scenario, (old, installed[scenario.change]), model, place, num_streams=args.streams, seed=args.seed
        )
        facts: dict[str, Measurement] = {"open at once": args.streams, **counts}
        print(json.dumps({name: facts | {"minutes": (time.monotonic() - began_s) / 60}}), flush=True)
        record("Upgrades", TITLES[name], facts | {"minutes": (time.monotonic() - began_s) / 60})


def main() -> None:
    """Run the chosen scenarios, or all of them."""
    parser = argparse.ArgumentParser(prog="make upgrades")
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], help="default: all")
    parser.add_argument("--streams", type=int, default=200, help="open at once (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="upgrades") as folder:
        asyncio.run(main_async(args, Path(folder)))


if __name__ == "__main__":
    main()
