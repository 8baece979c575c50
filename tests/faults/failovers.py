"""`python -m faults.failovers`: Sentinel promotes a replica that lacks the last writes, under streams and a backlog.

Three sentinels watch a primary and a replica. The replication stream stops some time before the primary is killed, or
before the network splits: then the old primary lives on, and some clients still write to it. What the replica lacks is
compared with what the primary had, and with what there is after the repair. Then the old primary becomes the replica,
and the next fail-over follows under the same load (`--in-a-row`). A row is recorded only if

- each stream equals the reference, each accepted job ended as if nothing had happened, and the audit is clean;
- no job was computed again whose end the new primary only had to be told (`--forgetful` nodes do not tell it: red);
- each cancellation and each deletion of a response stands;
- no job is lost that was submitted with the durability `replicated`; without lag nothing at all is lost;
- no node was declared dead, also with `--clocks`: the replica's clock is so many seconds ahead (needs libfaketime).

Some streams are read over HTTP, from a gateway in a process of its own.

`--token-durability replicated`: no stream shows a token that the promoted replica lacks before the repair. What readers
saw is a history (`faults.tools.history`), which `--history FILE` keeps. `--differs`: the engine gives other tokens
at each take, so there is no reference for the streams. At `replicated` none of them may diverge. At `memory` losses
must be found, or the comparison proves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fakes.processes.reference_engine import DifferingEngine, ReferenceEngine
from fakes.processes.running_node import running_node
from faults.tools.failover_load import (
    PATIENCE_S,
    STREAM_TOKENS,
    Load,
    Seen,
    Told,
    computed_again,
    is_repaired,
    lost,
    new_key,
    nodes_lost,
    note_kept,
    oldest_s,
    wrong_ends,
)
from faults.tools.history import Checker, Recorder
from faults.tools.http_reader import HttpStreams, errors_of
from faults.tools.report import Measurement, quantile, record
from faults.tools.road import POOL, SETTINGS, connected
from faults.tools.sentinel import Replicated
from faults.tools.work import check_settled, new_work
from redis.asyncio import Redis

from penstock.contract.durability import MEMORY, REPLICATED
from penstock.gpu_node.node import Node
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

NUM_NODES, STEP_S = 2, 0.05
LEASE_MS = 7000
"""Half of it is less than a fail-over takes, so the pool's time is in doubt after it. The least, 3 s, is too short for
nodes of a busy machine.
"""
WAIT_MS, MAX_WAIT_MS = 500, 3_600_000
WARM_UP_S = 3.0
CLOCKS_LAG_S, DOWN_AFTER_MS = 0.1, 3000
DELIVERED_S = 0.2
"""What the primary had sent to the replica when it died arrives within this time."""
REPAIR_S = 120.0
KEYS_SEEN_S = 3.0
"""Gateways read all keys at least this often."""


@dataclass
class Round:
    """What one fail-over lost, and when that was repaired."""

    gone: dict[str, set[str]]
    num_queued: int
    """Jobs that waited when the primary was lost."""
    num_finished: int
    num_replicated: int
    stopped_s: float
    """How long the replica had got nothing when the primary was lost."""
    promoted_s: float
    oldest_s: float
    repaired_s: float = 0.0
    """From the promotion, or from the end of the split."""
    num_unrevoked: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """Some fail-overs in a row, and what was found at the end."""

    rounds: list[Round]
    told: Counter[str]
    repeated_ends: int
    resubmits: int
    num_http: int
    server: str
    """Name and version of Redis."""
    longest_pause_s: float
    problems: list[str]
    num_unconfirmed: int = 0
    num_diverged: int = 0
    num_chunks: int = 0
    """Chunks that the readers of streams saw."""
    tokens_at_risk: int = 0
    """Of these, how many the promoted replica lacked before the repair."""


class BusyMachineError(Exception):
    """The machine is so busy that sentinels promote the replica before the primary is killed, or not for a minute."""


@dataclass(frozen=True)
class Kind:
    """A kind of fail-over."""

    lag_s: float
    splits: bool = False
    """The old primary lives on, and the clients' side sees it for so long."""
    clock_s: float = 0.0
    """How many seconds the replica's clock is ahead."""

    def __str__(self) -> str:
        clock = f", the replica's clock {self.clock_s:+g} s" if self.clock_s else ""
        return f"{'network split' if self.splits else 'primary killed'}, {self.lag_s:g} s of writes lost{clock}"


