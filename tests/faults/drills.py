"""Drills of an operator, as scripts: `make drills` runs them and prints what became of each job.

`restore`: Redis loses everything since a backup. `replace`: nodes and gateways are replaced under load, one by one.
`rotate`: the same, with a new password at Redis and its replica, and a fail-over behind it. `certificates`: Redis gets
a certificate of another authority, without a restart of anything. `nginx`, `haproxy` and `caddy`: gateways behind that
proxy are stopped and killed under streams. `calm`, `restart`, `pause`, `maxmemory`, `disk_full`, `rights`, `sentinel`,
`skew`, `overload`, `no_node` and `slow_node`: the states of states.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import redis
from fakes.processes.node_process import NodeProcess
from faults.proxies import PROXIES, Proxied, behind_proxy, make_key
from faults.states import FAULTS, Drilled, drill
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.sentinel import Replicated
from faults.tools.work import check_settled, new_work

from penstock.contract.errors import NotFoundError
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect

POOL = "drill"
STEP_S = 0.01
NUM_TOKENS = 200
NODE: dict[str, Any] = {"pool": POOL, "step_s": STEP_S, "lease_ms": 3000}


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of jobs and keys after an old append-only file was restored."""

    ended_before: str
    ended_after: str
    ended_after_runs_again_alike: bool
    """A job that was accepted before the backup and ended after it: whether its second run gave the same tokens."""
    accepted_after: str
    repeated_with_its_key: str
    """What the idempotency key of that job finds now."""
    old_api_key: int
    new_api_key: int
    """Status of a request with an API key that was made before, and after the backup."""


