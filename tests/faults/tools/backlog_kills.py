"""A backlog that several clients submit and read while processes of every kind are killed at random moments."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from fakes.processes.child_process import ChildProcess
from faults.tools.backlog_client import rows_in
from faults.tools.backlog_entries import Answers, Requests, read_batch, write_batch
from faults.tools.feed_reader import GAP, lines_of
from faults.tools.soak_kills import Fleet
from uuid_utils import uuid7

CLIENT = str(Path(__file__).parent / "backlog_client.py")
FEED = str(Path(__file__).parent / "feed_reader.py")
PARTS = ("python", "python", "http", "batch")
"""The kind of each client. They share the requests."""
_PAUSE_S = 0.5
_SILENT_S = 60.0


class BacklogClient:
    """A client's process. While it is killed, it starts again."""

    def __init__(self, kind: str, requests: Requests, indices: range, folder: Path, *, fleet: Fleet) -> None:
        self.kind = kind
        self._output = folder / f"{indices.start}.out"
        self._process: ChildProcess | None = None
        env = {"PENSTOCK_REDIS_URL": fleet.redis.url}
        if kind == "batch":
            source = folder / f"{indices.start}.jsonl"
            write_batch(source, requests, indices)
            words = ["penstock", "batch", "run", str(source), str(self._output), "--in-flight", "4096", "--in-feed"]
        else:
            # Ids by HTTP are the gateway's, so there the caller names its jobs by keys.
            names = [f"{requests.pool}.{uuid7()}" if kind == "python" else f"key-{index}" for index in indices]
            part: dict[str, Any] = {"pool": requests.pool, "max_tokens": requests.max_tokens}
            part |= {"jobs": dict(zip(indices, names, strict=True)), "output": str(self._output)}
            part |= {"gateways": [gateway.url for gateway in fleet.gateways]} if kind == "http" else {}
            path = folder / f"{indices.start}.json"
            path.write_text(json.dumps(part))
            words, env = [CLIENT], env | {"BACKLOG_PART": str(path)}
        self._start: Callable[[], ChildProcess] = lambda: ChildProcess(words, env)

    @property
    def is_done(self) -> bool:
        """Whether the process has ended well. Raises if it has failed by itself."""
        if self._process is None or self._process.is_running:
            return False
        assert self._process.wait() == 0, f"{self.kind}:\n{self._process.log[-3000:]}"
        return True

    def start(self) -> None:
        """Start the process, for the first time or again."""
        self._process = self._start()

    def kill(self) -> None:
        """Send SIGKILL and start the process again."""
        self.close()
        self.start()

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None:
            self._process.close()

    def answers(self) -> list[tuple[int, str, str]]:
        """Return (number of the request, text, job) of each row that is on disk."""
        return read_batch(self._output) if self.kind == "batch" else rows_in(self._output)


class FeedReader:
    """A process that reads all completions. While it is killed, it starts again."""

    def __init__(self, kind: str, folder: Path, after: str, fleet: Fleet) -> None:
        """`kind`: python or http. `after`: the cursor at which it begins."""
        self.kind = kind
        self._output = folder / f"feed-{kind}.out"
        gateways = [gateway.url for gateway in fleet.gateways] if kind == "http" else []
        path = folder / f"feed-{kind}.json"
        path.write_text(json.dumps({"output": str(self._output), "after": after, "gateways": gateways}))
        self._env = {"PENSTOCK_REDIS_URL": fleet.redis.url, "FEED_READER": str(path)}
        self._process = ChildProcess([FEED], self._env)

    def kill(self) -> None:
        """Send SIGKILL and start the process again."""
        self._check()
        self.close()
        self._process = ChildProcess([FEED], self._env)

    def _check(self) -> None:
        assert self._process.is_running, f"the reader of completions has ended:\n{self._process.log[-3000:]}"

    def close(self) -> None:
        """Kill the process."""
        self._process.close()

    async def until_has(self, number: int) -> None:
        """Wait until the reader has that many completions, or none has come for some seconds."""
        self._check()
        known, since_s = -1, time.monotonic()
        while (
            found := len(lines_of(self._output)) - self.num_gaps
        ) < number and time.monotonic() < since_s + _SILENT_S:
            if found != known:
                known, since_s = found, time.monotonic()
            await asyncio.sleep(_PAUSE_S)

    @property
    def num_gaps(self) -> int:
        """How often Redis told of a loss."""
        return sum(job_id == GAP for _, job_id, _ in lines_of(self._output))

    def problems(self, job_ids: Collection[str]) -> list[str]:
        """Return what contradicts that the reader has got each of these jobs once, and no other one."""
        counts = Counter(job_id for _, job_id, _ in lines_of(self._output) if job_id != GAP)
        lists = {
            "missing": [job_id for job_id in job_ids if job_id not in counts],
            "repeated": [job_id for job_id, number in counts.items() if number > 1],
            "strange": sorted(counts.keys() - set(job_ids)),
        }
        return [f"completions by {self.kind}: {len(ids)} {what}: {ids[:3]}" for what, ids in lists.items() if ids]


async def run_with_kills(
    fleet: Fleet,
    requests: Requests,
    folder: Path,
    rng: random.Random,
    *,
    num_kills: int,
    every_s: float,
    readers: Sequence[FeedReader] = (),
) -> tuple[Answers, Counter[str]]:
    """Run the clients to their end, with kills from the start on. Return the answers and the kills.

    Raises if the backlog ends before the last kill.
    """
    size = -(-requests.number // len(PARTS))
    parts = [range(at, min(at + size, requests.number)) for at in range(0, requests.number, size)]
    clients = [
        BacklogClient(kind, requests, part, folder, fleet=fleet) for kind, part in zip(PARTS, parts, strict=True)
    ]
    started_s, killed = time.perf_counter(), Counter[str]()
    try:
        for client in clients:
            client.start()
        for _ in range(num_kills):
            await asyncio.sleep(rng.uniform(0.3, 1.7) * every_s)
            running = [client for client in clients if not client.is_done]
            assert running, f"the backlog has ended after {killed.total()} kills"
            killed[await _kill_one(fleet, running, readers, rng)] += 1
        while not all(client.is_done for client in clients):
            await asyncio.sleep(_PAUSE_S)
    finally:
        for client in clients:
            client.close()
    answers = Answers(took_s=time.perf_counter() - started_s)
    for client in clients:
        for index, text, job_id in client.answers():
            answers.add(index, text)
            answers.job_ids.append(job_id)
    return answers, killed


async def _kill_one(
    fleet: Fleet, clients: list[BacklogClient], readers: Sequence[FeedReader], rng: random.Random
) -> str:
    kind = rng.choice(("client", "gateway", "node", "redis", *("reader",) * bool(readers)))
    if kind == "reader":
        reader = rng.choice(readers)
        await asyncio.to_thread(reader.kill)
        return f"{reader.kind} reader"
    if kind == "client":
        client = rng.choice(clients)
        await asyncio.to_thread(client.kill)
        return f"{client.kind} client"
    await {"gateway": fleet.kill_gateway, "node": fleet.kill_node, "redis": fleet.kill_redis}[kind](rng)
    return kind
