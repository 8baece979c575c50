"""`penstock audit` prints disagreements in Redis, repairs them with an option, and has exit codes for scripts."""

from __future__ import annotations

import asyncio
import json
import subprocess

import redis as sync_redis
from fakes.command import run_command
from fakes.queue.harness import P, Queue

from penstock.queue.broker.connection import connect


def audit(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("audit", "--redis-url", redis_url, *arguments)


async def fill(redis_url: str) -> str:
    redis = connect(redis_url)
    queue = Queue(redis)
    await queue.node()
    job_id = await queue.submit()
    await redis.aclose()
    return job_id


def test_audit_reports_damage_and_repair_removes_it(redis_url: str) -> None:
    job_id = asyncio.run(fill(redis_url))
    assert audit(redis_url).stdout == "m: all keys match the jobs\n"
    with sync_redis.Redis.from_url(redis_url) as client:
        client.zrem(f"{P}:waiting:1", job_id)

    found = audit(redis_url)
    assert (found.returncode, f"I5 missing: waiting:1 {job_id}" in found.stdout) == (1, True)

    (as_json,) = json.loads(audit(redis_url, "--json").stdout)
    expected = {"invariant": "I5", "name": "missing", "key": "waiting:1", "subject": job_id}
    assert as_json["pool"] == "m" and as_json["found"] == as_json["left"]
    assert expected.items() <= as_json["found"][0].items()

    mended = audit(redis_url, "--repair", "--pool", "m")
    assert mended.returncode == 0, mended.stdout
    assert mended.stdout.endswith("m: repaired\nm: all keys match the jobs\n")


def test_unknown_pool_is_a_usage_error(redis_url: str) -> None:
    done = audit(redis_url, "--pool", "nowhere")
    assert (done.returncode, done.stderr) == (2, "penstock: no pool nowhere\n")
