"""Dashboards and alert rules: they are what their generator writes, name what exists, and fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from observe.grafana import BOARDS, FOLDER, json_of
from observe.records import Board, Panel

from tests.ops.known_metrics import known_metrics
from tests.source_tree import ROOT

OBSERVE = ROOT / "ops/observe"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
TESTS: list[dict[str, Any]] = yaml.safe_load((OBSERVE / "alerts_test.yml").read_text())["tests"]
RUNBOOK = (ROOT / "ops/RUNBOOK.md").read_text()
PROMTOOL = shutil.which("promtool")


def panels_of(board: Board) -> list[Panel]:
    return [panel for row in board.rows for panel in row.panels]


def expressions() -> list[str]:
    of_panels = [query.expr for board in BOARDS for panel in panels_of(board) for query in panel.queries]
    return [*of_panels, *(rule["expr"] for rule in RULES)]


def anchors_of(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_dashboards_are_what_the_generator_writes(board: Board) -> None:
    assert (FOLDER / f"{board.name}.json").read_text() == json_of(board), "run: PYTHONPATH=ops python -m observe"


def test_no_other_dashboard_lies_there() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {board.name for board in BOARDS}


def test_panels_and_rules_name_metrics_that_exist() -> None:
    named = {name for expr in expressions() for name in re.findall(r"\b(penstock_\w+)", expr)}
    plain = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named}
    assert len(plain) > 60
    assert plain - known_metrics() == set()


def test_values_that_every_gateway_reports_are_never_summed() -> None:
    shared = re.compile(r"sum(?: by \([\w, ]+\))? \((?:rate\()?penstock_(?:queue|pool|redis|nodes|kv|open_jobs|tenant)")
    assert [expr for expr in expressions() if shared.search(expr)] == []


def test_each_alert_has_a_series_that_fires_it_and_one_that_does_not() -> None:
    found = {alert: set[int]() for alert in ALERTS}
    for test in TESTS:
        (asked,) = test["promql_expr_test"]
        (alert,) = re.findall(r'alertname="(\w+)"', asked["expr"])
        found[alert].add(len(asked["exp_samples"]))
    assert [alert for alert, outcomes in found.items() if outcomes != {0, 1}] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_alerts_are_in_the_runbook_and_link_to_a_section_of_it(alert: str) -> None:
    assert f"`{alert}`" in RUNBOOK
    address, _, anchor = ALERTS[alert]["annotations"]["runbook_url"].partition("#")
    assert address == "{{ $externalLabels.penstock_docs }}/ops/RUNBOOK.html"
    assert anchor in anchors_of(RUNBOOK)
    assert ALERTS[alert]["labels"]["severity"] in ("warning", "critical")


def test_the_scrape_configuration_has_the_jobs_that_rules_and_panels_name() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load((OBSERVE / "prometheus.yml").read_text())["scrape_configs"]}
    named = {job for expr in expressions() for job in re.findall(r'job="([\w-]+)"', expr)}
    assert named <= jobs
    assert all(job.startswith("penstock-") for job in jobs)


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.process
def test_promtool_accepts_and_tests_the_rules() -> None:
    assert PROMTOOL is not None
    for words in (("test", "rules", "alerts_test.yml"), ("check", "config", "--syntax-only", "prometheus.yml")):
        run = subprocess.run([PROMTOOL, *words], cwd=OBSERVE, capture_output=True, text=True, timeout=180)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.slow
@pytest.mark.process
def test_promtool_notices_a_rule_that_never_fires(tmp_path: Path) -> None:
    rules = (OBSERVE / "alerts.yml").read_text()
    assert "penstock_redis_up == 0" in rules
    (tmp_path / "alerts.yml").write_text(rules.replace("penstock_redis_up == 0", "penstock_redis_up == 2"))
    (tmp_path / "alerts_test.yml").write_text((OBSERVE / "alerts_test.yml").read_text())
    assert PROMTOOL is not None
    run = subprocess.run([PROMTOOL, "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True, timeout=180)
    assert run.returncode != 0
    assert b"PenstockRedisDown" in run.stdout + run.stderr
