"""Scripts of users pass `mypy --strict` without this repository's settings, and mistakes in them are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.source_tree import ROOT

HERE = Path(__file__).parent
SCRIPTS = sorted([HERE / "user_script.py", *(ROOT / "examples").glob("*.py")])
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


def test_type_checkers_accept_right_scripts_and_refuse_each_wrong_line() -> None:
    assert len(SCRIPTS) > 8
    wrong = {(WRONG.name, i) for i, line in enumerate(WRONG.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert len(wrong) == 11
    # In one run: most of its time goes into reading the package.
    assert errors_of(WRONG, *SCRIPTS) == wrong