class System:
    """Servers, two nodes, a gateway and clients. The servers' roles change with each fail-over."""

    def __init__(
        self,
        kind: Kind,
        servers: Replicated,
        nodes: Sequence[Node],
        client: AsyncClient,
        load: Load,
        http: HttpStreams,
        history: Recorder,
    ) -> None:
        self.history = history
        self.tokens_need_replica = load.tokens_need_replica
        self.kind = kind
        self.servers = servers
        self.nodes = nodes
        self.client = client
        self.load = load
        self.http = http
        self._ended = set[str]()
        """The jobs that had ended when the last primary was lost."""

    async def fail_over(self) -> Round:
        """Lose the primary, and wait until all is repaired. Raises BusyMachineError."""
        servers = self.servers
        async with aclosing(connect(servers.master.url)) as old, aclosing(connect(servers.replica.url)) as new:
            if self.kind.splits:
                servers.sentinels[0].send_signal(signal.SIGSTOP)  # it learns nothing
            await in_sync(old)
            stopped_s = time.monotonic()
            if self.kind.lag_s:
                servers.link.stop()
                await asyncio.sleep(self.kind.lag_s)
            try:
                if await asyncio.to_thread(lambda: servers.has_promoted):
                    raise BusyMachineError
                lose = self._split if self.kind.splits else self._kill
                made = await lose(old, new, stopped_s if self.kind.lag_s else 0.0)
            finally:
                servers.sentinels[0].send_signal(signal.SIGCONT)  # a split ends
            await self._repair(new, *made)
            return made[0]

    def _round(self, before: Seen, after: Seen, lost_at_ms: float, times: tuple[float, float], told: Told) -> Round:
        gone = lost(told, before, after)
        ended = {one for one in before.states if before.has_ended(one)}
        replicated = told.replicated & before.states.keys()
        counts = before.num_queued, len(ended - self._ended), len(replicated)
        self._ended |= ended
        made = Round(gone, *counts, *times, oldest_s(gone, told, before, lost_at_ms))
        made.problems += [f"{one} was replicated, and is lost" for one in replicated if not after.states.get(one)]
        return made

    async def _kill(self, old: Redis, new: Redis, stopped_s: float) -> tuple[Round, Seen, float]:
        """Kill the primary, and wait for the promotion. Return what the replica had, and when the primary died."""
        before = await Seen.read(old, self.load.watched)
        began_s, kill_ms = time.monotonic(), 1000 * time.time()
        self.servers.master.kill()
        told = self.load.told.now()
        await asyncio.sleep(DELIVERED_S)
        after = await Seen.read(new, before.states)
        streams = [one for one, work in told.works.items() if work.num_seen and one in before.states]
        self.history.note("fault", name="primary killed", until=REPLICATED)
        await note_kept(new, self.history, streams)
        promoted_s = await self._promoted(began_s)
        times = began_s - stopped_s if stopped_s else 0.0, promoted_s
        return self._round(before, after, kill_ms, times, told), after, kill_ms

    async def _split(self, old: Redis, new: Redis, stopped_s: float) -> tuple[Round, Seen, float]:
        """Promote the replica beside the primary, which the clients see for a while yet."""
        self.servers.link.stop()
        began_s, kill_ms = time.monotonic(), 1000 * time.time()
        after = await Seen.read(new, self.load.watched)
        await asyncio.to_thread(self.servers.fail_over, 1)
        promoted_s = await self._promoted(began_s)
        await asyncio.sleep(self.kind.lag_s)
        before, told = await Seen.read(old, self.load.watched), self.load.told.now()
        after.states = {one: after.states.get(one, "") for one in before.states}
        after.lengths = {one: after.lengths.get(one, 0) for one in before.states}
        times = time.monotonic() - (stopped_s or began_s), promoted_s
        return self._round(before, after, 1000 * time.time(), times, told), after, kill_ms

    async def _promoted(self, began_s: float) -> float:
        try:
            await asyncio.to_thread(self.servers.wait_for_promotion)
        except AssertionError:
            raise BusyMachineError from None
        return time.monotonic() - began_s

    async def _repair(self, new: Redis, made: Round, after: Seen, kill_ms: float) -> None:
        """Wait until nothing is lost any more, and add to the round what is wrong."""
        began_s, gone = time.monotonic(), made.gone
        lost_ids = set().union(*(gone[kind] for kind in ("submit", "finish", "cancel", "response deleted")))
        counts = {kind: len(ids) for kind, ids in gone.items()}
        when, waited = time.strftime("%T"), made.num_queued
        print(f"  {when} promoted after {made.promoted_s:.1f} s; {waited} jobs waited; lost {counts}", flush=True)
        while not is_repaired(gone, after, await Seen.read_soon(new, lost_ids)):
            if time.monotonic() > began_s + REPAIR_S:
                made.problems.append(f"what was lost is not back after {REPAIR_S:g} s")
                break
            await asyncio.sleep(0.05)
        made.repaired_s = time.monotonic() - began_s
        await asyncio.sleep(max(0.0, began_s + KEYS_SEEN_S - time.monotonic()))
        again = await computed_again(new, gone["finish"], after, kill_ms)
        made.problems += [f"{job_id} had ended and was computed again" for job_id in again]
        deleted, revoked = set(self.load.told.deleted), set(self.load.told.revoked)
        seen = await Seen.read(new, self.load.watched)
        made.problems += [f"the response {job_id} is back" for job_id in deleted & seen.responses]
        # Also those of which the dead primary's answer came after the kill.
        unrevoked = revoked - seen.revoked
        gone["key revoked"] |= unrevoked
        made.num_unrevoked = len(unrevoked)
        self.load.told.revoked -= unrevoked
        if not (self.kind.lag_s or self.kind.splits) and any(gone.values()):
            made.problems.append(f"lost without lag: {gone}")
        self.load.forget_ended(seen)

    async def prepare(self, key: str, num_http: int, *, is_first: bool) -> None:
        """Fill the queue, start streams, and wait until the next fail-over may begin."""
        if not is_first:
            await asyncio.to_thread(self.servers.rejoin)
        async with aclosing(connect(self.servers.master.url)) as redis:
            await self.load.fill(redis)
        if is_first:
            await self.load.begin()
        self.http.begin(key, [new_work(POOL, STREAM_TOKENS, temperature=1.0) for _ in range(num_http)])
        await asyncio.sleep(WARM_UP_S)
        await asyncio.to_thread(self.servers.wait_until_known)

    async def end(self, rounds: list[Round]) -> Outcome:
        """Let all jobs end, and check them."""
        load = self.load
        if rounds and self.tokens_need_replica:
            await asyncio.to_thread(self.servers.rejoin)
        await load.end()
        checked = (work for work in load.told.works.values() if work.end and work.id not in load.told.unchecked)
        problems = await errors_of(work.check for work in checked)
        if load.tokens_need_replica and load.told.num_diverged:
            problems.append(f"{load.told.num_diverged} streams diverged")
        problems += await self.http.problems(PATIENCE_S)
        is_swapped = bool(rounds) and not self.tokens_need_replica
        async with aclosing(connect((self.servers.replica if is_swapped else self.servers.master).url)) as redis:
            problems += [f"node lost: {event}" for event in await nodes_lost(redis)]
            problems += await wrong_ends(redis, load.told)
            info = await redis.info("server")
            await check_settled(redis, POOL)
        is_valkey = "valkey_version" in info
        server = f"Valkey {info['valkey_version']}" if is_valkey else f"Redis {info['redis_version']}"
        told = load.told
        counts = Counter(
            {
                "submit": len(told.works),
                "token": sum(work.num_seen for work in told.works.values()),
                "finish": sum(one.num_finished for one in rounds),
                "cancel": len(told.cancelled),
                "response deleted": len(told.deleted),
                "key revoked": len(told.revoked) + sum(one.num_unrevoked for one in rounds),
                "replicated submit": sum(one.num_replicated for one in rounds),
            }
        )
        repeated = sum(node.held_jobs.counts.repeated_ends for node in self.nodes)
        numbers = repeated, self.client.stats.resubmits, len(self.http.readings), server
        outcome = Outcome(rounds, counts, *numbers, max(told.pauses, default=0.0), problems)
        outcome.num_unconfirmed, outcome.num_diverged = told.unconfirmed, told.num_diverged
        return outcome