async def restore(folder: Path) -> Restored:
    """Take a backup while a job runs, go on, and start Redis from the backup."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisProcess(folder / "redis"))
        stack.enter_context(NodeProcess(server.url, **NODE | {"step_s": STEP_S / 2}))
        gateway = stack.enter_context(GatewayProcess(server.url))
        client = await AsyncClient(server.url).connect()
        first, running = new_work(POOL, 5), new_work(POOL, NUM_TOKENS // 2)
        old_key = await asyncio.to_thread(make_key, server.url, "old")
        await first.read((await client.submit("the gate", **first.options)).chunks())
        job = await client.submit("the gate", **running.options, background=True)
        while (await client.status(job.id)).num_chunks < 5:
            await asyncio.sleep(0.02)
        backup = server.copy_log()

        text_before = (await job.result()).text
        late = await client.submit("the gate", max_tokens=5, idempotency_key="order 7")
        await late.result()
        new_key = await asyncio.to_thread(make_key, server.url, "new")
        await asyncio.to_thread(server.restart_from, backup)

        again = await client.result(running.id)
        repeated = await client.submit("the gate", max_tokens=5, idempotency_key="order 7")
        await repeated.result()
        outcome = Restored(
            ended_before=await _state(client, first.id),
            ended_after=await _state(client, running.id),
            ended_after_runs_again_alike=again.text == text_before,
            accepted_after=await _state(client, late.id),
            repeated_with_its_key="the same job" if repeated.id == late.id else "another job",
            old_api_key=_status(gateway.url, old_key),
            new_api_key=_status(gateway.url, new_key),
        )
        await client.close()
        admin = connect(server.url)
        await check_settled(admin, POOL)
        await admin.aclose()
        return outcome


@dataclass(frozen=True, slots=True)
class Replaced:
    """What became of the jobs while every node and gateway was replaced."""

    accepted: int
    exact: int
    replaced: int


async def replace(folder: Path, *, num_jobs: int = 24) -> Replaced:
    """Replace two nodes, one after the other by SIGTERM, and two gateways likewise, while jobs run."""
    with RedisProcess(folder / "redis") as server:
        return await _replaced(server, server.url, server.url, num_jobs)


@dataclass(frozen=True, slots=True)
class Rotated:
    """What became of the jobs while the password of Redis was changed, and of work after a fail-over behind it."""

    jobs: Replaced
    old_password_works: bool
    """At the primary or at the replica."""
    works_after_failover: bool
    """Whether a node and a client with the new password work at the server that Sentinel promoted."""


async def rotate(folder: Path, *, num_jobs: int = 24) -> Rotated:
    """Give a user a second password, replace all processes by ones that use it, remove the first, and fail over.

    Redis does not replicate its users, so each change is made at the primary and at the replica.
    """
    with Replicated(folder) as servers:
        both = servers.master, servers.replica
        old, new = (servers.url.replace("//", f"//ops:{password}@", 1) for password in ("old", "new"))
        _set_user(both, "on", ">old", "~*", "&*", "+@all")
        _set_user(both, ">new")
        jobs = await _replaced(servers.master, old, new, num_jobs)
        _set_user(both, "<old")
        old_works = any(_accepts(f"redis://ops:old@127.0.0.1:{server.port}") for server in both)
        servers.fail_over()
        await asyncio.to_thread(servers.wait_for_promotion)
        work = new_work(POOL, 5)
        with NodeProcess(new, name="after", **NODE):
            async with AsyncClient(new) as client:
                await work.read((await client.submit("the gate", **work.options)).chunks())
        work.check()
        return Rotated(jobs, old_password_works=old_works, works_after_failover=True)


def _set_user(servers: Sequence[RedisProcess], *rules: str) -> None:
    for server in servers:
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "ops", *rules)


def _accepts(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except (redis.AuthenticationError, redis.ConnectionError):
        return False


@dataclass(frozen=True, slots=True)
class Certified:
    """What became of the jobs while Redis got another certificate; whether clients of the old authority still work."""

    accepted: int
    exact: int
    restarted: int
    old_authority_works: bool


async def certificates(folder: Path, *, num_jobs: int = 24) -> Certified:
    """Give clients both authorities, Redis the new certificate, and then clients the new authority alone.

    All connections are closed after each of the last two steps. A process reads its file of authorities whenever it
    connects, and Redis its certificate at CONFIG SET, so nothing is restarted.
    """
    old, new, trusted = (folder / name for name in ("old.pem", "new.pem", "trusted.pem"))
    for path in (old, new):
        _make_certificate(path)
    shutil.copy(old, trusted)
    port = free_port()
    tls: dict[str, Any] = {"tls-port": port, "tls-cert-file": old, "tls-key-file": old.with_suffix(".key")}
    tls |= {"tls-ca-cert-file": old, "tls-auth-clients": "no"}
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={trusted}"
    with ExitStack() as stack:
        server = stack.enter_context(RedisProcess(folder / "redis", program=redis_with_tls(), **tls))
        admin = stack.enter_context(server.client())
        nodes = [stack.enter_context(NodeProcess(url, name=f"n{number}", **NODE)) for number in range(2)]
        gateway = stack.enter_context(GatewayProcess(url))
        works = [new_work(POOL, NUM_TOKENS) for _ in range(num_jobs)]
        async with AsyncClient(url) as client:
            jobs = [await client.submit("the gate opens by pressure", **work.options) for work in works]
            reading = [asyncio.create_task(work.read(job.chunks())) for work, job in zip(works, jobs, strict=True)]
            for authorities in ((old, new), (new,)):
                await asyncio.sleep(0.3)
                _replace(trusted, b"".join(path.read_bytes() for path in authorities))
                admin.config_set("tls-cert-file", str(new), "tls-key-file", str(new.with_suffix(".key")))
                for kind in ("normal", "pubsub"):
                    admin.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            await asyncio.gather(*reading)
            assert await asyncio.to_thread(_status, gateway.url) == HTTPStatus.OK
        for work in works:
            work.check()
        restarted = sum(not process.is_running for process in (*nodes, gateway))
        return Certified(len(jobs), len(works), restarted, old_authority_works=_accepts(url.replace("trusted", "old")))


def redis_with_tls() -> Path | None:
    """Return the Redis of $PENSTOCK_REDIS_SERVER or of the system: that of `penstock-llm[embedded]` has no TLS."""
    found = os.environ.get("PENSTOCK_REDIS_SERVER") or shutil.which("redis-server", path="/usr/bin:/usr/local/bin")
    return Path(found) if found else None


def _make_certificate(path: Path) -> None:
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={path.stem}"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(path), "-keyout", str(path.with_suffix(".key"))]
    subprocess.run(words, check=True, capture_output=True)


def _replace(path: Path, data: bytes) -> None:
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


async def _replaced(server: RedisProcess, old_url: str, new_url: str, num_jobs: int) -> Replaced:
    with ExitStack() as stack:
        nodes = [stack.enter_context(NodeProcess(old_url, name=f"n{i}", drain_s=0, **NODE)) for i in range(2)]
        gateways = [stack.enter_context(GatewayProcess(old_url)) for _ in range(2)]
        works = [new_work(POOL, NUM_TOKENS) for _ in range(num_jobs)]
        async with AsyncClient(new_url) as client:
            jobs = [await client.submit("the gate opens by pressure", **work.options) for work in works]
            reading = [asyncio.create_task(work.read(job.chunks())) for work, job in zip(works, jobs, strict=True)]
            for number, node in enumerate(nodes):
                await asyncio.sleep(0.3)
                await asyncio.to_thread(node.stop)
                stack.enter_context(NodeProcess(new_url, name=f"m{number}", **NODE))
            for gateway in gateways:
                await asyncio.to_thread(gateway.stop)
                assert _status(stack.enter_context(GatewayProcess(new_url)).url) == HTTPStatus.OK
            await asyncio.gather(*reading)
        for work in works:
            work.check()
        admin = connect(server.url)
        await check_settled(admin, POOL)
        await admin.aclose()
        return Replaced(accepted=len(jobs), exact=len(works), replaced=len(nodes) + len(gateways))


def _status(url: str, key: str = "") -> int:
    if not key:
        return httpx.get(f"{url}/health", timeout=60).status_code
    return httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code


async def _state(client: AsyncClient, job_id: str) -> str:
    try:
        return (await client.status(job_id)).state
    except NotFoundError:
        return "gone"


Outcome = Restored | Replaced | Rotated | Certified | Proxied | Drilled

DRILLS: dict[str, Callable[[Path], Coroutine[Any, Any, Outcome]]] = {
    "restore": restore,
    "replace": replace,
    "rotate": rotate,
    "certificates": certificates,
    **{name: partial(behind_proxy, name) for name in PROXIES},
    **{name: partial(drill, name) for name in FAULTS},
}


def main() -> None:
    """Run the chosen drills, or all of them. Exit with 1 if one lost a stream, or fired other alerts than it lists."""
    parser = argparse.ArgumentParser(prog="make drills")
    parser.add_argument("drills", nargs="*", choices=[*DRILLS, []], help="default: all")
    has_failed = False
    for name in parser.parse_args().drills or DRILLS:
        with tempfile.TemporaryDirectory(prefix=name) as folder:
            outcome = asyncio.run(DRILLS[name](Path(folder)))
            lost = {"lost": outcome.lost} if isinstance(outcome, Drilled) else {}
            print(json.dumps({name: asdict(outcome) | lost}, indent=2), flush=True)
            if isinstance(outcome, Drilled):
                has_failed |= bool(outcome.lost or outcome.missing_alerts or outcome.wrong_alerts)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
