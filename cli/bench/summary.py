"""The result of a load, under the names of vLLM's `bench serve` where it has them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median, pstdev
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.cli.bench.load import Measured
from penstock.cli.bench.prompts import RequestRecord

# --- the result on the terminal

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
        parts.append(_failure_lines(summary["failures"]))
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
        text = ", ".join(f"{metric} {limit:g} ms" for metric, limit in limits.items())
        table.add_row("goodput/s", f"{summary['request_goodput']:.2f}", f"share within {text}", kept)
    return table


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


def _failure_lines(failures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("failures", justify="right", style="red", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("first message")
    for error, failure in failures.items():
        table.add_row(str(failure["count"]), Text(error), Text(" ".join(str(failure["example"]).split())))
    return table


# --- the result as numbers

_MANY_TOKENS_PER_EVENT = 1.05
_MAX_LATENESS_MS = 10.0
_MAX_CPU_SHARE = 0.8
_SHORT_S = 1.0
"""A shorter load is mostly its own start."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, interpolated between neighbors as numpy does by default."""
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentile_name(percent: float) -> str:
    """Return the name of a percentile: p99, p99.9."""
    return f"p{percent:g}"


def values_ms(records: Sequence[RequestRecord], all_records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the ascending values of each metric, in ms.

    The first four come from completed requests. The last two come from all: how late the load generator was by itself,
    and how long a request waited for one of `--max-concurrency` slots.
    """
    found = {
        "ttft": [one.ttft_s for one in records],
        "tpot": [tpot_s for one in records if (tpot_s := one.tpot_s) is not None],
        "itl": [itl_s for one in records for itl_s in one.itl_s],
        "e2el": [one.e2e_s for one in records],
        "lateness": [max(0.0, one.ready_s - one.due_s) for one in all_records],
        "slot_wait": [one.sent_s - one.ready_s for one in all_records],
    }
    return {metric: sorted(1000 * value for value in values) for metric, values in found.items()}


def summary_of(measured: Measured, goodput: Mapping[str, float], percentiles: Sequence[float]) -> dict[str, Any]:
    """Return the result of a load."""
    records, duration_s = measured.records, measured.duration_s
    completed = [record for record in records if not record.error]
    num_input = sum(record.prompt_tokens or 0 for record in completed)
    num_output = sum(record.output_tokens for record in completed)
    num_good = sum(_is_good(record, goodput) for record in completed)
    num_events = sum(len(record.token_events_s) for record in completed)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "failures": _failures(records),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(completed) / duration_s,
        "request_goodput": num_good / duration_s if goodput else None,
        "goodput_share": num_good / len(records) if goodput and records else None,
        "input_throughput": num_input / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": max(tokens_by_second(records).values(), default=0.0),
        "max_concurrent_requests": max((num_open for _, num_open in open_requests(records)), default=0),
        "tokens_per_event": num_output / num_events if num_events else None,
        "num_with_usage": sum(record.usage_tokens is not None for record in completed),
        "client_cpu_share": measured.client_cpu_s / duration_s,
    }
    for metric, values in values_ms(completed, records).items():
        found |= _stats_of(metric, values, percentiles)
    return found


def notes_of(measured: Measured, summary: Mapping[str, Any]) -> list[str]:
    """Return how tokens were counted, and whether the load generator was the bottleneck."""
    found = []
    if measured.num_unfinished:
        found.append(f"Interrupted: {measured.num_unfinished} requests that were not answered yet are left out.")
    if num_estimated := summary["completed"] - summary["num_with_usage"]:
        found.append(f"{num_estimated} answers came without usage: their tokens are counted as events with text.")
    per_event = summary["tokens_per_event"]
    if per_event and per_event > _MANY_TOKENS_PER_EVENT:
        found.append(f"An event has {per_event:.2f} tokens on average: ITL is the time between events.")
    lateness_ms = values_ms((), measured.records)["lateness"]
    if lateness_ms and (late_ms := percentile(lateness_ms, 99)) > _MAX_LATENESS_MS:
        found.append(f"The load generator was late: 1 % of the requests were sent {late_ms:.0f} ms late or more.")
    if measured.duration_s > _SHORT_S and (share := summary["client_cpu_share"]) > _MAX_CPU_SHARE:
        found.append(f"The load generator used {share:.0%} of a core: it may be the bottleneck.")
    return found


def arrays_of(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return the measurements of each request as parallel lists in order of arrival; times are in seconds.

    A request that failed has None where its value is unknown.
    """
    has_token = [bool(record.token_events_s) for record in records]
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft_s if has else None for record, has in zip(records, has_token, strict=True)],
        "itls": [record.itl_s for record in records],
        "e2els": [None if record.error else record.e2e_s for record in records],
        "due_times": [record.due_s for record in records],
        "start_times": [record.sent_s for record in records],
        "has_usage": [record.usage_tokens is not None for record in records],
        "finish_reasons": [record.finish_reason or None for record in records],
        "errors": [f"{record.error}: {record.detail}".rstrip(": ") for record in records],
    }


def tokens_by_second(records: Iterable[RequestRecord]) -> dict[int, float]:
    """Return second → output tokens that arrived in it. An answer's tokens are spread evenly over its events."""
    tokens: defaultdict[int, float] = defaultdict(float)
    for record in records:
        per_event = record.output_tokens / max(1, len(record.token_events_s))
        for at_s in record.token_events_s:
            tokens[int(at_s)] += per_event
    return tokens


def open_requests(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """Return each change of the number of open requests: when, and the number after it."""
    changes = sorted(
        change for record in records for change in ((record.sent_s, 1), (max(record.end_s, record.sent_s), -1))
    )
    numbers = accumulate(change for _, change in changes)
    return [(at_s, number) for (at_s, _), number in zip(changes, numbers, strict=True)]


def _is_good(record: RequestRecord, limits: Mapping[str, float]) -> bool:
    # An answer of one token has no time per output token, so it meets any limit of it.
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2e_s}
    return all(1000 * values[metric] <= limit for metric, limit in limits.items())


def _stats_of(metric: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    names = [f"mean_{metric}_ms", f"median_{metric}_ms", f"std_{metric}_ms"]
    names += [f"{percentile_name(percent)}_{metric}_ms" for percent in percentiles]
    if not values:
        return dict.fromkeys(names)
    stats = [fmean(values), median(values), pstdev(values), *(percentile(values, one) for one in percentiles)]
    return dict(zip(names, stats, strict=True))


def _failures(records: Iterable[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Return each kind of failure with its number and the message of its first one, most frequent first."""
    failed = [record for record in records if record.error]
    examples = {record.error: record.detail for record in reversed(failed)}
    counts = Counter(record.error for record in failed).most_common()
    return {error: {"count": count, "example": examples[error]} for error, count in counts}
