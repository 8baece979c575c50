"""The metrics, log lines, settings and commands that the runbook names exist."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from pydantic import BaseModel
from typer.main import get_command

from penstock.cli.main import app
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.monitor.engine_metrics import vllm_metrics
from penstock.gpu_node.settings import NodeSettings
from tests.ops.known_metrics import STATS, known_metrics, sources
from tests.source_tree import ROOT

TEXT = (ROOT / "ops/RUNBOOK.md").read_text()
METRICS = (ROOT / "ops/METRICS.md").read_text()


def test_metrics_of_the_runbook_are_served_by_a_gateway_or_a_node() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"penstock_\w+[a-z0-9](?![\w…])", TEXT)}
    assert len(named) > 25
    assert named - known_metrics() == set()


def test_the_page_of_metrics_names_only_metrics_that_exist() -> None:
    known = known_metrics()
    named = set(re.findall(r"(penstock_\w+?)(?:_total)?(_?…|\b)", METRICS))
    assert len(named) > 25
    whole = {name for name, rest in named if not rest}
    assert whole - known == set()
    prefixes = {name for name, rest in named if rest}
    assert [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in known)] == []


def test_the_page_of_metrics_names_vllms_metrics() -> None:
    told = {metric.name for metric in vllm_metrics(HeldJobs(), STATS, NodeSettings(model="m", redis_url="unix://x"))}
    named = set(re.findall(r"(vllm:\w+?)(?:_total)?`", METRICS))
    assert len(named) > 10
    assert named - told - {"vllm:healthy_pods", "vllm:num_incoming_requests", "vllm:current_qps"} == set()


def test_log_lines_of_the_runbook_are_in_the_code() -> None:
    lines = re.findall(r'`"([^"`]+)"`', TEXT)
    assert len(lines) > 5
    assert [line for line in lines if f'"{line}"' not in sources() and line != "insufficient_scope"] == []


def test_settings_of_the_runbook_exist() -> None:
    named = set(re.findall(r"PENSTOCK_(NODE|GATEWAY)_([A-Z_]+)", TEXT))
    known: dict[str, type[BaseModel]] = {"NODE": NodeSettings, "GATEWAY": GatewaySettings}
    assert named
    assert [name for room, name in named if name.lower() not in known[room].model_fields] == []


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`penstock ([a-z]+(?: [a-z]+)?)[^`]*`", TEXT))))
def test_commands_of_the_runbook_exist(line: str) -> None:
    command, *rest = line.split()
    found = cast(Any, get_command(app)).commands[command]
    if rest and hasattr(found, "commands"):
        assert rest[0] in found.commands


def test_error_codes_of_the_runbook_exist() -> None:
    codes = set(re.findall(r"\| \d{3} `(\w+)`", TEXT)) | {"unread", "stream_diverged", "invalid_api_key"}
    scripts = "".join(path.read_text() for path in (ROOT / "src/penstock/queue/scripts").rglob("*.lua"))
    assert [code for code in codes if f'"{code}"' not in sources() and f"'{code}'" not in scripts] == []
