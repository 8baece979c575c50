"""Runs the GPU tests file by file in several processes, with nothing but torch, triton, numpy and pytest.

python -m bench_gpu.suite [pytest's arguments], such as `--collect-only`
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/kernels/triton", "tests/gpu_node/model/gpu")
_NEED_CHECKPOINTS = ("adapters", "graphs", "load", "offload", "runner", "stale_blocks", "stored")
"""Files of the second folder that read checkpoints or run an engine, which needs more packages than a kernel."""
_NO_TESTS = 5
"""pytest's exit code where a file has no test to run, such as without Hypothesis."""
_FILE_TIMEOUT_S = 300


def left_out() -> tuple[str, ...]:
    """Return the names of the test files that cannot start here, because a package is absent."""
    packages = ("pydantic", "gguf", "safetensors", "transformers", "redis")
    absent = any(find_spec(name) is None for name in packages)
    return tuple(f"test_{name}.py" for name in _NEED_CHECKPOINTS) if absent else ()


def run_tests(
    num_workers: int, arguments: tuple[str, ...] = ("-m", "not slow"), names: tuple[str, ...] = ()
) -> list[dict[str, object]]:
    """Run each test file, or those of `names`, in a process of its own.

    Return how each ended: `is_ok`, pytest's summary, and what failed.
    """
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("test_*.py"))]
    files = [path for path in files if path.name not in left_out() or "gpu_node" not in path.parts]
    files = [path for path in files if not names or path.name in names]
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda path: _run_file(path, arguments), files))


def _run_file(path: Path, arguments: tuple[str, ...]) -> dict[str, object]:
    # Parents' conftest.py files need what is absent here. Plugins of a larger environment would want settings.
    config = ("-c", str(ROOT / "tests/gpu.ini"), "--rootdir", str(ROOT), "--confcutdir", str(path.parent))
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *config, *arguments, str(path)]
    name = str(path.relative_to(ROOT))
    try:
        done = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=_FILE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"file": name, "is_ok": False, "summary": f"no end after {_FILE_TIMEOUT_S} s", "failed": []}
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    failed = [line for line in lines if re.match("(FAILED|ERROR) ", line)]
    return {
        "file": name,
        "is_ok": done.returncode in (0, _NO_TESTS),
        "summary": lines[-1].strip("= "),
        "failed": failed,
        **({"output": done.stdout[-4000:] + done.stderr[-1000:]} if failed else {}),
    }


def main() -> None:
    """Print one line of JSON for each file. Exit code 1 if a test failed."""
    rows = run_tests(os.cpu_count() or 1, tuple(sys.argv[1:]) or ("-m", "not slow"))
    for row in rows:
        print(json.dumps(row))
    if not all(row["is_ok"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
