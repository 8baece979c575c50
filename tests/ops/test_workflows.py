"""The workflows of `.github` are valid, and the one of pull requests may write nothing."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.source_tree import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMAS = find_spec("check_jsonschema")


@pytest.mark.skipif(SCHEMAS is None, reason="the package check-jsonschema is not installed")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid(path: Path) -> None:
    assert SCHEMAS is not None and SCHEMAS.origin is not None
    schema = json.loads((Path(SCHEMAS.origin).parent / "builtin_schemas/vendor/github-workflows.json").read_text())
    # YAML reads the key `on` as true.
    content = {"on" if name is True else name: value for name, value in yaml.safe_load(path.read_text()).items()}
    jsonschema.validate(content, schema)


def test_a_pull_request_runs_all_checks_and_may_only_read() -> None:
    content: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    [job] = content["jobs"].values()
    assert "pull_request" in content[True]
    assert content["permissions"] == {} and job["permissions"] == {"contents": "read"}
    assert job["steps"][-1]["run"] == ".ci/run"