async def in_sync(primary: Redis) -> None:
    """Wait until the replica has all that was written until now. On a busy machine it may be far behind."""
    async with asyncio.timeout(PATIENCE_S):
        while not await cast(Any, primary).wait(1, WAIT_MS):
            pass


@asynccontextmanager
async def running(
    args: argparse.Namespace, kind: Kind, servers: Replicated, history: Recorder
) -> AsyncIterator[tuple[System, str]]:
    """Run nodes, a gateway and clients of the servers. Yield them and an API key."""
    # The first sentinel is on the clients' side of a split: it names the old primary until the split ends.
    url = servers.url_of([0]) if kind.splits else servers.url
    options = (
        SETTINGS
        | {"lease_ms": LEASE_MS, "max_wait_ms": MAX_WAIT_MS}
        | ({"failover_keep_s": 0.0} if args.forgetful else {})
    )
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for number in range(NUM_NODES):
            engine = (DifferingEngine if args.differs else ReferenceEngine)(step_s=STEP_S)
            node = running_node(url, cast(Any, engine), pool=POOL, name=f"node-{number}", **options)
            nodes.append(await stack.enter_async_context(node))
        client = await stack.enter_async_context(connected(url))
        operator = await stack.enter_async_context(aclosing(connect(url)))
        key, _ = await new_key(KeyStore(operator))
        load = Load(client, KeyStore(operator), args, history)
        stack.push_async_callback(load.stop)
        http = await stack.enter_async_context(HttpStreams(url))
        yield System(kind, servers, nodes, client, load, http, history), key


