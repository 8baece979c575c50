"""The tables of open streams and of readers that stop."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.open_streams.processes import Answer

COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.open_streams"


@dataclass(frozen=True, slots=True)
class Scene:
    """Where and how the runs were made."""

    machine: dict[str, object]
    revision: str
    command: str
    pinned: bool


def report(scene: Scene, loads: Sequence[Answer], stops: Sequence[Answer]) -> list[str]:
    """Return the page: medians over the turns, a row for each gateway and rate."""
    machine = scene.machine
    where = "the gateway has one core for itself" if scene.pinned else "all processes use all cores"
    lines = [
        "# Open streams of one gateway process",
        "",
        f"{machine['cores']} cores of {machine['cpu']}, {machine['date']}, {scene.revision}; {where}, Redis, the node "
        f"and the reader share the rest. Medians of the turns. `{COMMAND} {scene.command}`",
    ]
    if loads:
        lines += _of_loads(loads)
    if stops:
        lines += _of_stops(stops)
    return lines


def _of_loads(loads: Sequence[Answer]) -> list[str]:
    lines = [
        "",
        "Latency: from the node's publication to the reader, which looks every 0.5 ms. PUBLISH sends the gateway the "
        "same messages without the script's work in Redis.",
        "",
        "| gateway | transport | streams | opened per s | published by | events/s asked | arrived "
        "| latency p50, p99, max (ms) | gateway: core, µs/event | events/s of a whole core | RSS per stream (KiB) |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, runs in _grouped(loads, "gateway", "transport", "num_streams", "direct", "asked_per_s").items():
        gateway, transport, num_streams, direct, asked = key
        of = _Medians(runs)
        way = "PUBLISH" if direct else "script"
        latency = f"{of('latency_p50_ms'):.1f}, {of('latency_p99_ms'):.1f}, {of('latency_max_ms'):.0f}"
        of_core = f"{of('gateway_core_share'):.0%}, {of('gateway_us_per_event'):.1f} | {of('events_per_core_s'):,.0f}"
        lines.append(
            f"| {gateway} | {transport} | {num_streams:,} | {of('opened_per_s'):,.0f} | {way} | {asked:,.0f} "
            f"| {of('events_per_s'):,.0f} | {latency} | {of_core} | {of('kib_per_stream'):.0f} |"
        )
    return lines


def _of_stops(stops: Sequence[Answer]) -> list[str]:
    lines = [
        "",
        "Gap: time between two events of one stream, over the readers that go on.",
        "",
        "| gateway | readers | of which stop | events/s | p99 gap before, after (ms) | change |",
        "|---|---|---|---|---|---|",
    ]
    for key, runs in _grouped(stops, "gateway", "num_streams", "num_stopped").items():
        gateway, num_streams, num_stopped = key
        quiet, stopped = _Medians([run["quiet"] for run in runs]), _Medians([run["stopped"] for run in runs])
        lines.append(
            f"| {gateway} | {num_streams} | {num_stopped} | {quiet('asked_per_s'):,.0f} "
            f"| {quiet('gap_p99_ms'):.1f}, {stopped('gap_p99_ms'):.1f} | {_Medians(runs)('gap_p99_change'):+.1%} |"
        )
    return lines


class _Medians:
    def __init__(self, runs: Sequence[Answer]) -> None:
        self._runs = runs

    def __call__(self, name: str) -> float:
        return statistics.median(float(run[name]) for run in self._runs)


def _grouped(runs: Sequence[Answer], *names: str) -> dict[tuple[object, ...], list[Answer]]:
    groups: dict[tuple[object, ...], list[Answer]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in names), []).append(run)
    return groups
