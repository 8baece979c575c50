"""One SVG for each report: bars of each workload's main metrics, ours in color."""

from __future__ import annotations

from pathlib import Path

from bench.verdicts import Medians

PLOTTED = {
    "offline": [("mix", "tokens_per_s"), ("prefix", "tokens_per_s")],
    "latency": [("single", "itl_mean_ms"), ("poisson", "ttft_p99_ms"), ("poisson", "itl_p99_ms")],
    "startup": [("startup", "ready_s")],
    "memory": [("mix", "rss_load_mib"), ("mix", "rss_peak_mib")],
}
OURS, THEIRS = "#1f77b4", "#b0b0b0"
WIDTH_IN, ROW_IN, TITLE_IN = 5.0, 0.28, 0.9


def write(folder: Path, table: Medians) -> None:
    """Draws what was measured; needs the `bench` extra."""
    from matplotlib.figure import Figure

    for name, wanted in PLOTTED.items():
        panels = [(workload, metric) for workload, metric in wanted if workload in table]
        if not panels:
            continue
        most_rows = max(len(table[workload]) for workload, _ in panels)
        figure = Figure(figsize=(WIDTH_IN * len(panels), ROW_IN * most_rows + TITLE_IN), layout="constrained")
        for axes, (workload, metric) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            values = {engine: cell.values[metric] for engine, cell in table[workload].items()}
            engines = sorted(values, key=values.__getitem__)
            colours = [OURS if engine.startswith("penstock") else THEIRS for engine in engines]
            bars = axes.barh(engines, [values[engine] for engine in engines], color=colours)
            axes.bar_label(bars, fmt="%.4g", padding=2, fontsize=7)
            axes.set_title(f"{workload}: {metric}", fontsize=9)
            axes.tick_params(labelsize=8)
            axes.margins(x=0.15)
        # Without a date, equal values give equal files.
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
