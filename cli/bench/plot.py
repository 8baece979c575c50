"""The plot of a load, by matplotlib: distributions of TTFT and ITL, and what happened over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.bench.prompts import RequestRecord
from penstock.cli.bench.summary import open_requests, tokens_by_second, values_ms
from penstock.contract.errors import RequestError

_MAX_POINTS = 2000
"""Points of one distribution in the plot; more points would only enlarge the file."""
_MAX_BARS = 2000
"""Requests on the timeline; of more, an even selection is drawn."""
_WAITING, _READING, _FAILED, _OPEN = "#c7c7c7", "#1f77b4", "#d62728", "#ff7f0e"


def check_matplotlib() -> None:
    """Raise RequestError if plots cannot be drawn, before the load runs."""
    try:
        import matplotlib  # noqa: F401  tests that it is installed
    except ImportError as error:
        raise RequestError("plot: needs matplotlib: pip install 'penstock-llm[bench]'", param="plot") from error


def write_plot(path: Path, title: str, records: Sequence[RequestRecord]) -> None:
    """Draw the records. SVG and PDF are self-contained. Raises RequestError if the file cannot be written."""
    from matplotlib.figure import Figure

    completed = [record for record in records if not record.error]
    values = values_ms(completed, records)
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    (ttft, itl), (timeline, rates) = figure.subplots(2, 2)
    _draw_cdf(ttft, values["ttft"], "time to first token, ms")
    _draw_cdf(itl, values["itl"], "time between events (ITL), ms")
    _draw_timeline(timeline, records)
    _draw_rates(rates, records)
    try:
        # Without a date, equal values give equal files.
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise RequestError(f"plot: cannot write {path}: {error.strerror}", param="plot") from error


def _draw_cdf(axes: Any, values: Sequence[float], label: str) -> None:
    if values:
        last, step = len(values) - 1, max(1, len(values) // _MAX_POINTS)
        chosen = sorted({*range(0, len(values), step), last})
        shares = [(at + 1) / len(values) for at in chosen]
        axes.step([values[at] for at in chosen], shares, where="post", color=_READING)
        for percent in (0.5, 0.9, 0.99):
            axes.axhline(percent, color="#dddddd", linewidth=0.8, zorder=0)
    axes.set(xlabel=label, ylabel="share of values", ylim=(0, 1.02))
    axes.set_xlim(left=0)


def _draw_timeline(axes: Any, records: Sequence[RequestRecord]) -> None:
    shown = records[:: max(1, -(-len(records) // _MAX_BARS))]
    for row, record in enumerate(shown):
        if record.error:
            axes.plot(record.sent_s, row, "x", color=_FAILED, markersize=4)
            continue
        first_s = record.token_events_s[0]
        axes.hlines(row, record.due_s, first_s, color=_WAITING, linewidth=1.2)
        axes.hlines(row, first_s, record.end_s, color=_READING, linewidth=1.2)
    axes.set(xlabel="s (gray: until the first token, blue: answer, ×: failed)", ylabel="request")
    axes.invert_yaxis()


def _draw_rates(axes: Any, records: Sequence[RequestRecord]) -> None:
    tokens = tokens_by_second(records)
    seconds = range(max(tokens, default=0) + 1)
    axes.step(seconds, [tokens.get(second, 0.0) for second in seconds], where="post", color=_READING)
    axes.set(xlabel="s", ylabel="output tokens/s")
    axes.set_ylim(bottom=0)
    opened = axes.twinx()
    opened.step(*zip((0.0, 0), *open_requests(records), strict=True), where="post", color=_OPEN, linewidth=0.9)
    opened.set_ylabel("open requests", color=_OPEN)
    opened.set_ylim(bottom=0)
