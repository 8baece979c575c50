"""The pages name every error code, command and setting that a user meets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from pydantic import BaseModel
from typer.main import get_command

from penstock.cli.main import app
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client.settings import ClientSettings
from tests.source_tree import ROOT, Module, modules

ANSWERING = (
    "gateway",
    "gpu_node",
    "producer.client",
    "producer.openai",
    "producer.files",
    "producer.stored_batches",
    "contract",
    "queue",
)
"""The packages whose errors may be the answer of a gateway."""
NOT_OVER_HTTP = {
    **dict.fromkeys(("ambiguous_name", "key_revoked", "unreadable_key", "keys_in_use"), "penstock keys"),
    **dict.fromkeys(("no_answer", "no_reader"), "penstock profile"),
    **dict.fromkeys(("batch_taken", "too_many_rows"), "the holder of a batch"),
    "pool_in_use": "penstock pools forget",
    "tenant_in_use": "penstock tenants delete",
    "client_closed": "a client that was closed",
    "engine_stalled": "it ends a node",
    "id_conflict": "a gateway makes the ids of jobs itself",
    "job_failed": "every failed job has a code of its own",
    "result_timeout": "the `timeout` of a client in Python",
    "unavailable": "every such error has a code of its own",
}
"""Code → where it is used instead."""


def codes_in(module: Module) -> Iterator[str]:
    """The error codes that a module states: of a class, or as the argument `code`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield from (text_of(keyword.value) for keyword in node.keywords if keyword.arg == "code")
            if getattr(node.func, "id", "") == "Outcome" and len(node.args) > 1:
                yield text_of(node.args[1])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "code":
                yield text_of(node.value)


def text_of(value: ast.expr) -> str:
    """The text of a literal; empty for anything else."""
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def codes_of_scripts() -> Iterator[str]:
    """The codes with which the queue's scripts end jobs."""
    for script in (ROOT / "penstock/queue/scripts").glob("*.lua"):
        yield from re.findall(r"'(?:failed|dead|cancelled|expired)', '(\w+)'", script.read_text())


def test_http_page_names_every_error_code() -> None:
    answering = tuple(f"penstock.{package}." for package in ANSWERING)
    stated = {code for module in modules().values() if module.name.startswith(answering) for code in codes_in(module)}
    stated |= {*codes_of_scripts(), "unsupported_value", "unknown_field", "method_not_allowed"}
    page = (ROOT / "docs/HTTP.md").read_text().partition("\n## Errors")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", page))
    assert {"redis_away", "node_lost", "adapter_changed"} < stated
    assert sorted(stated - named - NOT_OVER_HTTP.keys() - {""}) == []
    assert sorted(NOT_OVER_HTTP.keys() - stated) == []
    of_table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| [\d, ]+ \| ([^|]+) \|", page, re.MULTILINE))))
    assert sorted(of_table - stated) == []


def test_command_page_names_every_command() -> None:
    page = (ROOT / "docs/CLI.md").read_text()
    missing = []
    for name, command in cast(Any, get_command(app)).commands.items():
        lines = " ".join(re.findall(rf"penstock {name}\b.*", page))
        words = set(re.findall(r"[a-z]+", lines))
        missing += [f"{name} {sub}" for sub in getattr(command, "commands", ()) if sub not in words]
        missing += [name] * (not lines)
    assert missing == []


@pytest.mark.parametrize(("page", "settings"), [("docs/PYTHON.md", ClientSettings), ("docs/CLI.md", CelerySettings)])
def test_settings_without_a_help_page_have_a_table(page: str, settings: type[BaseModel]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", (ROOT / page).read_text(), re.MULTILINE)
    written = {name: default.strip() for name, default in rows}
    for name, field in settings.model_fields.items():
        default = "none" if field.default is None else str(field.default).lower()
        assert written.get(name) == f"`{default}`", name
