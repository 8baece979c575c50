"""The result of a load, under the names of vLLM's `bench serve` where it has them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median, pstdev
from typing import Any

from penstock.cli.bench.load import Measured
from penstock.cli.bench.records import RequestRecord

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
    peak_tokens, peak_open = _peaks(records)
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
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_open,
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


def _peaks(records: Sequence[RequestRecord]) -> tuple[float, int]:
    """Return the most output tokens in a second, and the most requests that were open at once."""
    most_tokens = max(tokens_by_second(records).values(), default=0.0)
    return most_tokens, max((num_open for _, num_open in open_requests(records)), default=0)
