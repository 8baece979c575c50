"""Gateways behind the proxies of ops/deploy/proxies, which are stopped and killed one after the other under streams."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.waiting import wait_until
from faults.tools.http_reader import HttpReading, http_client
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess, free_port
from faults.tools.work import Work, check_settled, new_work

from penstock.queue.broker.connection import connect

ProxyName = Literal["nginx", "haproxy", "caddy"]
PROXIES: tuple[ProxyName, ...] = get_args(ProxyName)
FOLDER = Path(__file__).parents[2] / "ops/deploy/proxies"
CONFIGS: dict[ProxyName, str] = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg", "caddy": "Caddyfile"}
POOL = "proxied"
NUM_TOKENS = 400
STEP_S = 0.01
DRAIN_S = 0.5
"""Streams take longer, so that each stop cuts some of them off."""
PATIENCE_S = 60.0


@dataclass
class Proxied:
    """What became of the streams, each of which came back through the proxy whenever it broke."""

    streams: int
    whole: int = 0
    broken: int = 0
    """Times that a stream broke, and continued."""
    bad_gateways: int = 0
    """Answers that the proxy itself made: 502, 503 or 504."""


def program_of(name: ProxyName) -> str | None:
    """Return the path of a proxy's program, or None if it is not installed."""
    return shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/bin")


@contextmanager
def proxy(name: ProxyName, folder: Path, gateways: tuple[int, int]) -> Iterator[str]:
    """Run a proxy with its file of ops/deploy/proxies before gateways on two ports. Yield its URL."""
    port, program = free_port(), program_of(name)
    assert program is not None, f"apt-get install {name}"
    text = (FOLDER / CONFIGS[name]).read_text()
    for old, new in ((":8080", port), (":8001", gateways[0]), (":8002", gateways[1])):
        assert old in text
        text = text.replace(old, f":{new}")
    path = folder / CONFIGS[name]
    path.write_text(text)
    words: dict[ProxyName, list[str]] = {
        "nginx": ["-p", str(folder), "-c", str(path), "-g", f"daemon off; pid {folder}/pid; error_log stderr;"],
        "haproxy": ["-W", "-db", "-f", str(path)],
        "caddy": ["run", "--config", str(path), "--adapter", "caddyfile"],
    }
    with (folder / "proxy.log").open("w") as log:
        env = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        process = subprocess.Popen([program, *words[name]], stderr=log, stdout=log, cwd=folder, env=env)
        try:
            wait_until(
                lambda: httpx.get(f"http://127.0.0.1:{port}/health").is_success,
                what=(folder / "proxy.log").read_text,
                but=httpx.TransportError,
                meanwhile=lambda: process.poll() is None,
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


async def behind_proxy(name: ProxyName, folder: Path, *, num_streams: int = 12) -> Proxied:
    """Stop and kill two gateways by turns, and start each anew on its port, while streams run through a proxy."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisProcess(folder / "redis"))
        stack.enter_context(NodeProcess(server.url, pool=POOL, step_s=STEP_S, reattach_grace_ms=5000))
        # A gateway without keys serves no requests that a proxy passes on.
        key = await asyncio.to_thread(make_key, server.url, "caller")
        ports = free_port(), free_port()
        gateways = [stack.enter_context(_gateway(server.url, port)) for port in ports]
        url = stack.enter_context(proxy(name, folder, ports))
        outcome = Proxied(num_streams)
        async with http_client() as http:
            http.headers["Authorization"] = f"Bearer {key}"
            works = [new_work(POOL, NUM_TOKENS) for _ in range(num_streams)]
            tasks = [asyncio.create_task(_read(http, url, work, outcome)) for work in works]
            for number in range(4):
                await asyncio.sleep(0.7)
                gateway = gateways[number % 2]
                await asyncio.to_thread(gateway.stop if number < 2 else gateway.kill)
                gateways[number % 2] = await asyncio.to_thread(
                    stack.enter_context, _gateway(server.url, ports[number % 2])
                )
            await asyncio.gather(*tasks)
        admin = connect(server.url)
        await check_settled(admin, POOL)
        await admin.aclose()
        return outcome


def make_key(redis_url: str, tenant: str) -> str:
    """Make an API key of a tenant."""
    made = run_command("keys", "add", tenant, "--json", "--redis-url", redis_url)
    return str(json.loads(made.stdout)["key"])


def _gateway(redis_url: str, port: int) -> GatewayProcess:
    return GatewayProcess(redis_url, port=port, drain_s=DRAIN_S)


async def _read(http: httpx.AsyncClient, url: str, work: Work, outcome: Proxied) -> None:
    reading = HttpReading()
    async with asyncio.timeout(PATIENCE_S):
        while not reading.is_whole:
            try:
                await reading.read(http, url, work, key=work.id)
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (502, 503, 504):
                    raise
                outcome.bad_gateways += 1
            if not reading.is_whole:
                outcome.broken += 1
                await asyncio.sleep(0.05)
    reading.check(work)
    outcome.whole += 1
