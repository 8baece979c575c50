"""`penstock config show` says what each setting is, and what set it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.command import run_command

from penstock.cli.machine.config import PARTS
from penstock.runtime.settings import Settings


def shown(*words: str, **variables: str) -> dict[str, dict[str, Any]]:
    run = run_command("config", "show", *words, "--json", **variables)
    assert run.returncode == 0, run.stderr
    return {one["variable"]: one for one in json.loads(run.stdout)}


def test_each_setting_names_what_set_it(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_text("s3cret\n")
    found = shown(
        PENSTOCK_NODE_MAX_NUM_SEQS="12",
        PENSTOCK_REDIS_URL="redis://me:s3cret@host:1/0",
        PENSTOCK_KEY_PEPPER_FILE=str(tmp_path / "pepper"),
    )
    seqs = found["PENSTOCK_NODE_MAX_NUM_SEQS"]
    assert (seqs["part"], seqs["value"], seqs["origin"]) == ("node", 12, "PENSTOCK_NODE_MAX_NUM_SEQS")
    assert found["PENSTOCK_REDIS_URL"]["value"] == "redis://me:***@host:1/0"
    pepper = found["PENSTOCK_KEY_PEPPER"]
    assert (pepper["value"], pepper["origin"]) == ("***", str(tmp_path / "pepper"))
    assert found["PENSTOCK_GATEWAY_PORT"]["origin"] == "default"
    assert found["PENSTOCK_NODE_MODEL"]["value"] is None
    assert "s3cret" not in json.dumps(found)


def test_a_variable_of_kubernetes_sets_nothing() -> None:
    found = shown("gateway", PENSTOCK_GATEWAY_PORT="tcp://10.0.0.1:8000")
    assert found["PENSTOCK_GATEWAY_PORT"]["origin"] == "default"


def test_only_changed_settings_of_chosen_parts_are_lines_for_people() -> None:
    words = ("config", "show", "gateway", "files", "--changed")
    run = run_command(*words, PENSTOCK_GATEWAY_DRAIN_S="5", PENSTOCK_NODE_MODEL="m")
    assert run.stdout == "gateway:\n  PENSTOCK_GATEWAY_DRAIN_S = 5.0  (PENSTOCK_GATEWAY_DRAIN_S)\n"


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("nodes",), {}, "no part 'nodes': there are shared, node"),
        ((), {"PENSTOCK_GATEWAY_PRT": "1"}, "unknown environment variable PENSTOCK_GATEWAY_PRT"),
        (("node",), {"PENSTOCK_NODE_MAX_NUM_SEQS": "0"}, "max_num_seqs"),
    ],
)
def test_wrong_settings_are_refused_by_name(words: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    run = run_command("config", "show", *words, **variables)
    assert run.returncode == 2
    assert said in run.stderr


def test_every_class_of_settings_belongs_to_a_part() -> None:
    all_kinds = {kind for kind in Settings.__subclasses__() if kind.__module__.startswith("penstock.")}
    assert {kind for kinds in PARTS.values() for kind in kinds} == all_kinds
