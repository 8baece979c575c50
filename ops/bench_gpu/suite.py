"""Runs the GPU tests file by file in several processes, with nothing but torch, triton, numpy and pytest.

python -m bench_gpu.suite [pytest's arguments], such as `--collect-only`
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from bench_gpu.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/kernels/triton", "tests/gpu_node/model/gpu")
_NEED_CHECKPOINTS = (
    *("adapters", "experts", "graphs", "load", "offload", "ranks", "recurrent", "runner", "stale_blocks", "stored"),
)
"""Files of the second folder that read checkpoints or run an engine, which needs more packages than a kernel."""
_NO_TESTS = 5
"""pytest's exit code where a file has no test to run, such as without Hypothesis."""
_COMPILES_MOST = ("test_bare_runner.py", "test_bare_steps.py")
"""Files that start first, because they compile for minutes on a new GPU machine."""
_LIMIT_S = 780.0
_KEPT = 5000
"""Characters of a failed file's output."""


def left_out() -> tuple[str, ...]:
    """Return the names of the test files that cannot start here, because a package is absent."""
    packages = ("pydantic", "gguf", "safetensors", "transformers", "redis")
    absent = any(find_spec(name) is None for name in packages)
    return tuple(f"test_{name}.py" for name in _NEED_CHECKPOINTS) if absent else ()


def run_tests(
    num_workers: int,
    arguments: tuple[str, ...] = ("-m", "not slow"),
    names: tuple[str, ...] = (),
    limit_s: float = _LIMIT_S,
) -> list[dict[str, object]]:
    """Run each test file, or those of `names`, in a process of its own.

    Return how each ended: `is_ok`, pytest's summary, what failed, and the output where something did. limit_s: for all
    files together; what has not ended then is killed, and has failed.
    """
    end_s = time.monotonic() + limit_s
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("test_*.py"))]
    files = [path for path in files if path.name not in left_out() or "gpu_node" not in path.parts]
    files = [path for path in files if not names or path.name in names]
    files.sort(key=lambda path: path.name not in _COMPILES_MOST)
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda path: _run_file(path, arguments, end_s - time.monotonic()), files))


def failed_files(rows: Iterable[dict[str, object]]) -> tuple[list[object], list[object]]:
    """Return the files in which something failed, and those that did not end in time."""
    bad = [row for row in rows if not row["is_ok"]]
    return [row["file"] for row in bad if "exit_code" in row], [row["file"] for row in bad if "exit_code" not in row]


def _run_file(path: Path, arguments: tuple[str, ...], limit_s: float) -> dict[str, object]:
    row: dict[str, object] = {"file": str(path.relative_to(ROOT)), "is_ok": False, "failed": []}
    if limit_s <= 0:
        return row | {"summary": "not started: no time was left"}
    # Parents' conftest.py files need what is absent here. Plugins of a larger environment would want settings.
    config = ("-c", str(ROOT / "tests/gpu.ini"), "--rootdir", str(ROOT), "--confcutdir", str(path.parent))
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *config, *arguments, str(path)]
    ended = run_program(command, limit_s, env, ROOT)
    if ended.returncode is None:
        return row | {"summary": f"no end after {limit_s:.0f} s", "output": ended.output[-_KEPT:]}
    lines = ended.stdout.strip().splitlines() or [ended.stderr.strip()[-300:]]
    is_ok = ended.returncode in (0, _NO_TESTS)
    # A process that crashes prints no summary, so its output is all that is known.
    kept = {} if is_ok else {"exit_code": ended.returncode, "output": ended.output[-_KEPT:]}
    failed = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
    return row | {"is_ok": is_ok, "summary": lines[-1].strip("= "), "failed": failed, **kept}


def main() -> None:
    """Print one line of JSON for each file. Exit code 1 if a test failed."""
    rows = run_tests(os.cpu_count() or 1, tuple(sys.argv[1:]) or ("-m", "not slow"))
    for row in rows:
        print(json.dumps(row))
    if not all(row["is_ok"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
