"""`python -m faults.machine_deaths`: the machine of Redis dies under streams, again and again.

A preloaded library notes what Redis synced (`faults.tools.machine_redis`). At each death Redis gets a SIGKILL, and its
files are cut to that. What a server makes of them is compared with what readers were shown, before any node or client
repairs it. With the server dies one of two nodes, and the engine gives other tokens at each take.

- `--token-durability fsync`: each chunk that a reader was shown is in the log.
- `--token-durability memory`: the same comparison must find losses. If it finds none, it proves nothing.

What readers saw is a history (`faults.tools.history`), which `--history FILE` keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fakes.processes.node_process import NodeProcess
from faults.tools.failover_load import note_kept
from faults.tools.history import Checker, Recorder
from faults.tools.machine_redis import MachineRedis
from faults.tools.report import Measurement, record
from faults.tools.road import POOL, SETTINGS, connected
from faults.tools.work import PROMPT, new_work

from penstock.contract.durability import FSYNC, MEMORY
from penstock.contract.errors import NotConfirmedError, PenstockError, UnsupportedDurabilityError
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect
from penstock.runtime.event_loop import cancel_until_done

STEP_S, STREAM_TOKENS, LEASE_MS = 0.05, 200, 3000
DELIVERED_S = 0.2
"""What Redis had sent when it died arrives within this time."""
PAUSE_S = 0.05


class Readers:
    """Callers who read one stream after the other, and what they were shown."""

    def __init__(self, client: AsyncClient, level: str, history: Recorder) -> None:
        self._client, self._level, self._history = client, level, history
        self.shown_since: set[str] = set()
        """Jobs of which a reader was shown a token since the last death."""
        self.counts = Counter[str]()

    async def read(self) -> None:
        """Read until canceled. Raises UnsupportedDurabilityError."""
        while True:
            try:
                await self._read_stream()
            except UnsupportedDurabilityError:
                raise
            except PenstockError as error:
                self.counts[error.code] += 1
                await asyncio.sleep(PAUSE_S)

    async def _read_stream(self) -> None:
        work = new_work(POOL, STREAM_TOKENS, temperature=1.0, background=False)
        job = await self._client.submit(PROMPT, token_durability=self._level, **work.options)
        self._history.note("submit", job=job.id, durability=MEMORY)
        last = -1
        while not work.end:
            try:
                async for chunk in job.chunks():
                    last = chunk.index
                    work.see_chunk(chunk)
                    if chunk.token_ids:
                        self._show(job.id, choice=chunk.choice, position=chunk.position, tokens=chunk.token_ids)
            except NotConfirmedError:
                self.counts["not confirmed"] += 1
                job = await self._client.attach(job.id, after=last, token_durability=self._level)
        self._history.note("end", job=job.id, reader="stream", state=work.end)
        self.counts[work.end] += 1

    def _show(self, job_id: str, **chunk: Any) -> None:
        self._history.note("chunk", job=job_id, reader="stream", durability=self._level, **chunk)
        self.shown_since.add(job_id)
        self.counts["chunks"] += 1


async def kept_after_death(server: MachineRedis, folder: Path, history: Recorder, job_ids: Sequence[str]) -> int:
    """Let the machine die, and note what its files have of some jobs. Return how many bytes were not synced."""
    num_lost = server.die()
    await asyncio.sleep(DELIVERED_S)
    history.note("fault", name="machine died", until=FSYNC)
    copy = server.copy_of(folder)
    await asyncio.to_thread(copy.start)
    redis = connect(copy.url)
    try:
        await note_kept(redis, history, job_ids)
    finally:
        await redis.aclose()
        copy.kill()
    return num_lost


def new_node(url: str, name: str) -> NodeProcess:
    """Start a node whose tokens differ at each take."""
    own = {**SETTINGS, "pool": POOL, "lease_ms": LEASE_MS, "name": name}
    return NodeProcess(url, step_s=STEP_S, differs=True, **own)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the deaths, and return what was found."""
    random.seed(args.seed)
    file, lost_bytes, level = io.StringIO(), list[int](), args.token_durability
    history = Recorder(file)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="machine")))
        options = {"appendfsync": args.appendfsync, "sync_us": args.sync_us}
        server = stack.enter_context(MachineRedis(folder / "primary", **options))
        nodes = [stack.enter_context(new_node(server.url, f"node-{number}")) for number in range(2)]
        client = await stack.enter_async_context(connected(server.url))
        readers = Readers(client, level, history)
        tasks = [asyncio.create_task(readers.read()) for _ in range(args.streams)]
        stack.push_async_callback(cancel_until_done, tasks)
        until_s = time.monotonic() + 60 * args.minutes
        while len(lost_bytes) < args.deaths and time.monotonic() < until_s:
            shown = readers.counts["chunks"] + args.chunks
            while readers.counts["chunks"] < shown:
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(random.uniform(0, 1))
            place = len(lost_bytes) % 2
            nodes[place].kill()
            job_ids = sorted(readers.shown_since)
            lost_bytes.append(await kept_after_death(server, folder / "copy", history, job_ids))
            readers.shown_since.clear()
            await asyncio.to_thread(server.start)
            nodes[place] = await asyncio.to_thread(new_node, server.url, f"node-{place}-{len(lost_bytes)}")
            stack.callback(nodes[place].close)
    lines = file.getvalue().splitlines()
    if args.history is not None:
        args.history.write_text(file.getvalue())
    return {
        "appendfsync": args.appendfsync,
        "token_durability": level,
        "deaths": len(lost_bytes),
        "deaths_with_unsynced_bytes": sum(size > 0 for size in lost_bytes),
        "unsynced_bytes": sum(lost_bytes),
        "readers": dict(readers.counts),
        "broken": [str(one) for one in Checker().check(lines) if FSYNC in one.promise],
        "shown_and_not_in_the_log": sum(FSYNC in one.promise for one in Checker(FSYNC).check(lines)),
    }


