"""`penstock top` shows the statistics of real nodes, dead nodes, and where their jobs were requeued."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import subprocess
import termios
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess
from fakes.queue.harness import P, Queue
from fakes.waiting import Deadline, wait_until
from redis.asyncio import Redis

from penstock import Client
from penstock.cli.console import Console
from penstock.cli.top.commands import screen_of
from penstock.cli.top.reader import Frame, NodeRow, PoolFrame, TopReader
from penstock.contract.pool import RANKS_PART, NodePressure
from penstock.contract.priority import Priority
from penstock.queue.broker.connection import connect
from penstock.queue.broker.pools import ActivityBroker
from penstock.queue.broker.producer import ProducerBroker


def top(redis_url: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_command("top", *arguments, "--redis-url", redis_url, **env)


def frame_of(redis_url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(top(redis_url, "--json").stdout)
    return found


def node_process(redis_url: str, **settings: Any) -> NodeProcess:
    return NodeProcess(redis_url, pool="m", lease_ms=3000, step_s=0.02, **settings)


@pytest.fixture
def busy(redis_url: str) -> Iterator[str]:
    """A Redis with a node that runs three sequences, and a waiting job."""
    with node_process(redis_url, max_num_seqs=3), Client(redis_url) as client:
        for priority in (Priority.INTERACTIVE, Priority.STANDARD, Priority.STANDARD, Priority.BATCH):
            client.submit("Once upon a time", max_tokens=1500, priority=priority)
        wait_until(lambda: frame_of(redis_url)["pools"][0]["totals"]["num_running"] >= 3)
        yield redis_url


def test_a_view_of_80_columns_has_nodes_classes_and_tenants(busy: str) -> None:
    shown = top(busy, "--once", COLUMNS="80").stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].endswith("1 pool, 1 node")
    assert "…" not in "".join(line for line in lines if line.startswith(("node", "class")))
    (header,) = (line for line in lines if line.startswith("node "))
    assert header.split() == ["node", "state", "KV", "used", "run", "wait", "in/s", "out/s", "batch", "step"]
    row = lines[lines.index(header) + 1].split()
    assert row[1] == "ok"
    assert re.search(r"class +queued +sched +oldest +run +share +tenant +queued +run", shown)
    assert re.search(r"interactive +0 +0 +– +0 +– +default", shown)
    assert re.search(r"interactive, background +0 +0 +– +1", shown)
    assert re.search(r"backlog: 0\.0s foreground, (unknown|[\d.]+s) background", shown)
    assert "node joined" in shown


def test_a_wide_view_has_more_columns(busy: str) -> None:
    lines = top(busy, "--once", COLUMNS="140").stdout.splitlines()
    (header,) = (line for line in lines if line.startswith("node "))
    assert header.split()[-6:] == ["hits", "preempt", "used+cached/blocks", "frag", "memory", "model"]
    assert max(map(len, lines)) <= 140
    assert re.search(r" \d+% +[\d,]+M +[\d,]+M$", lines[lines.index(header) + 1])


def test_json_has_every_number_of_the_view(busy: str) -> None:
    frame = frame_of(busy)
    assert frame.keys() >= {"time_ms", "pools", "num_pools_left_out", "away", "folded_pools", "sets"}
    (pool,) = frame["pools"]
    assert pool.keys() == {
        *("pool", "model", "nodes", "classes", "tenants", "events", "counts", "num_alive", "totals"),
        *("backlog_s", "background_share", "paused"),
    }
    (node,) = pool["nodes"]
    assert node.keys() == {
        *("node_id", "state", "reason", "silent_ms", "num_jobs", "num_running", "num_held_back"),
        *(
            "num_waiting",
            "kv_blocks_used",
            "kv_blocks_cached",
            "kv_blocks_total",
            "tokens_in_per_s",
            "tokens_out_per_s",
        ),
        *("mean_batch", "num_preemptions", "step_ms_p50", "step_ms_p99", "process_bytes", "arithmetic"),
        *("page_utilization", "weight_bytes"),
        *("num_ranks", "num_rank_losses", "stage_idle", "rank_exchange_ms", "rank_wait_ms"),
        *("rank_weight_bytes", "rank_kv_bytes"),
        *("state_slots_total", "state_slots_free", "state_snapshots", "state_hits", "state_evictions"),
        *("window_blocks_total", "window_blocks_free", "window_blocks_cached", "window_evictions"),
        *("prefix_hit_rate", "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"),
    }
    assert (node["state"], node["num_running"]) == ("ok", 3)
    assert node["kv_blocks_total"] > 0
    assert node["process_bytes"] > 1 << 20 and node["weight_bytes"] > 0
    assert 0 < node["page_utilization"] <= 1
    assert [row["name"] for row in pool["classes"]] == [
        *("interactive", "standard", "batch"),
        *("interactive, background", "standard, background", "batch, background"),
    ]
    assert sum(row["num_waiting"] + row["num_running"] for row in pool["classes"]) == 4
    (tenant,) = pool["tenants"]
    assert (tenant["name"], tenant["num_waiting"] + tenant["num_running"]) == ("default", 4)
    assert pool["counts"]["submitted"] == 4


def test_a_killed_node_is_shown_as_dead_and_its_jobs_as_taken_over(redis_url: str) -> None:
    with node_process(redis_url) as first, Client(redis_url) as client:
        client.submit("Once upon a time", max_tokens=2000)
        wait_for(redis_url, lambda pool: pool["totals"]["num_running"] == 1)
        with node_process(redis_url):
            first.kill()
            pool = wait_for(redis_url, lambda pool: pool["counts"]["takeovers"] == 1)
            states = sorted(node["state"] for node in pool["nodes"])
            assert states == ["dead", "ok"]
            assert pool["num_alive"] == 1
            assert [event["kind"] for event in pool["events"]][-2:] == ["node_lost", "takeover"]
            dead = next(node["node_id"] for node in pool["nodes"] if node["state"] == "dead")
            shown = top(redis_url, "--once", "--sort", "state", COLUMNS="80").stdout
    lines = shown.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("node "))
    assert lines[at + 1].split()[1] == "dead"
    assert re.search(rf"{dead}: declared dead \d+ s ago", shown)
    assert re.search(rf"takeover \S+ ← {dead} \(lost\) job …", shown)


def wait_for(redis_url: str, reached: Any) -> dict[str, Any]:
    """Return the pool once the condition holds."""
    pools = wait_until(lambda: frame_of(redis_url)["pools"], lambda found: found and reached(found[0]))
    return dict(pools[0])


async def test_a_node_that_falls_silent_is_dead_although_no_process_sweeps(redis: Redis) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    reader = TopReader(ActivityBroker(redis), ProducerBroker(redis))
    await node.broker.heartbeat(NodePressure("n1", kv_blocks_total=10), free=10, answered_call=0, held=None)
    assert [row.state for row in (await reader.read()).pools[0].nodes] == ["ok"]
    await queue.age("nodes", "n1", 3_600_000)
    (row,) = (await reader.read()).pools[0].nodes
    assert (row.state, row.reason[:10]) == ("dead", "silent for")


async def test_the_age_of_a_lost_node_is_that_of_the_pools_clock(redis: Redis) -> None:
    queue = Queue(redis)
    await queue.node("n1")
    await redis.hset(f"{P}:config", "ahead_ms", str(-7_200_000))
    now_ms = await queue.now_ms() - 7_200_000
    await redis.zadd(f"{P}:events", {f"{now_ms - 5000} node_lost n2 - - -": now_ms})
    frame = await TopReader(ActivityBroker(redis), ProducerBroker(redis)).read()
    assert abs(frame.time_ms - now_ms) < 2000
    (lost,) = (row for row in frame.pools[0].nodes if row.node_id == "n2")
    assert lost.reason in ("declared dead 5 s ago", "declared dead 6 s ago")


async def test_ranks_and_why_a_node_waits_for_them_are_shown(redis: Redis) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    waiting = NodePressure(
        "n1",
        num_ranks=2,
        num_rank_losses=3,
        troubles={RANKS_PART: "are being started again"},
        stage_idle=(0.25, 0.5),
        rank_exchange_ms=1.25,
        rank_wait_ms=12.0,
        rank_weight_bytes=(600 << 20, 500 << 20),
        rank_kv_bytes=(40 << 20, 30 << 20),
    )
    await node.broker.heartbeat(waiting, free=10, answered_call=0, held=None)
    console = Console(width=120, file=StringIO())
    console.print(screen_of(await TopReader(ActivityBroker(redis), ProducerBroker(redis)).read(), console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 ranks a node  ranks lost 3 times" in text
    assert "n1: ranks: are being started again" in text
    spent, held = "stages idle 25%, 50% · a step: exchange 1.2ms, wait 12ms", "weights 600+500M · KV 40+30M"
    assert f"n1: {spent} · {held}" in text


async def test_state_slots_are_shown(redis: Redis) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    slots = {"state_slots_total": 128, "state_slots_free": 116, "state_snapshots": 20}
    told = NodePressure("n1", **slots, state_hits=35, state_evictions=2)
    await node.broker.heartbeat(told, free=10, answered_call=0, held=None)
    console = Console(width=120, file=StringIO())
    console.print(screen_of(await TopReader(ActivityBroker(redis), ProducerBroker(redis)).read(), console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "n1: 12 of 128 state slots held · 20 snapshots, 2 evicted · 35 hits" in text


async def test_blocks_of_windows_are_shown(redis: Redis) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    blocks = {"window_blocks_total": 2208, "window_blocks_free": 2100, "window_blocks_cached": 70}
    await node.broker.heartbeat(NodePressure("n1", **blocks, window_evictions=9), free=10, answered_call=0, held=None)
    console = Console(width=120, file=StringIO())
    console.print(screen_of(await TopReader(ActivityBroker(redis), ProducerBroker(redis)).read(), console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "n1: 108 of 2,208 blocks of windows held · 70 cached, 9 evicted" in text


async def test_rates_are_those_between_two_heartbeats(redis: Redis) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    reader = TopReader(ActivityBroker(redis), ProducerBroker(redis))

    async def rates(num_in: int, num_out: int, silent_ms: int) -> tuple[float, float]:
        told = NodePressure(
            "n1", num_running=1, prefill_tokens=num_in, decode_tokens=num_out, decode_tokens_per_s=7.0, mean_batch=2.0
        )
        await node.broker.heartbeat(told, free=10, answered_call=0, held=None)
        await queue.age("nodes", "n1", silent_ms)
        (row,) = (await reader.read()).pools[0].nodes
        return row.tokens_in_per_s, row.tokens_out_per_s

    # Without an earlier heartbeat, the speed that the node reports is the best estimate.
    assert await rates(1000, 500, silent_ms=2000) == (0.0, 7.0)
    num_in, num_out = await rates(1200, 600, silent_ms=0)
    assert num_in == pytest.approx(100, rel=0.2)
    assert num_out == pytest.approx(50, rel=0.2)


async def test_one_view_needs_few_redis_commands(redis: Redis, redis_url: str) -> None:
    queue = Queue(redis)
    node = await queue.node("n1")
    await node.broker.heartbeat(NodePressure("n1"), free=10, answered_call=0, held=None)
    for _ in range(50):
        await queue.submit()
    reader = TopReader(ActivityBroker(redis), ProducerBroker(redis))
    await reader.read()
    await redis.config_resetstat()
    await reader.read()
    calls = {
        name.removeprefix("cmdstat_"): stats["calls"] for name, stats in (await redis.info("commandstats")).items()
    }
    calls.pop("config|resetstat", None)
    assert not calls.keys() & {"keys", "scan", "sscan", "zscan", "eval", "evalsha", "smembers", "lrange"}
    assert sum(calls.values()) <= 5 + 64


async def keep_busy(redis_url: str) -> None:
    """A node that worked for two classes in the last minute, a queued job of an hour, and a scheduled one."""
    async with connect(redis_url) as redis:
        queue = Queue(redis)
        node = await queue.node("n1", lease_ms=60_000)
        told = NodePressure("n1", drain_cost_per_s=10.0, recent_engine_ms=(0.0, 30_000.0, 0.0, 0.0, 0.0, 10_000.0))
        await node.broker.heartbeat(told, free=0, answered_call=0, held=None)
        await queue.submit(background=True, priority=Priority.BATCH, cost=36_000)
        await queue.submit(background=True, priority=Priority.BATCH, not_before_ms=60_000)


def test_a_view_shows_scheduled_work_the_backlog_and_the_shares_of_engine_time(redis_url: str) -> None:
    asyncio.run(keep_busy(redis_url))
    shown = top(redis_url, "--once", COLUMNS="100").stdout
    assert "0 running · 1 queued · 1 scheduled" in shown
    assert "backlog: 0.0s foreground, 60min background · engine time: 75% foreground, 25% background" in shown
    assert re.search(r"\nstandard +0 +0 +– +0 +75%", shown)
    assert re.search(r"\nbatch, background +1 +1 +\d+\.\ds +0 +25%", shown)


def test_an_empty_redis_and_an_unknown_pool_are_named(redis_url: str) -> None:
    assert "No pool: no node has announced a model" in top(redis_url, "--once").stdout
    done = top(redis_url, "--once", "--pool", "gone")
    assert (done.returncode, done.stderr) == (2, "penstock: no pool 'gone' is announced\n")


def test_keys_sort_and_quit_on_a_terminal(busy: str) -> None:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (30, 80))
    before = termios.tcgetattr(follower)
    env = {**os.environ, "PENSTOCK_REDIS_URL": busy, "TERM": "xterm-256color", "PYTHONSAFEPATH": "1"}
    env.pop("COLUMNS", None)
    words = ("-m", "penstock", "top", "--interval", "0.2")
    with PythonProcess(*words, stdin=follower, stdout=follower, stderr=follower, env=env) as process:
        try:
            assert "sort (node)" in read_until(leader, "pool (all)")
            os.write(leader, b"s")
            read_until(leader, "sort (state)")
            os.write(leader, b"p")
            read_until(leader, "pool (m)")
            os.write(leader, b"q")
            read_until(leader, "\x1b[?1049l")
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert termios.tcgetattr(follower) == before
    os.close(leader)
    os.close(follower)


def read_until(fd: int, text: str) -> str:
    """Return the terminal's output up to and including the text."""
    found, deadline = b"", Deadline()
    while text.encode() not in found:
        deadline.check(text, found)
        if select.select([fd], [], [], 0.2)[0]:
            found += os.read(fd, 1 << 16)
    return found.decode(errors="replace")


def test_a_gpu_adds_columns_to_every_view() -> None:
    rows = (
        NodeRow("busy", "ok", gpu_utilization=0.87, gpu_memory_used_bytes=60 << 30, gpu_memory_total_bytes=80 << 30),
        NodeRow("on-cpu", "ok", prefix_hit_rate=0.5),
    )
    pool = PoolFrame("p", "m", rows, (), (), (), {}, (0.0, 0.0), None)
    shown = {}
    for width in (80, 160):
        console = Console(width=width, file=StringIO())
        console.print(screen_of(Frame(0, (pool,)), console))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        shown[width] = [line.split() for line in text.splitlines() if line.startswith(("node ", "busy", "on-cpu"))]
        assert max(map(len, text.splitlines())) <= width
    assert [line[-1] for line in shown[80]] == ["GPU", "87%", "–"]
    assert [line[-2:] for line in shown[160]] == [["GPU", "memory"], ["87%", "60/80G"], ["–", "–"]]
    assert "50%" in shown[160][2]
