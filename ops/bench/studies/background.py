"""Chats alone and beside background work: `python -m bench.studies.background` writes results/background.md.

With `--url` it measures a running server: chats as streams, background work as jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from bench.engines.sse import stream
from bench.machine import describe, revision
from bench.workload import BenchRequest, alike, by_chance
from penstock.cli.demo_model import demo_model
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.records import EngineRequest, StepOutput

RESULTS = Path(__file__).parents[1] / "results"
RATES = (0.5, 2.0, 4.0)
"""Chats a second."""
JOB_SHAPE = 128, 128
"""Tokens in and out of a background request."""
NUM_IN_ENGINE = 64
"""Background requests that the engine holds."""
MODES = ("chats", "both", "background")
STEP_SECONDS = "penstock_engine_step_kind_seconds_total"
WARM_UP_S = 5.0
BACKGROUND_S = 20.0
"""Seconds for which background work alone is measured, at most."""
HEAD = """# Chats beside background work

`{command}` on {cores} cores of {cpu}, {date}, {revision}. Chats of 32–256 tokens in and 32–128 out come by chance,
beside an endless backlog of 128 tokens in and out. {backlog}. {repeats} turns of each mode; times in ms, p50 / p99;
speeds in tokens a second. *Left*: the share of engine time that chats alone leave. *Part*: the background speed beside
chats ÷ (alone × left).

