"""Compare every key of a pool with the model: sets, sums, records, logs, and no unexpected keys."""

from __future__ import annotations

from typing import Any, cast

import redis
from fakes.queue.harness import P
from fakes.queue.model import MAX_PAST_LEASES, TERMINAL, ModelJob, QueueModel

from penstock.contract.priority import NUM_LEVELS
from penstock.queue.wire import decode_chunks

OF_THE_POOL = {
    "record",
    "config",
    "schema",
    "nodes",
    "revisions",
    "free",
    "pressure",
    "paces",
    "backlog",
    "readers",
    "sweep",
    "last_take",
    "queued",
    "queued_background",
    "reserved",
}
OF_THE_POOL |= {
    "counts",
    "events",
    "node_events",
    "adapters",
    "stored",
    "lengths",
    "expiry",
    "usage",
    "hour_usage",
    "ended",
}
OF_POLICY = {"virtual_time", "virtual_clock", "debt", "head_served", "background_turns", "reservations", "recent_use"}
Dump = dict[str, Any]
Lives = dict[str, int]
"""Milliseconds until each key expires, -1 if it does not."""
_DUMP = """
local found = {}
for _, name in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind = redis.call('TYPE', name).ok
  local value
  if kind == 'hash' then
    value = redis.call('HGETALL', name)
  elseif kind == 'zset' then
    value = redis.call('ZRANGE', name, 0, -1, 'WITHSCORES')
  elseif kind == 'set' then
    value = redis.call('SMEMBERS', name)
  elseif kind == 'list' then
    value = redis.call('LRANGE', name, 0, -1)
  elseif kind == 'stream' then
    value = redis.call('XRANGE', name, '-', '+')
  else
    value = redis.call('GET', name)
  end
  found[#found + 1] = {name, kind, redis.call('PTTL', name), value}
end
return found
"""


def dump(client: redis.Redis) -> tuple[Dump, Lives]:
    """Return all keys of the pool, without their prefix: their values, and their lives.

    One script reads them. Each command of a pipeline would cost the test more than it costs Redis.
    """
    found: Dump = {}
    lives: Lives = {}
    for name, kind, life_ms, value in cast("list[Any]", client.eval(_DUMP, 0, f"{P}:")):
        known = name.decode().removeprefix(f"{P}:")
        lives[known] = life_ms
        match kind:
            case b"hash":
                found[known] = dict(zip(value[::2], value[1::2], strict=True))
            case b"zset":
                found[known] = list(zip(value[::2], map(float, value[1::2]), strict=True))
            case b"set":
                found[known] = set(value)
            case b"stream":
                found[known] = [(at, dict(zip(pairs[::2], pairs[1::2], strict=True))) for at, pairs in value]
            case _:
                found[known] = value
    return found, lives


def check_sets(found: Dump, model: QueueModel) -> None:
    """Assert that queues, sets and sums agree with the jobs' records. Empty ones do not exist."""
    expected: Dump = {}
    for job in model.jobs.values():
        if job.is_dead:
            expected.setdefault("dead_letters", set()).add(job.job_id)
        listed = "scheduled" if job.state == "queued" and job.is_later else job.state
        name = f"jobs:{job.tenant}" if listed == "queued" else f"jobs:{listed}:{job.tenant}"
        expected.setdefault(name, set()).add(job.job_id)
        if job.state in TERMINAL:
            continue
        expected.setdefault("open", set()).add(job.job_id)
        expected.setdefault(f"tenant:{job.tenant}:open", set()).add(job.job_id)
        if job.state == "running":
            expected.setdefault(f"running:{job.node}", set()).add(job.job_id)
            continue
        if job.has_deadline:
            expected.setdefault("deadlines", set()).add(job.job_id)
        if job.is_later:
            expected.setdefault(f"delayed:{job.level}:{job.tenant}", set()).add(job.job_id)
            expected.setdefault("delayed", set()).add(f"{job.level}:{job.tenant}")
            continue
        kind = "requeued" if job.is_back else "queue"
        expected.setdefault(f"{kind}:{job.level}:{job.tenant}", set()).add(job.job_id)
        expected.setdefault(f"waiting:{job.level}", set()).add((job.job_id, float(job.submitted_ms)))
    per_job = {"job", "log", "request", "result"}
    names = {name for name in found if name.partition(":")[0] not in per_job | OF_THE_POOL | OF_POLICY}
    assert {name: _members(name, found[name]) for name in names} == expected
    backlog = {int(p): int(cost) for p, cost in found.get("backlog", {}).items() if int(cost)}
    costs = {p: sum(job.cost for job in model.queued(p)) for p in range(NUM_LEVELS)}
    assert backlog == {p: cost for p, cost in costs.items() if cost}
    for name, levels in (("queued", range(3)), ("queued_background", range(3, NUM_LEVELS))):
        queued = [job for p in levels for job in model.queued(p)]
        of_tenants = {
            tenant: sum(job.cost for job in queued if job.tenant == tenant) for tenant in {j.tenant for j in queued}
        }
        assert {tenant.decode(): int(cost) for tenant, cost in found.get(name, {}).items()} == of_tenants
    known = {node.name for node in model.nodes.values() if node.is_known}
    assert _members("nodes", found.get("nodes", [])) == known


