"""The tests of resources in the `openai` package, run against penstock instead of a mock server.

They come from the package's source distribution. The plugin beside this file adds what a mock server does not need.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from clients.python.checks import API, say_versions
from clients.python.openai_suite_plugin import SuitePlugin

FILES = ("chat/test_completions.py", "test_completions.py", "test_embeddings.py", "test_models.py", "test_responses.py")
OF_RESPONSES = ("responses/test_input_items.py", "responses/test_input_tokens.py")
OVERRIDDEN = ("addopts=", "filterwarnings=")
"""Their settings need plugins and a version of pytest that are not pinned here."""


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
    files = [str(folder / "tests" / "api_resources" / file) for file in (*FILES, *OF_RESPONSES)]
    config = [
        "--rootdir",
        str(folder),
        "-c",
        str(folder / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:terminal",
    ]
    overridden = [text for setting in OVERRIDDEN for text in ("-o", setting)]
    sys.path.insert(0, str(folder))
    os.environ["TEST_API_BASE_URL"] = API
    sys.exit(pytest.main([*config, *overridden, *files], plugins=[SuitePlugin()]))


if __name__ == "__main__":
    main()
