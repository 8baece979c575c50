"""`penstock dead` lists, shows and retries dead letters."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess

from fakes.command import run_command
from fakes.queue.harness import Queue, new_job

from penstock.contract.job import SamplingParams
from penstock.queue.broker.connection import connect


def dead(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("dead", *arguments, "--redis-url", redis_url)


async def make_dead_letters(redis_url: str, count: int) -> list[str]:
    redis = connect(redis_url)
    queue = Queue(redis)
    await queue.node("watcher")
    adapter = {"name": "sql", "digest": "0" * 32}
    jobs = [new_job(prompt="a secret", params=SamplingParams(max_tokens=7), adapter=adapter) for _ in range(count)]
    for number, job in enumerate(jobs):
        await queue.submit(job)
        for letter in "abc":
            node = await queue.node(f"{letter}{number}")
            await node.take_one()
            await queue.kill(node)
    await (await queue.node("n3")).heartbeat()
    # However long the commands take to start.
    await queue.age("nodes", "n3", -3_600_000)
    await redis.aclose()
    return [job.id for job in jobs]


def test_dead_letters_are_listed_shown_retried_and_purged(redis_url: str) -> None:
    first, second, third = asyncio.run(make_dead_letters(redis_url, 3))
    lines = dead(redis_url, "list").stdout.splitlines()
    assert {line.split()[0] for line in lines} == {first, second, third}
    assert {line.partition(" default ")[2] for line in lines} == {f"1 chunks a{n},b{n},c{n}" for n in range(3)}

    said = dead(redis_url, "show", first, "--json").stdout
    assert "a secret" not in said
    shown = json.loads(said)
    assert [loss["node_id"] for loss in shown["losses"]] == ["a0", "b0", "c0"]
    adapter = {"name": "sql", "digest": "0" * 32}
    assert shown["request"] == {"params": {"max_tokens": 7}, "adapter": adapter, "prompt": "8 long"}
    assert json.loads(dead(redis_url, "show", first, "--prompt", "--json").stdout)["request"]["prompt"] == "a secret"
    text = dead(redis_url, "show", first).stdout
    assert f"job_id             {first}\n" in text and "  prompt             8 long\n" in text
    assert re.search(r"^losses\n  .*a0.*\n  .*b0.*\n  .*c0", text, re.MULTILINE)
    listed = json.loads(dead(redis_url, "list", "--json").stdout)
    assert {letter["job_id"] for letter in listed} == {first, second, third}
    assert {letter["priority"] for letter in listed} == {"standard"}

    old, new = dead(redis_url, "retry", first).stdout.split()
    assert (old == first, new.partition(".")[0]) == (True, "m")

    assert dead(redis_url, "purge", second, first).stdout == "1 deleted\n"
    assert "add --yes" in dead(redis_url, "purge", "--all", "m").stderr
    assert dead(redis_url, "purge", "--all", "m", "--yes").stdout == "1 deleted\n"
    assert dead(redis_url, "list", "--pool", "m").stdout == ""
    assert json.loads(dead(redis_url, "list", "--pool", "m", "--json").stdout) == []


def test_usage_error_is_one_line(redis_url: str) -> None:
    for arguments, says in (
        (("purge",), "give either job ids or --all POOL"),
        (("show", "m.never"), "no dead letter m.never"),
    ):
        done = dead(redis_url, *arguments)
        assert (done.returncode, says in done.stderr) == (2, True)
