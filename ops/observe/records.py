"""The records that describe a dashboard, without Grafana's format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["short", "s", "percentunit", "bytes", "reqps", "ops", "none"]
"""Units of Grafana that the panels use."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of PromQL, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `needs` names what a system must have before the panel shows anything, such as a GPU."""

    title: str
    unit: Unit
    queries: tuple[Query, ...]
    description: str
    is_number: bool = False
    """Whether it shows the latest value as a number, and not a graph over time."""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the head of a dashboard: the values of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `name` is its file and its id in Grafana."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = field(default=())


SUBSTITUTES = {"$__rate_interval": "20s", "$pool": ".+", "$node": ".+"}
"""What stands for Grafana's variables where a test asks Prometheus directly."""


def substituted(expr: str) -> str:
    """Return an expression with `SUBSTITUTES` in place of the variables."""
    for name, value in SUBSTITUTES.items():
        expr = expr.replace(name, value)
    return expr


def graph(title: str, unit: Unit, description: str, *queries: tuple[str, str], needs: str = "") -> Panel:
    """Return a graph of (expression, legend) pairs."""
    return Panel(title, unit, tuple(Query(*query) for query in queries), description, needs=needs)


def number(title: str, unit: Unit, description: str, expr: str, legend: str = "") -> Panel:
    """Return a panel with the latest value of an expression."""
    return Panel(title, unit, (Query(expr, legend),), description, is_number=True)


def quantiles(metric: str, by: str = "", of: str = "") -> tuple[tuple[str, str], ...]:
    """Return the queries of the median, p95 and p99 of a histogram, per label `by`, of the series that `of` selects."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{of}[$__rate_interval])))",
            f"{name}{legend}",
        )
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


POOL = Variable("pool", "Pool", "label_values(penstock_nodes, pool)")
OF_POOL = '{pool=~"$pool"}'


def event(name: str) -> tuple[str, str]:
    """Return the query of a counter of events in the pools, per second. Every gateway reports the same values."""
    return f"sum(max by (pool) (rate(penstock_pool_{name}_total{OF_POOL}[$__rate_interval])))", name.replace("_", " ")
