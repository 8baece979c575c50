"""Scripts of users pass mypy and pyright without this repository's settings, and mistakes in them are found."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

HERE = Path(__file__).parent
SCRIPTS = sorted([HERE / "user_script.py", *(ROOT / "examples").glob("*.py")])
SCRIPTS.remove(ROOT / "examples/django_app.py")  # Django comes without types
WRONG = HERE / "wrong_script.py"


def errors_of(*scripts: Path) -> set[tuple[str, int]]:
    """File and line of each error that mypy finds in scripts, as a user runs it."""
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache/users'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--no-error-summary", "--hide-error-context", *map(str, scripts)],
        env={**os.environ, "MYPYPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode in (0, 1), done.stderr
    found = re.findall(r"^(.+?):(\d+): error: ", done.stdout, re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout
    return {(Path(path).name, int(line)) for path, line in found}


def wrong_lines() -> set[tuple[str, int]]:
    lines = WRONG.read_text().splitlines()
    return {(WRONG.name, number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_mypy_accepts_right_scripts_and_refuses_each_wrong_line() -> None:
    assert len(SCRIPTS) > 8
    assert len(wrong_lines()) == 11
    # In one run: most of its time goes into reading the package.
    assert errors_of(WRONG, *SCRIPTS) == wrong_lines()


@pytest.mark.slow
def test_pyright_accepts_right_scripts_and_refuses_each_wrong_line(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    for script in (WRONG, *SCRIPTS):
        shutil.copy(script, tmp_path)
    # The clone stands for the installed package: pyright does not read the links of an editable installation.
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--project", tmp_path, "--pythonpath", sys.executable, "--outputjson"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1 + len(SCRIPTS)
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    assert {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in errors} == wrong_lines(), errors
