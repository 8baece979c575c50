"""In any order of calls, the counted bytes are those that Redis uses, and none is left when all keys have expired."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar, cast

import pytest
import redis as sync_redis
from fakes.queue.harness import POOL, FakeNode, P, Queue, new_job
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.contract.job import NO_RESPONSE, ResponseRecord, SamplingParams
from penstock.contract.output import Chunk, Outcome, Usage
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import connect
from penstock.queue.broker.job_lists import DeadLetters
from penstock.queue.broker.node import Emission, Taken
from penstock.queue.broker.producer import Submission
from penstock.queue.wire import encode_chunk

T = TypeVar("T")
CONFIG: dict[str, Any] = {
    "lease_ms": 1_000_000,
    "reattach_grace_ms": 500_000_000,
    "abandon_after_ms": 500_000_000,
    "max_losses": 2,
}
OF_JOBS = (
    "job",
    "log",
    "request",
    "result",
    "response",
    "jobs",
    "ended",
    "tagged",
    "metadata",
    "expiry",
    "open",
    "tenant",
    "waiting",
    "queue",
    "requeued",
)
TOKEN_BYTES = 96
"""The most that a chunk of one token takes."""
picks = st.integers(0, 1000)
# Each command of a pipeline costs a test more than it costs Redis, so scripts look at all keys.
_OF_JOBS = """
local kinds = {}
for at = 2, #ARGV do kinds[ARGV[at]] = true end
local function names_of_jobs()
  local found = {}
  for _, name in ipairs(redis.call('KEYS', KEYS[1] .. '*')) do
    if kinds[string.match(name, '^[^:]*', #KEYS[1] + 1)] then found[#found + 1] = name end
  end
  return found
end
"""
_USED_BYTES = f"""{_OF_JOBS}
local used = 0
for _, name in ipairs(names_of_jobs()) do used = used + redis.call('MEMORY', 'USAGE', name, 'SAMPLES', 0) end
return used
"""
_GO_BY = f"""{_OF_JOBS}
local expiry, by_ms = KEYS[1] .. 'expiry', tonumber(ARGV[1])
for _, member in ipairs(redis.call('ZRANGE', expiry, 0, -1)) do redis.call('ZINCRBY', expiry, -by_ms, member) end
for _, name in ipairs(names_of_jobs()) do
  local left = redis.call('PTTL', name)
  if left > by_ms then
    redis.call('PEXPIRE', name, left - by_ms)
  elseif left > 0 then
    redis.call('DEL', name)
  end
end
"""


class MemoryMachine(RuleBasedStateMachine):
    """Drives the scripts and compares their sums with MEMORY USAGE of every key."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.sync = sync_redis.Redis.from_url(self.url)
        self.sync.flushall()
        self.client = connect(self.url)
        self.queue = Queue(self.client)
        self.nodes: dict[str, FakeNode] = {}
        self.held: list[tuple[str, Taken, int]] = []
        self.left: dict[str, int] = {}
        """Tokens that each job may still write."""
        self.names_of, self.num_lost = ["n0", "n1"], 0

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        try:
            found = self.run(audit(AdminBroker(self.client), POOL))
            assert [f for f in found if f.key in ("stored", "reserved", "expiry")] == []
        finally:
            self.run(self.client.aclose())
            self.runner.close()
            self.sync.close()

    @initialize()
    def start(self) -> None:
        for name in self.names_of:
            self.join(name)
        self.submit("a", 100, 40, 1, False, False, 0, 20)

    @rule(
        tenant=st.sampled_from("ab"),
        size=st.sampled_from((10, 1000, 30_000)),
        max_tokens=st.sampled_from((1, 40, 500)),
        n=st.sampled_from((1, 4)),
        is_delayed=st.booleans(),
        has_response=st.booleans(),
        num_tags=st.sampled_from((0, 0, 1, 4)),
        count=st.sampled_from((1, 5, 20)),
    )
    def submit(
        self,
        tenant: str,
        size: int,
        max_tokens: int,
        n: int,
        is_delayed: bool,
        has_response: bool,
        num_tags: int,
        count: int,
    ) -> None:
        for _ in range(count):
            params, delay = SamplingParams(max_tokens=max_tokens, n=n), 3_600_000 if is_delayed else None
            tags = tuple(f"{tag}-{count}" for tag in range(num_tags))
            metadata = {"note": "m" * 400} if num_tags else None
            of_queue: Any = {"not_before_ms": delay, "background": True, "tags": tags, "metadata": metadata}
            job = new_job(tenant=tenant, prompt="x" * size, params=params, **of_queue)
            record = ResponseRecord(b"r" * size, keep_ms=600_000) if has_response else NO_RESPONSE
            self.run(self.queue.producer.submit(Submission(job, 10, response=record)))
            self.left[job.id] = max_tokens * n

    @rule(place=st.sampled_from((0, 1)))
    def take(self, place: int) -> None:
        name = self.names_of[place]
        self.held += [(name, taken, taken.num_chunks) for taken in self.run(self.nodes[name].take()).jobs]

    @precondition(lambda self: self.held)
    @rule(pick=picks, count=st.sampled_from((1, 11, 12, 200)))
    def emit(self, pick: int, count: int) -> None:
        at = pick % len(self.held)
        name, taken, index = self.held[at]
        count = min(count, self.left[taken.job_id])
        chunks = self.chunks(taken, index, count)
        answers = self.run(self.nodes[name].broker.emit([Emission(taken.job_id, taken.lease, index, chunks)]))
        assert next(iter(answers)) in ("OK", "CANCEL", b"OK", b"CANCEL")
        self.held[at] = (name, taken, index + count)
        self.left[taken.job_id] -= count

    @staticmethod
    def chunks(taken: Taken, index: int, count: int) -> tuple[bytes, ...]:
        ids = range(index, index + count)
        return tuple(encode_chunk(Chunk(taken.job_id, i, 0, i, (4000 + i,), " word")) for i in ids)

    @precondition(lambda self: self.held)
    @rule(pick=picks, num_bytes=st.sampled_from((50, 5000)))
    def finish(self, pick: int, num_bytes: int) -> None:
        name, taken, index = self.held.pop(pick % len(self.held))
        last = Emission(taken.job_id, taken.lease, index, ())
        num_bytes = min(num_bytes, 8 * (index + 1))
        self.run(self.nodes[name].broker.finish(last, Outcome("succeeded"), b"r" * num_bytes, usage=Usage(3, index)))

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def give_back(self, pick: int) -> None:
        name, taken, _ = self.held.pop(pick % len(self.held))
        self.run(self.nodes[name].give_back(taken))

    @precondition(lambda self: self.left)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        job_id = list(self.left)[pick % len(self.left)]
        if self.sync.exists(keys.job(job_id)):
            tenant = cast(bytes, self.sync.hget(keys.job(job_id), "tenant")).decode()
            self.run(self.queue.producer.cancel(job_id, tenant))

    @rule(place=st.sampled_from((0, 1)))
    def lose(self, place: int) -> None:
        """The node's jobs are queued again, or become dead letters. Another node comes."""
        name = self.names_of[place]
        self.sync.zadd(f"{P}:nodes", {name: 0})
        self.run(self.queue.sweep(since_last_ms=250_000))
        self.held = [one for one in self.held if one[0] != name]
        self.num_lost += 1
        self.names_of[place] = f"n{place}-{self.num_lost}"
        self.join(self.names_of[place])

    def join(self, name: str) -> None:
        self.nodes[name] = self.run(self.queue.node(name, **CONFIG))

    @rule()
    def purge(self) -> None:
        ids = [member.decode() for member in cast("list[bytes]", self.sync.zrange(f"{P}:dead_letters", 0, -1))]
        self.run(DeadLetters(self.client).purge(ids))

    @rule(days=st.sampled_from((0.002, 2, 8)))
    def expire(self, days: float) -> None:
        """Time goes by for everything that expires, and a sweep follows."""
        self.sync.eval(_GO_BY, 1, f"{P}:", int(days * 86_400_000), *OF_JOBS)
        self.run(self.queue.sweep(since_last_ms=250_000))

    def sums(self, name: str) -> int:
        return sum(map(int, cast("list[bytes]", self.sync.hvals(f"{P}:{name}"))))

    @invariant()
    def counted_bytes_are_used_bytes(self) -> None:
        used = cast(int, self.sync.eval(_USED_BYTES, 1, f"{P}:", "", *OF_JOBS))
        stored = self.sums("stored")
        assert used - stored <= max(0.15 * used, 73_728), (stored, used)
        # Valkey keeps small records in less memory than Redis, for which the bytes are estimated.
        assert stored - used <= max(0.6 * used, 98_304), (stored, used)

    @invariant()
    def reserved_bytes_suffice(self) -> None:
        """Beside what was not counted of a log yet: less than 12 chunks of each running job."""
        records = self.records(taken.job_id for _, taken, _ in self.held)
        for (_, taken, index), record in zip(self.held, records, strict=True):
            if record.get(b"state") == b"running" and record[b"lease"].decode() == taken.lease:
                uncounted = index - int(record.get(b"logged", b"0 0").split()[0])
                assert 0 <= uncounted < 12
                assert int(record[b"reserved"]) >= TOKEN_BYTES * (uncounted + self.left[taken.job_id])

    def records(self, job_ids: Iterable[str]) -> list[dict[bytes, bytes]]:
        pipe = self.sync.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hgetall(keys.job(job_id))
        return pipe.execute()

    @rule()
    def end_everything(self) -> None:
        """Nothing is left of jobs that have ended and expired."""
        for job_id, record in zip(self.left, self.records(self.left), strict=True):
            if record:
                self.run(self.queue.producer.cancel(job_id, record[b"tenant"].decode()))
        for name, taken, index in self.held:
            last = Emission(taken.job_id, taken.lease, index, ())
            self.run(self.nodes[name].broker.finish(last, Outcome("cancelled"), b"", usage=Usage(3, index)))
        self.held = []
        self.expire(8)
        assert self.sync.hgetall(f"{P}:stored") == {}
        assert self.sync.hgetall(f"{P}:reserved") == {}


@pytest.fixture
def machine(redis_url: str) -> type[MemoryMachine]:
    return type("Machine", (MemoryMachine,), {"url": redis_url})


def test_counted_bytes(machine: type[MemoryMachine]) -> None:
    profile = settings(deadline=None, max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    stateful.run_state_machine_as_test(machine, settings=profile)
