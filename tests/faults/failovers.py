"""`python -m faults.failovers`: Sentinel promotes a replica that lacks the last writes, under streams and a backlog.

Three sentinels watch a primary and a replica. The replication stream stops some time before the primary is killed, or
before the network splits: then the old primary lives on, and some clients still write to it. What the replica lacks is
compared with what the primary had, and with what there is after the repair. A row is recorded only if

- each stream equals the reference, each accepted job ended as if nothing had happened, and the audit is clean;
- no job was computed again whose end the new primary only had to be told (`--forgetful` nodes do not tell it: red);
- each cancellation and each deletion of a response stands;
- no job is lost that was submitted with the durability `replicated`;
- no node was declared dead, also with `--clocks`: the replica's clock is so many seconds ahead (needs libfaketime).

Some streams are read over HTTP, from a gateway in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from faults.tools.http_reader import HttpStreams, errors_of
from faults.tools.report import Measurement, quantile, record
from faults.tools.road import POOL, SETTINGS, connected
from faults.tools.sentinel import Replicated
from faults.tools.work import PROMPT, Work, check_settled, new_work
from redis.asyncio import Redis

from penstock.contract.errors import NotConfirmedError, UnavailableError
from penstock.contract.job import ResponseRecord
from penstock.contract.output import TERMINAL_STATES
from penstock.contract.tenant import ApiKey, Terms
from penstock.gpu_node.node import Node
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import connect, with_retries
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.tenants.key_store import KeyStore

NUM_NODES, STEP_S = 2, 0.05
STREAM_TOKENS, SHORT_TOKENS = 200, 8
WARM_UP_S, PATIENCE_S = 3.0, 600.0
CLOCKS_LAG_S, DOWN_AFTER_MS = 0.1, 3000
PAUSE_S = 0.05
"""Between two steps of an operator."""
READ_AT_ONCE = 1000
NUM_KEYS, NUM_RESPONSES = 40, 200
_READ = """
local found = {}
for i, names in ipairs(cmsgpack.unpack(ARGV[1])) do
  local state, cancel = unpack(redis.call('HMGET', names[1], 'state', 'cancel'))
  found[i] = {state, cancel, redis.call('LLEN', names[2]), redis.call('EXISTS', names[3])}
