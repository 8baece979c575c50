"""`python -m faults.channels`: plain subscribers in Python and Node read jobs' channels while everything is killed.

The subscribers are the programs of examples/channels, each as the Redis user `subscriber` of its tenant.
What they read must be the text and the end that the record has, each event once and in order. A subscriber of all
channels of a tenant must hear no job of another one. Half of the jobs share a named channel. The campaign prints what
it measured and what was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
from fakes.acl_users import OBSERVER, rules_of, with_passwords
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.report import Measurement, record
from faults.tools.soak_kills import Fleet, kill_now_and_then

from penstock.contract.tenant import Terms
from penstock.queue.broker.connection import connect
from penstock.queue.tenants.key_store import KeyStore

POOL = "channels"
TENANTS = ("one", "two")
LANGUAGES = ("python", "js")
PROGRAMS = Path(__file__).parents[2] / "examples/channels"
PATIENCE_S = 120.0
"""After the last kill, for all jobs to be read."""
END_STATES = ("succeeded", "cancelled", "dead")
"""A job dies whose nodes are killed three times without progress."""

_PYTHON_DRIVER = """
import json, sys, threading
import read_job
read_job.SILENCE_S = 2.0
out = threading.Lock()

def read(job):
    found = []
    try:
        found = list(read_job.events(job["id"], job["channel"]))
        said = {"id": job["id"], "events": found}
    except Exception as error:
        said = {"id": job["id"], "events": found, "error": repr(error)}
    with out:
        print(json.dumps(said), flush=True)

for line in sys.stdin:
    threading.Thread(target=read, args=(json.loads(line),)).start()
"""
_NODE_DRIVER = """
import { createInterface } from "node:readline";
import { events } from "./read_job.mjs";

async function read(job) {
  const found = [];
  let error;
  try {
    for await (const event of events(job.id, job.channel)) found.push(event);
  } catch (caught) {
    error = String(caught);
  }
  console.log(JSON.stringify({ id: job.id, events: found, error }));
}

for await (const line of createInterface({ input: process.stdin })) read(JSON.parse(line));
"""


def write_programs(folder: Path) -> None:
    """Copy the programs, and write what starts them for many jobs, and Node's library."""
    for name in ("read_job.py", "read_job.mjs"):
        shutil.copy(PROGRAMS / name, folder)
    (folder / "drive.py").write_text(_PYTHON_DRIVER)
    (folder / "drive.mjs").write_text(_NODE_DRIVER)
    install = ("npm", "install", "--no-audit", "--no-fund", "--silent", "ioredis@5")
    subprocess.run(install, cwd=folder, check=True, timeout=200)


