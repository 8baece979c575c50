"""`penstock keys` makes keys that gateways know, lists them without showing them, and takes them back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from fakes.command import run_command
from fakes.queue.harness import Queue, new_job

from penstock.contract.api_keys import identify
from penstock.contract.output import Outcome, Usage
from penstock.contract.terms import Terms
from penstock.queue.broker.connection import connect
from penstock.queue.broker.key_store import KeyStore
from penstock.queue.broker.node import Emission
from penstock.queue.broker.producer import Submission


def keys(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("keys", *arguments, "--redis-url", redis_url)


async def known_of(redis_url: str):
    redis = connect(redis_url)
    try:
        return await KeyStore(redis).all()
    finally:
        await redis.aclose()


def test_key_is_made_listed_and_revoked(redis_url: str) -> None:
    made = keys(redis_url, "add", "acme", "--max-open-jobs", "7", "--label", "for tests")
    key = made.stdout.strip()
    record = identify(key, asyncio.run(known_of(redis_url)), "")
    assert (record.tenant, record.terms.max_open_jobs, record.scopes) == ("acme", 7, {"infer"})

    listed = keys(redis_url, "list").stdout
    assert listed == f"{record.key_id} acme infer highest_class=standard max_open_jobs=7 for tests\n"
    assert keys(redis_url, "revoke", record.key_id).returncode == 0
    assert keys(redis_url, "list").stdout.startswith(f"{record.key_id} acme revoked")


def test_rights_and_usage_are_shown(redis_url: str) -> None:
    keys(redis_url, "add", "acme", "--highest-class", "interactive", "--memory-percent", "20")
    listed = keys(redis_url, "list").stdout
    assert " acme infer highest_class=interactive memory_percent=20 " in listed
    asyncio.run(use(redis_url))
    assert keys(redis_url, "list").stdout.split()[-1].startswith("kept_bytes=")
    (line,) = keys(redis_url, "usage", "--days", "2").stdout.splitlines()
    assert line.split(maxsplit=1)[1] == "m acme k1 jobs=1 prompt=11 cached=4 completion=7"
    assert "highest" in keys(redis_url, "add", "acme", "--highest-class", "urgent").stderr


async def use(redis_url: str) -> None:
    async with connect(redis_url) as redis:
        queue = Queue(redis)
        node = await queue.node()
        await queue.producer.submit(Submission(new_job(tenant="acme"), 1, terms=Terms(account="k1")))
        taken = await node.take_one()
        last = Emission(taken.job_id, taken.lease, 0, ())
        await node.broker.finish(last, Outcome("done"), b"result", usage=Usage(11, 7, 4))


def test_a_terminal_of_another_encoding_shows_what_it_can(redis_url: str) -> None:
    keys(redis_url, "add", "acme", "--label", "Zoë's")
    command = [sys.executable, "-m", "penstock", "keys", "list", "--redis-url", redis_url]
    listed = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert listed.stdout.endswith(" Zo\\xeb's\n")


def test_wrong_use_says_what_is_wrong(redis_url: str) -> None:
    done = keys(redis_url, "add", "no spaces")
    assert (done.returncode, done.stderr.startswith("penstock: tenant: ")) == (2, True)
    done = keys(redis_url, "add", "acme", "--burst-s", "4000")
    assert (done.returncode, done.stderr.startswith("penstock: burst_s: ")) == (2, True)
    assert "scopes" in keys(redis_url, "add", "acme", "--scope", "root").stderr
    assert keys(redis_url, "revoke", "nobody").returncode == 2
