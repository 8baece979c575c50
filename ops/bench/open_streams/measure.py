"""One measurement: streams are opened, tokens published at an even rate, and arrivals and CPU time counted."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bench.machine import ForeignCpu
from bench.open_streams.node import Load
from bench.open_streams.processes import SSE, Answer, Cores, Process, Stand, resident_kib, stand
from bench.queue_cost.processes import cpu_us

WARM_S = 2.0
START_S = 0.2
TAIL_S = 0.3
FILL_S = 12.0
"""Seconds until the buffers of readers that have stopped are full."""
STOPPED_CHARS = 1000
"""Characters of an event beside readers that stop: long ones fill the buffers soon."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all measurements of a campaign share."""

    seconds: float
    batch: int
    """Streams whose tokens leave in one call of the node."""
    cores: Cores


def measure_rates(
    python: str,
    num_streams: int,
    rates: Sequence[float],
    direct_rates: Sequence[float],
    setup: Setup,
    transport: str = SSE,
    *,
    keeps: bool = False,
) -> list[Answer]:
    """Measure one gateway at several rates of events, over the same open streams. Direct ones leave no logs behind."""
    cores = setup.cores
    with stand(python, 0, cores, keeps=keeps) as running:
        before_kib, before_s = resident_kib(running.gateway.pid), time.monotonic()
        with running.reader(num_streams, cores, transport) as reader:
            opened_s, opened_kib = time.monotonic() - before_s, resident_kib(running.gateway.pid)
            found = [measure(running, reader, rate, setup) for rate in rates]
            found += [measure(running, reader, rate, setup, direct=True) for rate in direct_rates]
            after_kib = resident_kib(running.gateway.pid)
    opening = {
        "opened_per_s": num_streams / opened_s,
        "open_kib_per_stream": (opened_kib - before_kib) / num_streams,
        "kib_per_stream": (after_kib - before_kib) / num_streams,
    }
    return [{"transport": transport, "num_streams": num_streams, **opening, **one} for one in found]


def measure_stopped(python: str, num_streams: int, num_stopped: int, rate: float, setup: Setup) -> Answer:
    """Measure the gaps between the events of most readers, before and after the others stop reading."""
    cores = setup.cores
    with stand(python, STOPPED_CHARS, cores) as running, running.reader(num_streams, cores) as reader:
        quiet = measure(running, reader, rate, setup)
        reader.tell(f"stop {num_stopped}")
        reader.answer()
        measure(running, reader, rate, replace(setup, seconds=FILL_S))
        stopped = measure(running, reader, rate, setup)
    return {
        "num_streams": num_streams,
        "num_stopped": num_stopped,
        "gap_p99_change": stopped["gap_p99_ms"] / quiet["gap_p99_ms"] - 1,
        "quiet": quiet,
        "stopped": stopped,
    }


def measure(running: Stand, reader: Process, per_s: float, setup: Setup, *, direct: bool = False) -> Answer:
    """Publish for a while, and measure after the first WARM_S."""
    start_s = time.monotonic() + START_S
    from_s = start_s + WARM_S
    until_s = from_s + setup.seconds
    load = Load(per_s, setup.batch, start_s, WARM_S + setup.seconds + TAIL_S, direct)
    running.node.tell(json.dumps(asdict(load)))
    reader.tell(f"measure {int(from_s * 1e9)} {int(until_s * 1e9)}")
    pids = {**running.pids, "reader": reader.pid}
    time.sleep(from_s - time.monotonic())
    foreign, before = ForeignCpu(), {name: cpu_us(pid) for name, pid in pids.items()}
    time.sleep(until_s - time.monotonic())
    spent_us = {name: cpu_us(pid) - before[name] for name, pid in pids.items()}
    foreign_share = foreign.share()
    arrived, sent = reader.answer(), running.node.answer()
    if arrived["num_wrong"] or arrived["num_closed"]:
        raise RuntimeError(f"{arrived['num_wrong']} events out of order, {arrived['num_closed']} streams closed")
    num_events = arrived["events_per_s"] * setup.seconds
    return {
        "asked_per_s": per_s,
        "direct": direct,
        **arrived,
        "gateway_us_per_event": spent_us["gateway"] / num_events,
        "events_per_core_s": num_events / spent_us["gateway"] * 1e6,
        **{f"{name}_core_share": us / setup.seconds / 1e6 for name, us in spent_us.items()},
        **{name: sent[name] for name in ("late_p50_ms", "late_p99_ms", "emit_p50_ms", "emit_p99_ms")},
        "foreign_share": foreign_share,
    }