async def fail_overs(args: argparse.Namespace, kind: Kind, num_rounds: int) -> Outcome:
    """Run some fail-overs in a row, fewer if the machine is too busy. Raises BusyMachineError if there is none."""
    with (
        tempfile.TemporaryDirectory(prefix="failover") as folder,
        Replicated(
            Path(folder), num_sentinels=3, down_after_ms=DOWN_AFTER_MS, stays_primary=kind.splits, clock_s=kind.clock_s
        ) as servers,
    ):
        file = io.StringIO()
        async with running(args, kind, servers, Recorder(file)) as (system, key):
            rounds = list[Round]()
            while len(rounds) < num_rounds:
                await system.prepare(key, args.http, is_first=not rounds)
                try:
                    rounds.append(await system.fail_over())
                except BusyMachineError:
                    if not rounds or not servers.has_promoted:
                        raise
                    break
            outcome = await system.end(rounds)
        lines = file.getvalue().splitlines()
        if args.history is not None:
            with args.history.open("a") as kept:
                kept.write(file.getvalue())
        outcome.problems += map(str, Checker().check(lines))
        outcome.tokens_at_risk = len(Checker(REPLICATED).check(lines))
        if args.differs and args.token_durability == MEMORY and kind.lag_s and not outcome.tokens_at_risk:
            outcome.problems.append("no loss was found at memory, so the comparison proves nothing")
        outcome.num_chunks = sum('"kind": "chunk"' in line for line in lines)
        return outcome


