"""Functions, classes and imports that no product code uses, as vulture finds them."""

from __future__ import annotations

from pathlib import Path

import pytest
from vulture import Vulture

from tests.source_tree import ROOMS, ROOT

pytestmark = pytest.mark.slow

FOLDERS = [*ROOMS.values(), ROOT / "ops", ROOT / "examples"]
FOR_TESTS = ROOT / "ops/fixtures"
REGISTERING = ["@app.*", "@router.*", "@*.command", "@*.callback", "@field_validator", "@model_validator"]
"""Decorators that hand a function to a framework."""
FIELDS = ("variable", "attribute")
"""Kinds that are not looked at: most are fields that only pydantic, JSON or another library reads."""
ALLOWED = {
    **dict.fromkeys(("__getattr__", "__dir__"), "Python calls it: names that are imported at first use"),
    **dict.fromkeys(("demo", "doctor", "support_bundle"), "a command: cli/main.py names it as a text"),
    **dict.fromkeys(("on_header",), "httptools calls it"),
    **dict.fromkeys(("collect_usage_pieces", "format_help_text", "format_epilog"), "typer calls it"),
    **dict.fromkeys(
        ("handle_text", "handle_bytes", "handle_cont", "handle_ping", "_should_upgrade"), "uvicorn calls it"
    ),
    **dict.fromkeys(("RunsBatches", "TaskRequest", "include_if"), "Celery finds it by a text, or calls it"),
    "settings_customise_sources": "pydantic calls it",
    "connect_unix_socket": "httpcore calls it",
    "discover_master": "redis-py calls it",
    **dict.fromkeys(("has_ext_modules", "get_tag"), "setuptools calls it"),
    **dict.fromkeys(
        ("get_seq_length", "get_mask_sizes", "get_query_offset", "has_previous_state", "get_conv_state"),
        "transformers calls it of a cache",
    ),
    **dict.fromkeys(
        ("update_conv_state", "get_recurrent_state", "update_recurrent_state", "update_indexer", "is_recording_past"),
        "transformers calls it of a cache",
    ),
    "readinto": "io.BufferedReader calls it",
    "map_unordered": "a method of the public clients",
    "create_app": "the ASGI app for a server of one's own, and for tests",
    "handle_starttag": "html.parser calls it",
    "substituted": "a panel's query without Grafana's variables, for a Prometheus server",
    "effects": "the part of make fields that its test compares with the endpoints",
    **dict.fromkeys(("paged_attention", "multiply_quantized", "sample_row"), "a reference that defines an operation"),
    **dict.fromkeys(("different_launches", "needs_float8", "SdpaAttention"), "a benchmark's check"),
}
"""Name → why it stays."""


def test_product_code_has_no_unused_functions() -> None:
    vulture = Vulture(ignore_decorators=REGISTERING)
    vulture.scavenge([str(folder) for folder in FOLDERS], exclude=["*/build/*"])
    found = [one for one in vulture.get_unused_code() if one.typ not in FIELDS]
    unused = {one.name: one for one in found if not Path(one.filename).resolve().is_relative_to(FOR_TESTS)}
    wrong = [f"{one.filename}:{one.first_lineno}: {name}" for name, one in unused.items() if name not in ALLOWED]
    assert wrong == []
