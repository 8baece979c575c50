"""The tests that the `openai` package brings for its resources, run against penstock instead of a mock server.

They come from the package's source distribution. The plugin beside this file fills in what a mock server does not need.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from clients.python.checks import say_versions
from clients.python.openai_suite_plugin import SuitePlugin

FILES = ("chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py")
INPUT_ITEMS = "responses/test_input_items.py"


def source_folder() -> Path:
    """Return the unpacked source distribution of the installed version; fetch it if it is not there."""
    name = f"openai-{importlib.metadata.version('openai')}"
    if not Path(name).exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai"]
        subprocess.run([*pip, name.replace("-", "==")], check=True, stdout=sys.stderr)
        with tarfile.open(f"{name}.tar.gz") as archive:
            archive.extractall(filter="data")
    return Path(name).resolve()


def main() -> None:
    """Run the tests of the resources that penstock has."""
    folder = source_folder()
    say_versions("openai")
    files = [str(folder / "tests" / "api_resources" / file) for file in (*FILES, INPUT_ITEMS)]
    settings = [
        "--rootdir",
        str(folder),
        "-c",
        str(folder / "pyproject.toml"),
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
    ]
    sys.path.insert(0, str(folder))
    sys.exit(pytest.main([*settings, "-q", *files], plugins=[SuitePlugin()]))


if __name__ == "__main__":
    main()
