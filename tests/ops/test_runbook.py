"""The runbook names only what there is: metrics, log lines, settings and commands."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache

import pytest
from typer.main import get_command

from penstock.cli.main import app
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.client import ClientStats
from penstock.queue.pool_stats import EVENTS
from tests.source_tree import ROOT, modules

TEXT = (ROOT / "ops/RUNBOOK.md").read_text()


@cache
def sources() -> str:
    return "".join(module.path.read_text() for module in modules().values())


def known_metrics() -> set[str]:
    names = {metric.name for metric in GatewayMetrics().registry.collect()}
    names |= {f"penstock_pool_{event}" for event in EVENTS}
    names |= {f"penstock_client_{field.name}" for field in fields(ClientStats)}
    node = (ROOT / "gpu_node/monitor/metrics.py").read_text()
    for prefix, table in (("node", "_COUNTED"), ("engine", "_ENGINE_COUNTS"), ("engine", "_ENGINE_GAUGES")):
        block = re.search(rf"^{table} = {{(.*?)^}}", node, re.MULTILINE | re.DOTALL)
        assert block is not None
        names |= {
            f"penstock_{prefix}_{name.removeprefix('num_')}"
            for name in re.findall(r'^    "(\w+)"', block[1], re.MULTILINE)
        }
    return names | set(re.findall(r'"(penstock_\w+)"', sources()))


def test_its_metrics_are_told_by_a_gateway_or_a_node() -> None:
    named = {name.removesuffix("_total") for name in re.findall(r"penstock_\w+[a-z0-9](?![\w…])", TEXT)}
    assert len(named) > 25
    assert named - known_metrics() == set()


def test_its_log_lines_are_written_somewhere() -> None:
    lines = re.findall(r'`"([^"`]+)"`', TEXT)
    assert len(lines) > 5
    assert [line for line in lines if f'"{line}"' not in sources() and line != "insufficient_scope"] == []


def test_it_knows_every_line_that_warns_of_a_running_system() -> None:
    """What is said once at a start, of the settings, explains itself."""
    said = set(re.findall(r'\b_?(?:log|LOG|logger)\.(?:warning|error)\(\s*"([^"]+)"', sources()))
    of_settings = {
        line for line in said if re.search("there are no API keys|cannot verify drafts|this runner computes", line)
    }
    assert len(said) > 20 and len(of_settings) == 3
    assert [line for line in sorted(said - of_settings) if f'`"{line}"`' not in TEXT] == []


def test_its_settings_are_settings() -> None:
    named = set(re.findall(r"PENSTOCK_(NODE|GATEWAY)_([A-Z_]+)", TEXT))
    known = {"NODE": NodeSettings, "GATEWAY": GatewaySettings}
    assert named
    assert [name for room, name in named if name.lower() not in known[room].model_fields] == []


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`penstock ([a-z]+(?: [a-z]+)?)[^`]*`", TEXT))))
def test_its_commands_are_commands(line: str) -> None:
    command, *rest = line.split()
    found = get_command(app).commands[command]
    if rest and hasattr(found, "commands"):
        assert rest[0] in found.commands


def test_its_codes_are_codes_of_ours() -> None:
    codes = set(re.findall(r"\| \d{3} `(\w+)`", TEXT)) | {"unread", "stream_diverged", "invalid_api_key"}
    scripts = "".join(path.read_text() for path in (ROOT / "penstock/queue/scripts").glob("*.lua"))
    assert [code for code in codes if f'"{code}"' not in sources() and f"'{code}'" not in scripts] == []