| chats/s | chats | TTFT alone | beside | ITL alone | beside | background alone | beside | left | part |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass
class Turn:
    """What one mode measured at one rate."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    num_background: int = 0
    took_s: float = 0.0
    busy_s: float = 0.0

    def note(self, output: StepOutput, last_s: dict[str, float]) -> None:
        """Count an output of a chat. `last_s`: when each chat was due or got its last token."""
        if output.token_ids:
            at_s = time.perf_counter()
            times = self.first_ms if output.position == 0 else self.gaps_ms
            times.append((at_s - last_s[output.request_id]) * 1e3)
            last_s[output.request_id] = at_s


_prompts = itertools.count()
"""Seeds of prompts. No prompt comes twice, or the prefix cache would have it."""


def chats(per_s: float, turn_s: float, seed: int) -> list[BenchRequest]:
    """Return the chats of a turn. Turns of the same seed differ in the contents of the prompts alone."""
    rng = random.Random(seed)
    shapes = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(max(1, round(per_s * turn_s)))]
    requests = [alike(1, *shape, seed=next(_prompts))[0] for shape in shapes]
    return by_chance(requests, per_s=per_s, seed=seed)


def run_engine(engine: Engine, asked: list[BenchRequest], turn_s: float, *, background: bool, turn: Turn) -> None:
    """Run one turn on an engine."""
    start_s, coming, number, open_jobs = time.perf_counter(), list(asked), 0, set[str]()
    last_s: dict[str, float] = {}
    busy_before = sum(engine.stats().kind_seconds.values())
    while (now_s := time.perf_counter() - start_s) < turn_s:
        if engine.has_work():
            engine.wait()  # as a node does, so that a chat that came during a step is in the next one
            now_s = time.perf_counter() - start_s
        while coming and coming[0].at_s <= now_s:
            request, name = coming.pop(0), f"chat-{len(coming)}-{start_s}"
            last_s[name] = start_s + request.at_s
            params = SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=True)
            engine.add(EngineRequest(name, request.prompt, params, seed=0, level=0, tenant="chats"))
        while background and len(open_jobs) < NUM_IN_ENGINE:
            number += 1
            open_jobs.add(name := f"job-{number}-{start_s}")
            engine.add(_background_request(name))
        if not engine.has_work():
            time.sleep(0.0005)
            continue
        for output in engine.step():
            if output.request_id not in open_jobs:
                turn.note(output, last_s)
                continue
            turn.num_background += len(output.token_ids)
            if output.usage is not None:
                open_jobs.remove(output.request_id)
    turn.took_s += time.perf_counter() - start_s
    turn.busy_s += sum(engine.stats().kind_seconds.values()) - busy_before
    _empty(engine, [*open_jobs, *last_s])


def _empty(engine: Engine, names: list[str]) -> None:
    for name in names:
        engine.abort(name)
    while engine.has_work():
        engine.step()


def _background_request(name: str) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=JOB_SHAPE[1], ignore_eos=True)
    prompt = alike(1, JOB_SHAPE[0], 1, seed=next(_prompts))[0].prompt
    return EngineRequest(name, prompt, params, seed=0, level=5, tenant="jobs", background=True)


def counter(metrics_url: str, name: str) -> float:
    """Return a counter of a node, summed over its labels."""
    with urllib.request.urlopen(metrics_url, timeout=30) as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)", text, re.MULTILINE)))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its gateway, the metrics of its node, and the backlog of jobs that it gets."""

    url: str
    metrics_url: str
    model: str
    num_jobs: int
    priority: str | None

    def counters(self) -> tuple[float, float]:
        """Return the seconds that the engine has computed, and the tokens that it has generated."""
        return counter(self.metrics_url, STEP_SECONDS), counter(self.metrics_url, "penstock_engine_decode_tokens_total")

    def submit(self) -> str:
        """Submit a background job and return its id."""
        prompt = alike(1, JOB_SHAPE[0], 1, seed=next(_prompts))[0].prompt
        params = {"max_tokens": JOB_SHAPE[1], "ignore_eos": True, "temperature": 0}
        body = {"model": self.model, "tokens": prompt, "params": params}
        return str(self._call("/v1/jobs", "POST", body | ({"priority": self.priority} if self.priority else {}))["id"])

    def cancel(self, job_id: str) -> None:
        """Cancel a job, unless it has ended."""
        self._call(f"/v1/jobs/{job_id}", "DELETE")

    def wait_until_idle(self) -> None:
        """Wait until the engine computes nothing."""
        before = None
        while (now := self.counters()) != before:
            before = now
            time.sleep(0.5)

    def _call(self, path: str, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
        return found


def run_server(server: Server, asked: list[BenchRequest], turn_s: float, *, background: bool, turn: Turn) -> None:
    """Run one turn on a server. Jobs that are still open at its end are canceled."""
    with ThreadPoolExecutor(4) as threads:
        jobs = list(threads.map(lambda _: server.submit(), range(server.num_jobs if background else 0)))
        if jobs:
            time.sleep(WARM_UP_S)
        busy_s, num_tokens = server.counters()
        start_s = time.perf_counter()
        num_of_chats = asyncio.run(_chat(server, asked, turn_s, turn))
        turn.took_s += time.perf_counter() - start_s
        busy_after_s, num_tokens_after = server.counters()
        turn.busy_s += busy_after_s - busy_s
        turn.num_background += round(num_tokens_after - num_tokens) - num_of_chats
        list(threads.map(server.cancel, jobs))
    server.wait_until_idle()


async def _chat(server: Server, asked: list[BenchRequest], turn_s: float, turn: Turn) -> int:
    """Send the chats of a turn. Return the number of their tokens."""
    start_s, where = time.perf_counter(), urlsplit(server.url)

    async def chat(request: BenchRequest) -> int:
        await asyncio.sleep(request.at_s)
        last_s, times = start_s + request.at_s, turn.first_ms

        def on_event() -> None:
            nonlocal last_s, times
            now_s = time.perf_counter()
            times.append((now_s - last_s) * 1e3)
            last_s, times = now_s, turn.gaps_ms

        sampling = {"max_tokens": request.num_output, "ignore_eos": True, "temperature": 0}
        body = {"model": server.model, "prompt": request.prompt, **sampling}
        return await stream(where.hostname or "", where.port or 80, body, on_event)

    counts = await asyncio.gather(*map(chat, asked))
    await asyncio.sleep(max(0.0, turn_s - (time.perf_counter() - start_s)))
    return sum(counts)


def rows(options: argparse.Namespace) -> Iterator[str]:
    """Measure, and yield the rows of the table."""
    engine = server = None
    if options.url is not None:
        server = Server(options.url, options.metrics_url, options.model, options.backlog, options.priority)
        run_server(server, chats(2.0, WARM_UP_S, seed=99), WARM_UP_S, background=True, turn=Turn())
    else:
        settings: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_gib": 1.0, "max_prefill_ms_beside_decode": 30.0}
        engine = Engine(EngineConfig(model=str(demo_model()), **settings))
        run_engine(engine, chats(2.0, WARM_UP_S, seed=99), WARM_UP_S, background=True, turn=Turn())
    for rate, turn_s in zip(options.rates, options.turn_s, strict=True):
        turns = {mode: Turn() for mode in MODES}
        for number in range(options.repeats):
            for mode in MODES:
                asked = [] if mode == "background" else chats(rate, turn_s, seed=number)
                length_s = min(turn_s, BACKGROUND_S) if mode == "background" else turn_s
                given: dict[str, Any] = {"background": mode != "chats", "turn": turns[mode]}
                if server is not None:
                    run_server(server, asked, length_s, **given)
                elif engine is not None:
                    run_engine(engine, asked, length_s, **given)
        row = _row(rate, turns)
        print(row, flush=True)
        yield row


def _row(rate: float, turns: dict[str, Turn]) -> str:
    alone, both, background = (turns[mode] for mode in MODES)
    speed, beside = (one.num_background / one.took_s for one in (background, both))
    left = 1 - alone.busy_s / alone.took_s
    times = [_shown(getattr(one, name)) for name in ("first_ms", "gaps_ms") for one in (alone, both)]
    num_chats = len(both.first_ms)
    measured = f"{speed:.0f} | {beside:.0f} | {left:.2f} | {beside / (speed * left):.2f}"
    return f"| {rate} | {num_chats} | {' | '.join(times)} | {measured} |"


def _shown(values: list[float]) -> str:
    ordered = sorted(values) or [0.0]
    return f"{median(ordered):.1f} / {ordered[len(ordered) * 99 // 100]:.1f}"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server instead of an engine")
    parser.add_argument("--metrics-url", help="the metrics of the server's node")
    parser.add_argument("--model", default="", help="the model's name at that server")
    parser.add_argument("--backlog", type=int, default=600, help="jobs that wait at that server")
    parser.add_argument("--priority", help="the class of these jobs")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--turn-s", type=float, nargs="+", default=[20.0] * len(RATES), help="one for each rate")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    machine = describe()
    command = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.studies.background"
    facts = {"cores": machine["cores"], "cpu": machine["cpu"], "date": machine["date"], "revision": revision()}
    backlog = "An engine alone; the backlog has a tenant of its own"
    if options.url is not None:
        own_class = f"the class {options.priority}" if options.priority else "the default class, batch"
        backlog = f"Through a server; the backlog is of the chats' tenant and of {own_class}"
    head = HEAD.format(command=command, repeats=options.repeats, backlog=backlog, **facts)
    (RESULTS / "background.md").write_text(head + "\n".join(rows(options)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