end
return found
"""


async def new_key(store: KeyStore) -> tuple[str, ApiKey]:
    """Make an API key, and wait for busy Sentinels."""
    return await with_retries(lambda: store.add("acme", ("infer",), Terms()), PATIENCE_S)


@dataclass
class Told:
    """What callers were told, and what they saw."""

    works: dict[str, Work] = field(default_factory=dict)
    """Accepted jobs."""
    cancelled: set[str] = field(default_factory=set)
    cancelling: set[str] = field(default_factory=set)
    """Jobs that ran when they were canceled: they may have succeeded before."""
    deleted: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    replicated: set[str] = field(default_factory=set)
    """Jobs of which a replica has told that it has them."""
    pauses: list[float] = field(default_factory=list)
    """The longest pause of each stream, in seconds."""


@dataclass
class Seen:
    """What a server has at one moment."""

    states: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    flagged: set[str] = field(default_factory=set)
    responses: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)

    @classmethod
    async def read(cls, redis: Redis, job_ids: Sequence[str]) -> Seen:
        """Look at all jobs and keys."""
        seen = cls()
        names = [(keys.job(job_id), keys.log(job_id), keys.response(job_id)) for job_id in job_ids]
        # One call, so that it ends before Sentinel promotes a replica and closes the connections to it.
        answers = await cast(Any, redis.eval(_READ, 0, scripts.packed(names)))
        for job_id, (state, cancel, length, has_response) in zip(job_ids, answers, strict=True):
            seen.states[job_id] = (state or b"").decode()
            seen.lengths[job_id] = int(length)
            seen.flagged |= {job_id} if cancel == b"1" else set()
            seen.responses |= {job_id} if has_response else set()
        seen.revoked = {key_id for key_id, key in (await KeyStore(redis).all()).items() if key.is_revoked}
        return seen

    def has_ended(self, job_id: str) -> bool:
        """Whether a job has ended here."""
        return self.states[job_id] in TERMINAL_STATES


class Load:
    """Streams one after the other, a backlog, and an operator who cancels, deletes and revokes, until told to stop."""

    def __init__(self, client: AsyncClient, store: KeyStore, args: argparse.Namespace) -> None:
        self._client = client
        self._store = store
        self._args = args
        self.told = Told()
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    async def begin(self) -> None:
        """Fill the queue, and start the streams and the operator."""
        self._key_ids = [(await new_key(self._store))[1].key_id for _ in range(NUM_KEYS)]
        for number in range(0, self._args.backlog, READ_AT_ONCE):
            count = min(READ_AT_ONCE, self._args.backlog - number)
            await asyncio.gather(*(self._submit() for _ in range(count)))
        record_of = ResponseRecord(b"record", 7_200_000)
        responses = await asyncio.gather(*(self._submit(response=record_of) for _ in range(NUM_RESPONSES)))
        self._tasks = [asyncio.create_task(self._read_streams()) for _ in range(self._args.streams)]
        beside = self._operate(responses), self._go_on_submitting(), self._submit_replicated()
        self._tasks += map(asyncio.create_task, beside)

    async def end(self) -> None:
        """Let all streams end, and wait until all jobs have."""
        self._stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._tasks)

    async def _submit(self, **options: Any) -> Work:
        work = new_work(POOL, SHORT_TOKENS, temperature=0.0, needs_reader=False, **options)
        await self._client.submit_unread(PROMPT, **work.options)
        self.told.works[work.id] = work
        return work

    async def _go_on_submitting(self) -> None:
        while not self._stop.is_set():
            await self._submit()
            await asyncio.sleep(PAUSE_S)

    async def _submit_replicated(self) -> None:
        while not self._stop.is_set():
            with suppress(NotConfirmedError, UnavailableError):  # then the caller was told nothing of a replica
                self.told.replicated.add((await self._submit(durability="replicated")).id)
            await asyncio.sleep(PAUSE_S)

    async def _read_streams(self) -> None:
        while not self._stop.is_set():
            await self._read_stream()

    async def _read_stream(self) -> None:
        work = new_work(POOL, STREAM_TOKENS, temperature=1.0, background=False)
        job = await self._client.submit(PROMPT, **work.options)
        self.told.works[work.id] = work
        last_s, pause_s = time.monotonic(), 0.0
        async for chunk in job.chunks():
            now_s = time.monotonic()
            pause_s, last_s = max(pause_s, now_s - last_s), now_s
            work.see_chunk(chunk)
        self.told.pauses.append(pause_s)

    async def _operate(self, responses: Sequence[Work]) -> None:
        """Cancel jobs, delete responses and revoke keys. The client reads the keys as a gateway does."""
        stored, key_ids = list(responses), list(self._key_ids)
        candidates = [job_id for job_id in self.told.works if job_id not in {work.id for work in responses}]
        while not self._stop.is_set():
            await asyncio.sleep(PAUSE_S)
            await self._client.api_keys()
            job_id = candidates.pop()
            state = await self._client.cancel(job_id)
            if state == "cancelled":
                self.told.cancelled.add(job_id)
            elif state == "cancelling":
                self.told.cancelling.add(job_id)
            if stored:
                work = stored.pop()
                await self._client.responses_of(work.id).delete(work.id, "default")
                self.told.deleted.add(work.id)
            if key_ids and len(candidates) % 4 == 0:
                key_id = key_ids.pop()
                with suppress(UnavailableError):  # then the operator was told nothing
                    await self._store.revoke(key_id)
                    self.told.revoked.add(key_id)
            if not candidates:
                return


def lost(told: Told, before: Seen, after: Seen) -> dict[str, set[str]]:
    """Return what the primary had and the replica lacks, of each kind of operation."""
    jobs = set(before.states)
    return {
        "submit": {one for one in jobs if before.states[one] and not after.states[one]},
        "token": {one for one in jobs if not before.has_ended(one) and after.lengths[one] < before.lengths[one]},
        "finish": {one for one in jobs if before.has_ended(one) and not after.has_ended(one)},
        "cancel": {one for one in told.cancelled if not after.has_ended(one) and one not in after.flagged},
        "response deleted": told.deleted & after.responses,
        "key revoked": told.revoked - after.revoked,
    }


async def computed_again(redis: Redis, job_ids: set[str], after: Seen, kill_ms: float) -> set[str]:
    """Return the jobs that had ended, and that a node has taken and computed again since the kill."""
    again = set[str]()
    for job_id in job_ids:
        if not after.states[job_id]:
            continue  # Unknown to the new primary: its client submits it again, and it runs again.
        found = await cast(Any, redis.hmget(keys.job(job_id), ["taken", "retaken", "finished"]))
        taken, retaken, finished = (float(value or 0) for value in found)
        if kill_ms < max(taken, retaken) < finished:
            again.add(job_id)
    return again


async def wrong_ends(redis: Redis, told: Told) -> list[str]:
    """Wait until all accepted jobs have ended, and return what is wrong with each."""
    broker, wrong = ProducerBroker(redis), list[str]()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            seen = await Seen.read(redis, list(told.works))
            left = [one for one in told.works if not seen.has_ended(one) and seen.states[one]]
            if not left:
                break
            await asyncio.sleep(0.5)
    for job_id, work in told.works.items():
        may_be = {"succeeded"} | ({"cancelled"} if job_id in told.cancelling | told.deleted else set())
        if job_id in told.cancelled:
            may_be = {"cancelled"}
        if seen.states[job_id] not in may_be:
            wrong.append(f"{job_id} is {seen.states[job_id] or 'unknown'}, not {may_be}")
        elif seen.states[job_id] == "succeeded" and job_id not in told.deleted:
            result = await broker.result(job_id, "default")
            expected = work.expected()
            if result is None or [one.token_ids for one in result.choices] != [one.token_ids for one in expected]:
                wrong.append(f"{job_id} has other tokens")
    return wrong


@dataclass
class Outcome:
    """What one fail-over lost, and what was found afterwards."""

    lost: Counter[str]
    told: Counter[str]
    repeated_ends: int
    resubmits: int
    unrevoked: int
    num_http: int
    server: str
    """Name and version of Redis."""
    seconds_to_promotion: float
    longest_pause_s: float
    problems: list[str]


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


async def fail_over(args: argparse.Namespace, kind: Kind) -> Outcome:
    """Run one fail-over."""
    with (
        tempfile.TemporaryDirectory(prefix="failover") as folder,
        Replicated(
            Path(folder), num_sentinels=3, down_after_ms=DOWN_AFTER_MS, stays_primary=kind.splits, clock_s=kind.clock_s
        ) as servers,
    ):
        return await _fail_over(args, servers, kind.lag_s, splits=kind.splits)


async def _fail_over(args: argparse.Namespace, servers: Replicated, lag_s: float, *, splits: bool) -> Outcome:
    # The first sentinel is on the clients' side of a split: it names the old primary until the split ends.
    url = servers.url_of([0]) if splits else servers.url
    keeping = {"failover_keep_s": 0.0} if args.forgetful else {}
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for number in range(NUM_NODES):
            node = running_node(
                url, cast(Any, ReferenceEngine(step_s=STEP_S)), pool=POOL, name=f"node-{number}", **SETTINGS, **keeping
            )
            nodes.append(await stack.enter_async_context(node))
        client = await stack.enter_async_context(connected(url))
        operator, old, new = connect(url), connect(servers.master.url), connect(servers.replica.url)
        for redis in (operator, old, new):
            stack.push_async_callback(redis.aclose)
        load = Load(client, KeyStore(operator), args)
        key, _ = await new_key(KeyStore(operator))
        await load.begin()
        http_works = [new_work(POOL, STREAM_TOKENS, temperature=1.0) for _ in range(args.http)]
        http = await stack.enter_async_context(HttpStreams(url, key, http_works))
        await asyncio.sleep(WARM_UP_S)

        if splits:
            servers.sentinels[0].send_signal(signal.SIGSTOP)  # it learns nothing
        if lag_s:
            servers.link.stop()
            await asyncio.sleep(lag_s)
        replicated = set(load.told.replicated)
        if await asyncio.to_thread(lambda: servers.has_promoted):
            raise BusyMachineError
        before = await Seen.read(old, list(load.told.works))
        began_s, kill_ms = time.monotonic(), 1000 * time.time()
        if splits:
            servers.link.stop()
            after = await Seen.read(new, list(load.told.works))
            await asyncio.to_thread(servers.fail_over, 1)
        else:
            servers.master.kill()
            after = await Seen.read(new, list(before.states))
        try:
            await asyncio.to_thread(servers.wait_for_promotion)
        except AssertionError:
            raise BusyMachineError from None
        promoted_s = time.monotonic() - began_s
        if splits:
            await asyncio.sleep(lag_s)
            before = await Seen.read(old, list(load.told.works))
            after.states = {one: after.states.get(one, "") for one in before.states}
            after.lengths = {one: after.lengths.get(one, 0) for one in before.states}
            servers.sentinels[0].send_signal(signal.SIGCONT)  # the split ends
        gone = lost(load.told, before, after)
        lost_counts = Counter({name: len(ids) for name, ids in gone.items()})
        print(f"  promoted after {promoted_s:.1f} s; lost {dict(lost_counts)}", flush=True)
        await load.end()
        problems = errors_of(work.check for work in load.told.works.values() if work.end) + await http.problems(
            PATIENCE_S
        )
        problems += [f"{one} was replicated, and is lost" for one in replicated if not after.states.get(one)]
        problems += [f"node lost: {event}" for event in await nodes_lost(new)]
        problems += await wrong_ends(new, load.told)
        again = await computed_again(new, gone["finish"], after, kill_ms)
        problems += [f"{job_id} had ended and was computed again" for job_id in again]
        seen = await Seen.read(new, list(load.told.works))
        problems += [f"the response {job_id} is back" for job_id in load.told.deleted & seen.responses]
        unrevoked = load.told.revoked - {one for one, key in (await client.api_keys()).items() if key.is_revoked}
        repeated = sum(node.ledger.counts.repeated_ends for node in nodes)
        resubmits = client.stats.resubmits
        info = await new.info("server")
        server = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
        await check_settled(new, POOL)
    told = load.told
    counts = Counter(
        {
            "submit": len(told.works),
            "token": sum(work.num_seen for work in told.works.values()),
            "finish": sum(before.has_ended(one) for one in before.states),
            "cancel": len(told.cancelled),
            "response deleted": len(told.deleted),
            "key revoked": len(told.revoked),
            "replicated submit": len(replicated),
        }
    )
    numbers = repeated, resubmits, len(unrevoked), len(http.readings), server, promoted_s
    return Outcome(lost_counts, counts, *numbers, max(told.pauses, default=0.0), problems)


async def nodes_lost(redis: Redis) -> list[str]:
    """Return the events of nodes that were declared dead."""
    found = await cast(Any, redis).zrange(f"{keys.prefix(POOL)}:events", 0, -1)
    return [event.decode() for event in found if b"node_lost" in event]


def row_of(outcomes: Sequence[Outcome]) -> dict[str, Measurement]:
    """Return the measurements of all fail-overs of one kind."""
    lost_counts: Counter[str] = sum((one.lost for one in outcomes), Counter())
    told: Counter[str] = sum((one.told for one in outcomes), Counter())
    row: dict[str, Measurement] = {"fail-overs": len(outcomes)}
    row |= {f"{name}: lost of acknowledged": f"{lost_counts[name]} of {told[name]}" for name in told}
    return row | {
        "ends repeated by nodes": sum(one.repeated_ends for one in outcomes),
        "jobs submitted again": sum(one.resubmits for one in outcomes),
        "revocations that no gateway had seen": sum(one.unrevoked for one in outcomes),
        "streams over HTTP": sum(one.num_http for one in outcomes),
        "promotion p50 s": quantile([one.seconds_to_promotion for one in outcomes], 0.5),
        "longest pause of a stream s": max(one.longest_pause_s for one in outcomes),
    }


async def run(args: argparse.Namespace) -> int:
    """Run all kinds of fail-overs. Return the number of problems."""
    num_problems = 0
    kinds = [Kind(lag_s) for lag_s in args.lags]
    kinds += [Kind(max(args.lags, default=0.0), splits=True)] if args.split else []
    kinds += [Kind(CLOCKS_LAG_S, clock_s=clock_s) for clock_s in args.clocks]
    for kind in kinds:
        outcomes = list[Outcome]()
        for number in range(args.rounds):
            print(f"{kind}: {number + 1} of {args.rounds}", flush=True)
            while len(outcomes) == number:
                try:
                    outcomes.append(await fail_over(args, kind))
                except BusyMachineError:
                    print("  the sentinels were too early or too late; once more", flush=True)
            for problem in outcomes[-1].problems:
                print("  PROBLEM", problem, flush=True)
        row = row_of(outcomes)
        print(kind, row, flush=True)
        found = sum(len(one.problems) for one in outcomes)
        num_problems += found
        if not found and args.record:
            load = f"{args.streams} streams, {args.backlog} queued jobs, {outcomes[-1].server}"
            record("Fail-overs by Sentinel", f"{kind}; {load}", row)
    return num_problems


def main() -> None:
    """Run the fail-overs. The exit status is 1 if anything was violated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="fail-overs of each kind")
    parser.add_argument("--lags", type=float, nargs="*", default=[0.0, 0.1, 2.0], help="seconds of lost writes")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--backlog", type=int, default=5000)
    parser.add_argument("--http", type=int, default=20, help="streams over HTTP")
    parser.add_argument("--clocks", type=float, nargs="*", default=[], help="seconds that the replica is ahead")
    parser.add_argument("--split", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--forgetful", action="store_true", help="nodes do not repeat ends: the check must turn red")
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    raise SystemExit(1 if asyncio.run(run(args)) else 0)


if __name__ == "__main__":
    main()