class Subscribers:
    """A process that reads jobs of one tenant by one of the programs."""

    def __init__(self, folder: Path, language: str, env: dict[str, str]) -> None:
        words = [sys.executable, "drive.py"] if language == "python" else ["node", "drive.mjs"]
        self._process = subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)} | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._collect, daemon=True).start()

    def add(self, job: dict[str, Any]) -> None:
        """Read a job."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self.read[said["id"]] = said

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Ear:
    """Hears every channel of a tenant, as its subscriber may."""

    def __init__(self, url: str, tenant: str) -> None:
        self._url, self._pattern = url, f"penstock:{{*}}:channel:{tenant}:*"
        self.heard: Counter[str] = Counter()
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self._ended:
            try:
                with redis.Redis.from_url(self._url).pubsub() as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.psubscribe(self._pattern)
                    while not self._ended:
                        message = pubsub.get_message(ignore_subscribe_messages=True, timeout=1.0)
                        if message is not None:
                            self.heard[json.loads(message["data"])["id"]] += 1
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.2)

    def close(self) -> None:
        """Stop listening."""
        self._ended = True


@dataclass
class Run:
    """The jobs of a campaign, and the subscribers that read them."""

    url: str
    keys: dict[str, str]
    subscribers: dict[tuple[str, str], Subscribers]
    rng: random.Random
    jobs: dict[str, tuple[str, str]] = field(default_factory=dict)

    async def request(self, http: httpx.AsyncClient, method: str, path: str, tenant: str, **given: Any) -> Any:
        """Return the answer to a call, which is repeated while a gateway or Redis is away."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        while True:
            try:
                answer = await http.request(method, f"{self.url}{path}", headers=headers, timeout=20, **given)
                if answer.status_code < 400:
                    return answer.json()
                if answer.status_code < 500 and answer.status_code != 429:
                    raise AssertionError(f"{path}: {answer.status_code} {answer.text}")
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.3)

    async def submit(self, http: httpx.AsyncClient, number: int, max_tokens: int) -> None:
        """Submit a job and have it read. Each tenth one is canceled later, some while no node runs them."""
        who = tenant, language = TENANTS[number % 2], LANGUAGES[number // 2 % 2]
        channel: Any = "json" if number // 4 % 2 else {"name": f"all-of-{language}"}
        body = {
            "model": POOL,
            "prompt": "abcdef",
            "params": {"max_tokens": self.rng.randint(max_tokens // 2, max_tokens), "seed": number},
            "channel": channel,
            "idempotency_key": f"job {number}",
        }
        job = await self.request(http, "POST", "/v1/jobs", tenant, json=body)
        self.jobs[job["id"]] = who
        self.subscribers[who].add(job)
        if number % 10 == 9:
            await asyncio.sleep(self.rng.uniform(0, 2))
            await self.request(http, "DELETE", f"/v1/jobs/{job['id']}", tenant)

    def said_of(self, job_id: str) -> dict[str, Any] | None:
        """Return what the job's subscriber read, None as long as it reads."""
        return self.subscribers[self.jobs[job_id]].read.get(job_id)

    def ends(self) -> Counter[str]:
        """Return how many jobs were read to which end."""
        read = filter(None, map(self.said_of, self.jobs))
        return Counter(said["events"][-1].get("outcome", {}).get("state", "open") for said in read if said["events"])

    async def problem_of(self, http: httpx.AsyncClient, job_id: str) -> str:
        """Return what is wrong with what was read of a job."""
        if (said := self.said_of(job_id)) is None:
            return "was not read to its end"
        if said.get("error"):
            return f"its reader failed: {said['error']}"
        job = await self.request(http, "GET", f"/v1/jobs/{job_id}", self.jobs[job_id][0])
        events = said["events"]
        text, outcome = "".join(event.get("text", "") for event in events), events[-1].get("outcome")
        if [event["index"] for event in events] != [*range(job["num_chunks"])]:
            return f"{len(events)} events were read, and the record has {job['num_chunks']}"
        if outcome != job["outcome"] or outcome["state"] not in END_STATES:
            return f"ended as {outcome}, and the record says {job['outcome']}"
        choices = (job["result"] or {}).get("choices")
        if choices and text != choices[0]["text"]:
            return "its text is not that of the record"
        return "" if choices or outcome["state"] != "succeeded" else "has no result"


async def run(args: argparse.Namespace) -> list[str]:
    """Run the campaign once. Return what is wrong."""
    rng = random.Random(args.seed)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="channels-") as name, ExitStack() as stack:
        folder = Path(name)
        write_programs(folder)
        lines = [rules_of("subscriber").replace(":default:", f":{tenant}:") for tenant in TENANTS]
        users = [
            line.replace("user subscriber", f"user {tenant}").replace("@SUBSCRIBER_PASSWORD@", tenant)
            for line, tenant in zip(lines, TENANTS, strict=True)
        ]
        (folder / "users.acl").write_text(with_passwords(OBSERVER) + "".join(users))
        acl = str(folder / "users.acl")
        server = stack.enter_context(RedisProcess(folder / "redis", port=free_port(), user="watcher", aclfile=acl))
        async with connect(server.url) as connection:
            store = KeyStore(connection)
            keys = {tenant: (await store.add(tenant, ["infer"], Terms()))[0] for tenant in TENANTS}
        fleet = Fleet(server, POOL, num_nodes=2, num_gateways=2, keeps_ports=True, step_s=args.step_s, max_num_seqs=64)
        stack.callback(fleet.close)
        await fleet.start()
        env = {tenant: {"PENSTOCK_URL": fleet.gateways[0].url, "PENSTOCK_API_KEY": keys[tenant]} for tenant in TENANTS}
        subscribers = {
            (tenant, language): Subscribers(folder, language, env[tenant] | {"REDIS_URL": server.url_of(tenant)})
            for tenant in TENANTS
            for language in LANGUAGES
        }
        ears = {tenant: Ear(server.url_of(tenant), tenant) for tenant in TENANTS}
        for subscriber in subscribers.values():
            stack.callback(subscriber.close)
        for ear in ears.values():
            stack.callback(ear.close)
        return await _disturbed(args, fleet, Run(fleet.gateways[0].url, keys, subscribers, rng), ears)


async def _disturbed(args: argparse.Namespace, fleet: Fleet, work: Run, ears: dict[str, Ear]) -> list[str]:
    begun_s, clock = time.monotonic(), asyncio.get_running_loop().time
    async with httpx.AsyncClient(timeout=60) as http:
        until_s = clock() + args.seconds
        kills = asyncio.create_task(kill_now_and_then(fleet, work.rng, every_s=args.every, until_s=until_s))
        async with asyncio.TaskGroup() as group:
            for number in range(args.jobs):
                group.create_task(work.submit(http, number, args.tokens))
                await asyncio.sleep(args.seconds / args.jobs / 2)
        killed = await kills
        deadline_s = clock() + PATIENCE_S
        while clock() < deadline_s and any(work.said_of(job_id) is None for job_id in work.jobs):
            await asyncio.sleep(0.5)
        problems = [
            f"job {job_id} ({'/'.join(who)}): {problem}"
            for job_id, who in work.jobs.items()
            if (problem := await work.problem_of(http, job_id))
        ]
    for tenant, ear in ears.items():
        foreign = [job_id for job_id in ear.heard if work.jobs.get(job_id, ("",))[0] != tenant]
        problems += [f"the subscriber of {tenant} heard {job_id}" for job_id in foreign]
    num_events = sum(len(said["events"]) for job_id in work.jobs if (said := work.said_of(job_id)))
    num_heard = sum(ear.heard.total() for ear in ears.values())
    if not num_heard:
        problems.append("no message was heard at all")
    measurements: dict[str, Measurement] = {
        "jobs": len(work.jobs),
        "events": num_events,
        "messages heard": num_heard,
        "ends": ", ".join(f"{number} {state}" for state, number in sorted(work.ends().items())),
        "what was killed": ", ".join(f"{number} {kind}" for kind, number in sorted(killed.items())),
        "seconds": round(time.monotonic() - begun_s),
    }
    print(f"{time.strftime('%H:%M:%S')} {measurements}")
    print("\n".join(f"  VIOLATION {problem}" for problem in problems) or "  nothing violated", flush=True)
    if args.record and not problems:
        record("Channels: everything killed", "Python and Node", measurements)
    return problems


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("--record", action="store_true", help="write the measurements to ops/bench/results/faults.md")
    one.add_argument("--jobs", type=int, default=200)
    one.add_argument("--tokens", type=int, default=200, help="most tokens of a job")
    one.add_argument("--seconds", type=float, default=90.0, help="how long processes are killed")
    one.add_argument("--every", type=float, default=4.0, help="seconds between two kills")
    one.add_argument("--step-s", type=float, default=0.05)
    one.add_argument("--seed", type=int, default=secrets.randbits(32))
    return one


def main() -> None:
    """Run the campaign. The exit status tells whether anything was violated."""
    found = asyncio.run(run(parser().parse_args()))
    sys.exit(f"{len(found)} violations" if found else 0)


if __name__ == "__main__":
    main()
