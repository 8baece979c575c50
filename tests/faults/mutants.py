"""`python -m faults.mutants`: remove each guard of the queue in a copy of the source. Its tests must fail.

One guard at a time. If a mutant survives, no test detects that this guard is missing. If its text is not found, the
guard was changed and this list must be updated.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from faults.guards import MUTANTS, Mutant
from faults.tools.report import record

ROOT = Path(__file__).parents[2]
SCRIPTS = "src/penstock/queue/scripts"
_COPIED = ("src", "cli", "producer", "gateway", "gpu_node", "kernels", "tests", "ops", "pyproject.toml")
WORKERS = max(2, os.cpu_count() or 1)
"""Mutants that are tried at once. Many tests wait."""
_FAILED = 1
"""pytest's exit status when tests ran and some failed."""


class Copy:
    """A copy of the source in its own folder, and the tests that run on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        self._check_import()

    def test(self, files: set[str]) -> int:
        """Run pytest. Return its exit status."""
        return self._run(
            "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *sorted(files)
        ).returncode

    def _check_import(self) -> None:
        """Raise SystemExit if tests would import the original instead of this copy."""
        found = self._run("-c", "import penstock; print(penstock.__file__)").stdout.decode().strip()
        if not Path(found).resolve().is_relative_to(self._folder.resolve()):
            raise SystemExit(f"the tests would import {found}, not the copy in {self._folder}")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        env = os.environ | {"PYTHONPATH": str(self._folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, *arguments], cwd=self._folder, env=env, capture_output=True)

    def kills(self, mutant: Mutant) -> bool:
        """Whether the mutant's tests fail without its guard."""
        path = self._folder / SCRIPTS / mutant.script
        text = path.read_text()
        if text.count(mutant.text) != 1:
            raise SystemExit(f"{mutant.guard}: {mutant.text!r} occurs {text.count(mutant.text)} times in {path.name}")
        try:
            path.write_text(text.replace(mutant.text, mutant.instead))
            return self.test({mutant.test_file}) == _FAILED
        finally:
            path.write_text(text)


class Copies:
    """Several copies, each of which tests one mutant at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self._idle: SimpleQueue[Copy] = SimpleQueue()
        for number in range(count):
            self._idle.put(Copy(folder / str(number)))

    def killed(self, mutant: Mutant) -> bool:
        """Test a mutant and print the result."""
        copy = self._idle.get()
        try:
            killed = copy.kills(mutant)
        finally:
            self._idle.put(copy)
        print(f"{'killed' if killed else 'ALIVE'}  {mutant.guard}  ({mutant.test_file})", flush=True)
        return killed


def main() -> int:
    """Test all mutants, or the named ones. Return how many survive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("guards", nargs="*", help="all when none is named")
    names = parser.parse_args().guards
    mutants = [mutant for mutant in MUTANTS if not names or mutant.guard in names]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(WORKERS) as workers:
        if Copy(Path(folder) / "whole").test({mutant.test_file for mutant in mutants}) != 0:
            raise SystemExit("the tests fail without any mutant")
        num_killed = sum(workers.map(Copies(Path(folder), WORKERS).killed, mutants))
    if not names and num_killed == len(mutants):
        record("Mutants: guards taken away, one at a time", "all", {"killed": num_killed, "of": len(mutants)})
    return len(mutants) - num_killed


if __name__ == "__main__":
    sys.exit(main())
