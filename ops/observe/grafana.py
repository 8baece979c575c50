"""Turns records of dashboards into Grafana's JSON, by grafana-foundation-sdk. No Grafana has rendered the result."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort

from observe.records import Board, Panel, Query, Row, Variable
from observe.system_boards import FLEET, NODES
from observe.work_boards import BATCHES, QUEUES

BOARDS = (FLEET, NODES, QUEUES, BATCHES)
FOLDER = Path(__file__).parent / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
_WIDTH, _NUMBER_WIDTH, _HEIGHT, _NUMBER_HEIGHT = 8, 6, 8, 4
AnyPanel = stat.Panel | timeseries.Panel


def json_of(board: Board) -> str:
    """Return the text of a dashboard's file."""
    ids = count(1)
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.name)
        .description(f"{board.description} Made by ops/observe; no Grafana has rendered it yet.")
        .tags(["penstock"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    for row in board.rows:
        made = _with_row(made, row, ids)
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _with_row(made: dashboard.Dashboard, row: Row, ids: count[int]) -> dashboard.Dashboard:
    made = made.with_row(dashboard.Row(row.title).id(next(ids)))
    for panel in row.panels:
        made = made.with_panel(_panel(panel).id(next(ids)))
    return made


def _variable(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(_SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
    )


def _panel(panel: Panel) -> AnyPanel:
    made: AnyPanel
    if panel.is_number:
        made = stat.Panel().graph_mode(BigValueGraphMode.NONE).span(_NUMBER_WIDTH).height(_NUMBER_HEIGHT)
    else:
        made = timeseries.Panel().legend(_legend()).fill_opacity(8).span(_WIDTH).height(_HEIGHT)
        made = made.min(0)
    text = panel.description + (f" Needs {panel.needs}." if panel.needs else "")
    made = made.title(panel.title).description(text).unit(panel.unit).datasource(_SOURCE)
    for number, query in enumerate(panel.queries):
        made = made.with_target(_target(query, chr(ord("A") + number), is_instant=panel.is_number))
    return made


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def _target(query: Query, ref: str, *, is_instant: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref)
    return made.instant() if is_instant else made.range()