def row_of(outcomes: Sequence[Outcome]) -> dict[str, Measurement]:
    """Return the measurements of all fail-overs of one kind."""
    rounds = [one for outcome in outcomes for one in outcome.rounds]
    lost_counts = Counter({kind: sum(len(one.gone[kind]) for one in rounds) for kind in rounds[0].gone})
    told: Counter[str] = sum((one.told for one in outcomes), Counter())
    row: dict[str, Measurement] = {"fail-overs": len(rounds)}
    row |= {f"{name}: lost of acknowledged": f"{lost_counts[name]} of {told[name]}" for name in told}
    return row | {
        "ends repeated by nodes": sum(one.repeated_ends for one in outcomes),
        "jobs submitted again": sum(one.resubmits for one in outcomes),
        "revocations that no gateway had seen": sum(one.num_unrevoked for one in rounds),
        "queued jobs, fewest": min(one.num_queued for one in rounds),
        "streams that were not confirmed for 30 s": sum(one.num_unconfirmed for one in outcomes),
        "streams that diverged": sum(one.num_diverged for one in outcomes),
        "streams over HTTP": sum(one.num_http for one in outcomes),
        "chunks that a reader saw and the promoted replica lacked": (
            f"{sum(one.tokens_at_risk for one in outcomes)} of {sum(one.num_chunks for one in outcomes)}"
        ),
        "promotion p50 s": quantile([one.promoted_s for one in rounds], 0.5),
        "longest pause of a stream s": max(one.longest_pause_s for one in outcomes),
        "replica behind, longest s": max(one.stopped_s for one in rounds),
        "oldest call that was lost s": max(one.oldest_s for one in rounds),
        "all repaired, longest s": max(one.repaired_s for one in rounds),
    }


async def run(args: argparse.Namespace) -> int:
    """Run all kinds of fail-overs. Return the number of problems."""
    num_problems = 0
    kinds = [Kind(lag_s) for lag_s in args.lags]
    kinds += [Kind(max(args.lags, default=2.0), splits=True)] if args.split else []
    kinds += [Kind(CLOCKS_LAG_S, clock_s=clock_s) for clock_s in args.clocks]
    for kind in kinds:
        outcomes = list[Outcome]()
        num_done = found = 0
        while num_done < args.rounds:
            in_a_row = 1 if kind.clock_s else min(args.in_a_row, args.rounds - num_done)
            print(f"{kind}: {num_done + 1} to {num_done + in_a_row} of {args.rounds}", flush=True)
            try:
                outcomes.append(await fail_overs(args, kind, in_a_row))
            except BusyMachineError:
                print("  the sentinels were too early or too late; once more", flush=True)
                continue
            num_done += len(outcomes[-1].rounds)
            problems = [*outcomes[-1].problems, *(one for each in outcomes[-1].rounds for one in each.problems)]
            for problem in problems:
                print("  PROBLEM", problem, flush=True)
            found += len(problems)
        row = row_of(outcomes)
        print(kind, row, flush=True)
        num_problems += found
        if not found and args.record:
            level = "" if args.token_durability == MEMORY else f", tokens {args.token_durability}"
            level += ", other tokens at each take" if args.differs else ""
            load = f"{args.streams} streams{level}, {args.backlog} queued jobs, {outcomes[-1].server}"
            record("Fail-overs by Sentinel", f"{kind}; {load}", row)
    return num_problems


def main() -> None:
    """Run the fail-overs. The exit status is 1 if anything was violated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="fail-overs of each kind")
    parser.add_argument("--in-a-row", type=int, default=10, help="fail-overs of one system, under the same load")
    parser.add_argument("--lags", type=float, nargs="*", default=[0.0, 0.1, 2.0], help="seconds of lost writes")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--backlog", type=int, default=5000)
    parser.add_argument("--http", type=int, default=20, help="streams over HTTP, for each fail-over")
    parser.add_argument("--clocks", type=float, nargs="*", default=[], help="seconds that the replica is ahead")
    parser.add_argument("--split", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--forgetful", action="store_true", help="nodes do not repeat ends: the check must turn red")
    parser.add_argument("--token-durability", default=MEMORY, choices=[MEMORY, REPLICATED], help="of streams")
    parser.add_argument("--differs", action="store_true", help="other tokens at each take; implies --http 0")
    parser.add_argument("--history", type=Path, help="a file to which the histories are added, as JSON Lines")
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.http = 0 if args.differs else args.http
    raise SystemExit(1 if asyncio.run(run(args)) else 0)


if __name__ == "__main__":
    main()