def check_owned(found: Dump, model: QueueModel) -> None:
    """Assert that each tenant's stored and reserved bytes are those of its jobs' records and keys."""
    kept: dict[str, int] = {}
    reserved: dict[str, int] = {}
    stored: dict[str, int] = {}
    for job in model.jobs.values():
        record = found[f"job:{job.job_id}"]
        if job.state not in TERMINAL:
            _, logged = map(int, record.get(b"logged", b"0 0").split())
            of_record = 5184 if len(record.get(b"past_leases", b"")) > 64 else 1120
            assert int(record[b"held"]) == len(found[f"request:{job.job_id}"]) + of_record + logged
            assert logged <= sum(map(len, found.get(f"log:{job.job_id}", [])))
            kept[job.tenant] = kept.get(job.tenant, 0) + int(record[b"held"])
            if job.state == "running":
                reserved[job.tenant] = reserved.get(job.tenant, 0) + int(record[b"reserved"])
            continue
        sizes = zip(("log", "result", "request", "job"), map(int, record[b"stored"].split()), strict=True)
        lists = {"job": f" {job.state}"}
        stored |= {
            f"{size} {job.tenant} {name}:{job.job_id}{lists.get(name, '')}": size for name, size in sizes if size
        }
        assert int(record[b"stored"].split()[0]) == 256 + sum(map(len, found[f"log:{job.job_id}"]))
    for member, size in stored.items():
        kept[member.split()[1]] = kept.get(member.split()[1], 0) + size
    assert {member.decode() for member, _ in found.get("expiry", [])} == stored.keys()
    assert {tenant.decode(): int(size) for tenant, size in found.get("stored", {}).items()} == kept
    assert {tenant.decode(): int(size) for tenant, size in found.get("reserved", {}).items()} == reserved
    for kind in ("usage:", "hour_usage:"):
        used: dict[str, int] = {}
        for name in [name for name in found if name.startswith(kind)]:
            for what, count in found[name].items():
                used[what.decode()] = used.get(what.decode(), 0) + int(count)
        assert used == model.used


def check_policy(found: Dump, model: QueueModel) -> None:
    """Assert that virtual times, the last served jobs and draining nodes equal the model's, bit by bit."""
    for p, virtual_times in enumerate(model.standing.virtual_times):
        assert _times(found.get(f"virtual_time:{p}", [])) == virtual_times.times
        assert _times(found.get(f"debt:{p}", [])) == virtual_times.debts
        assert float(found.get(f"virtual_clock:{p}", 0)) == virtual_times.now
    for p, expected_ms in enumerate(model.standing.head_served_ms):
        served_ms = int(found.get("head_served", {}).get(str(p).encode(), 0))
        assert abs(served_ms - expected_ms) < 3_600_000
    (used,) = [value for name, value in found.items() if name.startswith("recent_use:")] or [{}]
    assert {tenant.decode(): int(value) for tenant, value in used.items()} == model.standing.use.this
    holds = {node.decode(): value.decode().split() for node, value in found.get("reservations", {}).items()}
    assert {node: held for node, (held, until_ms) in holds.items() if int(until_ms) > 1} == model.holds


def _times(zset: list[tuple[bytes, float]]) -> dict[str, float]:
    return {tenant.decode(): time for tenant, time in zset}


def _members(name: str, value: Any) -> set[Any]:
    if name.startswith("queue:"):
        return {fields[b"id"].decode() for _, fields in value}
    if name.startswith("waiting:"):
        return {(member.decode(), score) for member, score in value}
    return {(item[0] if isinstance(item, tuple) else item).decode() for item in value}


def check_jobs(found: Dump, model: QueueModel) -> None:
    """Assert that each job's record and log equal the model's. Only an ended job's last chunk has the outcome."""
    for job in model.jobs.values():
        _check_record(found[f"job:{job.job_id}"], job)
        log = found.get(f"log:{job.job_id}", [])
        assert log[: len(job.log)] == job.log
        ends = log[len(job.log) :]
        assert len(ends) == (job.state in TERMINAL)
        assert (f"request:{job.job_id}" in found) is (job.state != "succeeded")
        assert (f"result:{job.job_id}" in found) is (job.state == "succeeded")
        chunks = decode_chunks(b"".join(log))
        assert [chunk.index for chunk in chunks] == list(range(len(log)))
        outcomes = [(chunk.outcome.state, chunk.outcome.code) for chunk in chunks if chunk.outcome]
        assert outcomes == [(job.state, job.code)] * len(ends)
    assert {name[4:] for name in found if name.startswith("job:")} == set(model.jobs)


def _check_record(record: dict[bytes, bytes], job: ModelJob) -> None:
    assert {
        "state": record[b"state"].decode(),
        "code": record.get(b"code", b"").decode(),
        "cost": int(record[b"cost"]),
        "node": record[b"node"].decode(),
        "lease": record[b"lease"].decode(),
        "losses": int(record[b"losses"]),
        "preemptions": int(record[b"preemptions"]),
        "past_leases": _past_leases(record),
    } == {
        "state": job.state,
        "code": job.code,
        "cost": job.cost,
        "node": job.node,
        "lease": job.lease,
        "losses": job.losses,
        "preemptions": job.preemptions,
        "past_leases": (len(job.past_leases), job.past_leases[-MAX_PAST_LEASES:]),
    }


def _past_leases(record: dict[bytes, bytes]) -> tuple[int, list[tuple[str, str]]]:
    """Return how many leases ended before the job did, and the node and reason of those that are listed."""
    entries = record.get(b"past_leases", b"").decode().split()
    listed = [(entry.rpartition("@")[0], entry.rpartition(":")[2]) for entry in entries]
    return int(record.get(b"num_past_leases", 0)), listed


def check_lives(lives: Lives, model: QueueModel) -> None:
    """Assert that keys of open jobs do not expire, and keys of ended jobs do."""
    for job in model.jobs.values():
        for kind in ("job", "log", "request", "result"):
            life_ms = lives.get(f"{kind}:{job.job_id}")
            assert life_ms is None or (life_ms > 0) is (job.state in TERMINAL)
