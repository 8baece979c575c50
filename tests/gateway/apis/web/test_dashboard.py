"""The dashboard: its stream of states, and what a browser shows of them. Also the frame of both views."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.processes.node_process import NodeProcess
from fakes.processes.reference_engine import ReferenceTokenizer, reference_tokens, text_of
from fakes.queue.harness import Queue
from fakes.waiting import wait_until
from playwright.sync_api import Page, expect

from penstock.contract.job import Priority, SamplingParams
from penstock.contract.pool import SECONDS
from penstock.gateway.apis.web import dashboard
from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.gateway.apis.web.conftest import REBOUND, Playground, scroll_width
from tests.gateway.conftest import MODEL, EchoEngine, Stack

EVENTS = {"accept": "text/event-stream"}
POOL = "pair"
QUESTION, PARAMS = "tell me", SamplingParams(seed=5, max_tokens=400)
STEP_S = 0.1
"""Seconds per token of the first node, so that it is killed long before it would have ended a job."""


def read_states(url: str, count: int, found: list[dict[str, Any]]) -> None:
    """Read this many states as a viewer."""
    with httpx.stream("GET", f"{url}/dashboard", headers=EVENTS, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        found += [json.loads(line[6:]) for line, _ in zip(lines, range(count), strict=False)]


MAX_LOOKS = 3


def num_reads(redis_url: str) -> int:
    """How many reads of tenants with queued jobs there were, and some of the list of pools.

    Only the dashboard reads tenants. Each gateway looks for bulk actions every 2 s, which scans the list of pools.
    """
    with sync_redis.Redis.from_url(redis_url) as client:
        stats: dict[str, Any] = client.info("commandstats")
    # Of each pool, one read for foreground work and one for background work.
    return int(stats.get("cmdstat_hscan", {"calls": 0})["calls"]) // 2


def test_state_shows_pools_nodes_classes_and_times(http: httpx.Client) -> None:
    body = {"model": "echo-alias", "prompt": "hello", "stream": True}
    http.post("/v1/completions", json=body).raise_for_status()
    state = http.get("/dashboard").json()
    (pool,) = (pool for pool in state["pools"] if pool["pool"] == "echo")
    (node,) = pool["nodes"]
    assert state["redis_up"] is True
    assert state["gateway"]["first_token"]["count"] >= 1
    assert state["gateway"]["per_token"]["p99_ms"] > 0
    assert [row["class"] for row in pool["classes"]] == ["interactive", "standard", "batch"]
    assert node["kv_blocks_total"] == node["kv_blocks_free"] == 4096
    assert pool["counts"]["ended_succeeded"] >= 1
    assert [event["kind"] for event in pool["events"]] == ["node_joined"]


def test_state_counts_running_and_waiting_jobs_by_class_and_tenant(stack: Stack, url: str) -> None:
    engine = EchoEngine()
    engine.step_s = 0.05
    stack.start_node(engine, model="acme/slow", pool="slow", max_num_seqs=1, reattach_grace_ms=500)
    with httpx.Client(base_url=url, timeout=60) as http:
        body = {"model": "acme/slow", "prompt": "x" * 200, "params": {"max_tokens": 200}, "priority": "batch"}
        jobs = [http.post("/v1/jobs", json=body).raise_for_status().json()["id"] for _ in range(3)]

        def tenants() -> list[dict[str, Any]]:
            pools = [pool for pool in http.get("/dashboard").json()["pools"] if pool["pool"] == "slow"]
            assert all(
                sum(row["queued"] for row in pool["classes"]) == pool["tenants"][0]["queued"]
                for pool in pools
                if pool["tenants"]
            )
            return [row for pool in pools for row in pool["tenants"]]

        wait_until(lambda: tenants() == [{"tenant": "default", "running": 1, "queued": 2}])
        for job in jobs:
            http.delete(f"/v1/jobs/{job}").raise_for_status()


def test_viewers_share_a_state_and_none_is_made_without_viewers(
    stack: Stack, engine: EchoEngine, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "STATE_INTERVAL_S", 0.2)
    url = stack.start_gateway()
    with httpx.Client(base_url=url, timeout=60) as http:
        num_pools = len(http.get("/dashboard").json()["pools"])
    before = num_reads(redis_url)
    viewers: list[list[dict[str, Any]]] = [[] for _ in range(6)]
    threads = [threading.Thread(target=read_states, args=(url, 3, found)) for found in viewers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = {state["at_ms"] for found in viewers for state in found}
    made = num_reads(redis_url) - before
    assert len(times) * num_pools + MAX_LOOKS >= made > 0
    assert len(times) < 3 * len(viewers)
    time.sleep(5 * dashboard.STATE_INTERVAL_S)
    assert num_reads(redis_url) - before - made <= MAX_LOOKS < 5 * num_pools


def test_further_viewers_are_refused(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_VIEWERS", 1)
    url = stack.start_gateway()
    with httpx.stream("GET", f"{url}/dashboard", headers=EVENTS, timeout=60) as first:
        states = first.iter_raw()
        next(states)
        refused = httpx.get(f"{url}/dashboard", headers=EVENTS, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
        assert refused.headers["retry-after"] == "10"
    wait_until(lambda: not httpx.head(f"{url}/dashboard", headers=EVENTS, timeout=60).is_error)


@contextmanager
def started(redis_url: str, name: str, step_s: float) -> Iterator[NodeProcess]:
    """A node of the pool in its own process."""
    with NodeProcess(redis_url, name=name, step_s=step_s, pool=POOL, lease_ms=3000, aliases='["pair-model"]') as node:
        yield node


def ask(chat: Playground) -> None:
    chat.choose("pair-model")
    for label, value in {"Seed": PARAMS.seed, "Max tokens": PARAMS.max_tokens}.items():
        chat.page.get_by_label(label).fill(str(value))
    chat.ask(QUESTION)


def test_chat_goes_on_after_its_node_is_killed_and_the_dashboard_shows_the_takeover(
    page: Page, url: str, redis_url: str
) -> None:
    watched = page.context.new_page()
    watched.goto(f"{url}/#dashboard")
    cards = watched.locator(".node", has_text="node-")

    def expect_blocks(name: str, used: str) -> None:
        expect(watched.get_by_role("img", name=re.compile(rf"^KV blocks of {name}-\w+: {used}"))).to_be_visible()

    with started(redis_url, "node-a", STEP_S) as victim:
        expect_blocks("node-a", "0 used, .* free of 4,096")
        chat = Playground(page, url)
        ask(chat)
        expect(chat.answer.locator(".said")).to_have_text(re.compile("[a-z]{20}"))
        # It joins only now, so that the first node has the job.
        with started(redis_url, "node-b", 0.0):
            expect(cards).to_have_count(2)
            expect_blocks("node-a", r"[1-9]\d* used")
            expect_blocks("node-b", "0 used, .* free of 4,096")
            victim.kill()
            assert chat.wait_end() == text_of(reference_tokens("", PARAMS, ReferenceTokenizer().encode(QUESTION)))
            events = watched.locator("section.pool", has_text="pool pair").get_by_role("log", name="Events")
            expect(events).to_contain_text(re.compile(r"node-a-\w+ was lost"))
            expect(events).to_contain_text(re.compile(r"moved from node-a-\w+ to node-b-\w+: its node was lost"))
            expect(cards).to_have_count(1)


def test_dashboard_draws_throughput_and_waits_for_a_lost_gateway(page: Page, stack: Stack, engine: EchoEngine) -> None:
    url = stack.start_gateway()
    page.goto(f"{url}/#dashboard")
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    expect(page.get_by_role("img", name="Running jobs: now 0").first).to_be_visible()
    page.route("**/dashboard", lambda route: route.abort())
    page.get_by_role("link", name="Playground").click()
    page.get_by_role("link", name="Dashboard").click()
    expect(page.get_by_text("The gateway cannot be reached. Trying again")).to_be_visible()
    page.unroute("**/dashboard")
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()


def wide_tables(page: Page) -> int:
    """How many tables are wider than their panels."""
    wide = "tables => tables.filter(one => one.scrollWidth > one.closest('.panel').clientWidth).length"
    return int(page.locator(".panel table").evaluate_all(wide))


async def keep_working(redis_url: str) -> None:
    """A node of a pool of its own, which worked for two classes, a queued job, a scheduled one and an expired one."""
    async with connect(redis_url) as redis:
        queue = Queue(redis)
        node = await queue.node(lease_ms=60_000)
        shares = (0.0, 45_000.0, 0.0, 0.0, 0.0, 15_000.0)
        await node.heartbeat(
            drain_cost_per_s=10.0,
            kv_blocks_total=64,
            kv_blocks_free=32,
            kv_tokens_used=384,
            recent_engine_ms=shares,
            num_jobs=3,
            num_running=2,
            max_num_seqs=16,
            num_waiting=1,
            num_preemptions=5,
            num_swaps=4,
            prefix_lookup_tokens=200,
            prefix_hit_tokens=50,
            prefix_hit_rate=0.75,
            state_slots_total=32,
            state_slots_free=30,
            state_snapshots=7,
            state_hits=5,
            state_evictions=1,
            window_blocks_total=90,
            window_blocks_free=70,
            window_blocks_cached=15,
            window_evictions=4,
            num_ranks=2,
            num_rank_losses=1,
            stage_idle=(0.25, 0.5),
            rank_exchange_ms=1.5,
            rank_wait_ms=12.0,
            weight_bytes=1100 << 20,
            rank_weight_bytes=(600 << 20, 500 << 20),
            rank_kv_bytes=(40 << 20, 30 << 20),
            gpu_utilization=0.5,
            gpu_memory_used_bytes=20 << 30,
            gpu_memory_total_bytes=80 << 30,
            # 98 jobs waited for less than 5 ms, two for less than 10 ms; no other time is known.
            times_of_hour={"queue_s": (98, 2, *(0,) * (len(SECONDS) - 1))},
        )
        late = await queue.submit(background=True, priority=Priority.BATCH, deadline_ms=60_000)
        await queue.age("deadlines", late, 120_000)
        await queue.change(late, deadline=1)
        await queue.sweep(since_last_ms=20_000)
        await queue.submit(background=True, priority=Priority.BATCH, cost=3_000)
        await queue.submit(background=True, priority=Priority.BATCH, not_before_ms=60_000)


def test_page_shows_states_waits_backlog_and_shares_of_engine_time(page: Page, stack: Stack) -> None:
    with EmbeddedRedis() as server:
        stack.call(keep_working(server.url))
        page.goto(f"{stack.start_gateway(redis_url=server.url)}/#dashboard")
        pool = page.locator("section.pool")
        jobs = pool.locator(".panel", has_text="Jobs by class").get_by_role("row")
        expect(jobs.nth(0)).to_have_text("ClassRunningQueuedScheduled")
        expect(jobs.filter(has_text="batch, background")).to_have_text("batch, background011")
        waits = pool.locator(".panel", has_text="Waits and engine time")
        expect(waits.get_by_role("row").nth(0)).to_have_text("ClassOldest waitExpiredShare")
        expect(waits.get_by_role("row", name=re.compile("^standard"))).to_have_text("standard–075 %")
        expect(waits.get_by_role("row", name=re.compile("^batch, background"))).to_have_text(
            re.compile(r"batch, background\d+(\.\d)? m?s125 %")
        )
        expect(pool.locator(".tiles")).to_contain_text("Background backlog5 min")
        for tile in ("Preemptions5", "Preemptions by swap4", "Prefix cache hits25 %"):
            expect(pool.locator(".tiles")).to_contain_text(tile)
        times = pool.locator(".panel", has_text="Times of the last hour")
        expect(times).to_contain_text("Of 100 jobs that nodes took")
        expect(times.get_by_role("row", name="Wait in the queue")).to_have_text("Wait in the queue2.6 ms4.6 ms7.5 ms")
        expect(times.get_by_role("row", name="ITL")).to_have_text("Time between tokens (ITL)–––")
        expect(pool.locator(".node .load")).to_have_text(
            "3 jobs running · 2 of 16 sequences in the batch, 1 waiting · step 0 ms · 2 of 32 state slots held, "
            "7 snapshots, 5 hits, 1 evicted · 20 of 90 blocks of windows held, 15 cached, 4 evicted · "
            "75 % of prompt tokens from the cache in the last minute · "
            "75 % of the held KV slots store a token, 25 % is fragmentation · "
            "model 1,100 MiB · 5 preemptions, 4 by swap · 2 ranks, lost 1 time · stages idle 25 %, 50 % · "
            "a step exchanges for 1.5 ms and waits for 12 ms · weights by rank: 600 + 500 MiB · "
            "KV blocks by rank: 40 + 30 MiB · GPU 50 % busy · 20 of 80 GiB GPU memory"
        )
        waits.get_by_text("What these numbers mean").click()
        expect(waits.get_by_role("term").filter(has_text="Scheduled")).to_be_visible()
        assert wide_tables(page) == 0
        if folder := os.environ.get("PENSTOCK_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/dashboard.png", full_page=True)
        page.set_viewport_size({"width": 360, "height": 740})
        assert (scroll_width(page), wide_tables(page)) == (360, 0)
        if folder:
            page.screenshot(path=f"{folder}/dashboard-phone.png", full_page=True)


def test_state_that_the_page_cannot_show_does_not_end_the_feed(page: Page, url: str, engine: EchoEngine) -> None:
    body = 'data: {"redis_up": true, "pools": [{"pool": "newer"}], "gateway": {"name": "g"}}\n\n'
    page.route("**/dashboard", lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
    page.goto(f"{url}/#dashboard")
    expect(page.get_by_text("This page cannot show the gateway's state. Reload it.")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()


def test_page_of_a_rebound_name_reads_nothing(page: Page, url: str, engine: EchoEngine) -> None:
    """DNS rebinding: a web site points its name at this machine, and the browser takes the gateway for the site."""
    page.goto(f"{url.replace('127.0.0.1', REBOUND)}/#dashboard")
    expect(page.locator("#feed-status")).to_contain_text("The gateway refuses the name in this page's address.")
    for method in ("GET", "POST"):
        assert page.evaluate("async (method) => (await fetch('/v1/jobs', { method })).status", method) == 403


def test_key_that_no_header_can_carry_is_refused_in_words(page: Page, url: str, engine: EchoEngine) -> None:
    page.goto(url)
    page.get_by_role("button", name="API key").click()
    field = page.get_by_label("Key", exact=True)
    for key, words in (
        ("pk-abc\u2026def", "This is no API key"),
        ("pk-abc\u200b", "This is no API key"),
        (" pk-abc ", ""),
    ):
        field.fill(key)
        page.get_by_role("button", name="Save").click()
        assert words in field.evaluate("field => field.validationMessage")
        expect(field).to_be_visible(visible=bool(words))
    assert page.evaluate("sessionStorage.getItem('penstock-key')") == "pk-abc"


def test_page_works_without_what_it_kept(page: Page, url: str, engine: EchoEngine) -> None:
    page.goto(url)
    temperature = page.get_by_label("Temperature")
    for kept in ("{", "null", "[7]", '{"length": 1, "temperature": "0.5"}'):
        page.evaluate("kept => localStorage.setItem('penstock-settings', kept)", kept)
        page.reload()
        expect(temperature).to_be_visible()
    expect(temperature).to_have_value("0.5")


def test_page_works_without_storage(page: Page, url: str, engine: EchoEngine) -> None:
    other = page.context.new_page()
    for name in ("localStorage", "sessionStorage", "indexedDB"):
        other.add_init_script(f"Object.defineProperty(window, '{name}', {{ get() {{ throw new Error('denied'); }} }})")
    chat = Playground(other, url)
    chat.choose(MODEL)
    chat.ask("hello")
    assert chat.wait_end() == "hello"
    expect(other.locator("#chat-note")).to_contain_text("This browser keeps no conversations")
    other.get_by_role("link", name="New chat").click()
    other.get_by_role("link", name="hello").click()
    assert chat.wait_end() == "hello"
    other.get_by_role("button", name="Theme").click()
    expect(other.get_by_role("button", name="Theme")).to_have_text("Theme: light")


def test_theme_follows_the_system_until_the_button_chooses(page: Page, url: str, engine: EchoEngine) -> None:
    page.goto(url)

    def is_dark() -> bool:
        color = str(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        return sum(map(int, re.findall(r"\d+", color))) < 3 * 128

    button = page.get_by_role("button", name="Theme")
    page.emulate_media(color_scheme="dark")
    assert is_dark()
    page.emulate_media(color_scheme="light")
    assert not is_dark()
    for theme, dark in (("light", False), ("dark", True)):
        button.click()
        expect(button).to_have_text(f"Theme: {theme}")
        assert is_dark() is dark
    page.reload()
    assert is_dark()


def test_phone_shows_all_without_horizontal_scrolling(page: Page, url: str, engine: EchoEngine) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    chat = Playground(page, url)
    page.get_by_role("button", name="Settings").click()
    chat.choose(MODEL)
    page.get_by_role("button", name="Settings").click()
    chat.ask("x" * 90 + "\n```\n" + "y" * 120 + "\n```")
    chat.wait_end()
    assert scroll_width(page) == 360
    expect(chat.prompt).to_be_in_viewport()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="Dashboard").click()
    expect(page.get_by_role("heading", name="Nodes and their KV blocks").first).to_be_visible()
    assert scroll_width(page) == 360


WAITS = """async () => {
    const { eventsOf, sleep } = await import("/web/api.js");
    const [set, waits, listeners] = [window.setTimeout, [], new Set()];
    window.setTimeout = (call, ms) => (waits.push(ms), set(call, 0));
    const silent = () => new Response(new ReadableStream());
    for (let i = 0; i < 2; i++) await eventsOf(silent()).next().catch(() => {});
    const signal = { addEventListener: (_, f) => listeners.add(f), removeEventListener: (_, f) => listeners.delete(f) };
    await sleep(7, signal);
    const aborted = await sleep(9, AbortSignal.abort("over")).catch((reason) => reason);
    window.setTimeout = set;
    return [waits, listeners.size, aborted];
}"""


def test_waits_grow_with_silent_streams_and_leave_no_listener(page: Page, url: str, engine: EchoEngine) -> None:
    page.goto(url)
    assert page.evaluate(WAITS) == [[30_000, 60_000, 7], 0, "over"]


ADDED = """() => {
    window.added = [];
    const note = (changes) => changes.forEach((one) => window.added.push(...one.addedNodes));
    const list = { childList: true };
    document.querySelectorAll("[role=log] ol").forEach((log) => new MutationObserver(note).observe(log, list));
}"""


def test_new_event_is_added_before_those_that_stay(page: Page, stack: Stack, url: str, engine: EchoEngine) -> None:
    page.goto(f"{url}/#dashboard")
    events = (
        page.locator("section.pool", has_text="pool echo").get_by_role("log", name="Events").get_by_role("listitem")
    )
    expect(events).to_have_count(1)
    page.evaluate(ADDED)
    stack.start_node(EchoEngine(), model=MODEL, pool="echo", name="later", reattach_grace_ms=500)
    expect(events).to_have_count(2)
    expect(events.first).to_contain_text("later")
    assert page.evaluate("window.added.length") == 1
