"""The result of a load on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli.bench.summary import percentile_name

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between events (ITL)",
    "e2el": "end to end",
    "lateness": "sent late by",
    "slot_wait": "waited for a slot",
}


def print_result(
    console: Console,
    model: str,
    load: str,
    summary: Mapping[str, Any],
    percentiles: Sequence[float],
    notes: Sequence[str],
    limits: Mapping[str, float],
) -> None:
    """Print counts, rates, latencies, failures and notes."""
    parts: list[Any] = [Text(load, "dim"), _rates(summary, limits), _latencies(summary, percentiles)]
    if summary["failures"]:
        parts.append(_failures(summary["failures"]))
    parts += [Text(note, "yellow") for note in notes]
    console.print(Panel(Group(*parts), title=Text(model), title_align="left", expand=False, padding=(0, 1)))


def _rates(summary: Mapping[str, Any], limits: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    failed = Text(f"{summary['failed']:,}", "red bold" if summary["failed"] else "")
    table.add_row("completed", f"{summary['completed']:,}", "failed", failed)
    table.add_row("duration", f"{summary['duration']:.2f} s", "requests/s", f"{summary['request_throughput']:.2f}")
    table.add_row(
        "input tokens", f"{summary['total_input_tokens']:,}", "input tokens/s", f"{summary['input_throughput']:,.1f}"
    )
    table.add_row(
        "output tokens",
        f"{summary['total_output_tokens']:,}",
        "output tokens/s",
        f"{summary['output_throughput']:,.1f}",
    )
    peak = f"{summary['max_output_tokens_per_s']:,.0f}"
    table.add_row("most open at once", f"{summary['max_concurrent_requests']:,}", "peak output tokens/s", peak)
    if limits:
        kept = f"{summary['goodput_share']:.1%}"
        table.add_row("goodput/s", f"{summary['request_goodput']:.2f}", f"share within {_limits_text(limits)}", kept)
    return table


def _limits_text(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{metric} {limit:g} ms" for metric, limit in limits.items())


def _latencies(summary: Mapping[str, Any], percentiles: Sequence[float]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("ms")
    for name in ("mean", "std", *map(percentile_name, percentiles)):
        table.add_column(name, justify="right")
    names = ["mean", "std", *map(percentile_name, percentiles)]
    for metric, label in _LATENCIES.items():
        values = [summary.get(f"{name}_{metric}_ms") for name in names]
        # Without a limit on open requests, no request waits for a slot.
        if values[0] is not None and (metric != "slot_wait" or any(values)):
            table.add_row(label, *map(_number, values))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _failures(failures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("failures", justify="right", style="red", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("first message")
    for error, failure in failures.items():
        table.add_row(str(failure["count"]), Text(error), Text(" ".join(str(failure["example"]).split())))
    return table