def is_as_promised(found: dict[str, Any]) -> bool:
    """Whether nothing that was promised was lost, and at `memory`, whether the comparison can find a loss."""
    if found["token_durability"] == MEMORY:
        return bool(found["shown_and_not_in_the_log"])
    return not found["broken"] and not found["shown_and_not_in_the_log"]


def note(found: dict[str, Any]) -> None:
    """Record what a campaign found."""
    shown = f"{found['shown_and_not_in_the_log']} of {found['readers']['chunks']}"
    measured: dict[str, Measurement] = {
        "deaths": found["deaths"],
        "deaths with bytes that were not synced": found["deaths_with_unsynced_bytes"],
        "chunks that a reader saw and the log lacked": shown,
        "streams that diverged": found["readers"].get("stream_diverged", 0),
    }
    row = f"tokens {found['token_durability']}, appendfsync {found['appendfsync']}"
    record("Deaths of Redis's machine", row, measured)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=400, help="that readers see between two deaths, at least")
    parser.add_argument("--token-durability", default=FSYNC, choices=[MEMORY, FSYNC])
    parser.add_argument(
        "--appendfsync", choices=["always", "everysec"], help="default: always for fsync, else everysec"
    )
    parser.add_argument("--sync-us", type=int, default=0, help="how much longer each sync takes")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further machine dies")
    parser.add_argument("--history", type=Path, help="a file for the history, as JSON Lines")
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(arguments)
    args.appendfsync = args.appendfsync or ("always" if args.token_durability == FSYNC else "everysec")
    return args


def main() -> None:
    """Run the campaign. The exit status is 1 if it did not find what it should."""
    args = parse(sys.argv[1:])
    found = asyncio.run(run(args))
    print(json.dumps(found, indent=2))
    if args.record and is_as_promised(found):
        note(found)
    raise SystemExit(0 if is_as_promised(found) else 1)


if __name__ == "__main__":
    main()
