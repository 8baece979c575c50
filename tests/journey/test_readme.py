"""The documents' Python examples, run unchanged, except for the gateway's address and the model's path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.processes.python_process import PythonProcess, run_python

from tests.source_tree import ROOT

pytestmark = pytest.mark.model

PAGES = ("README.md", "docs/PYTHON.md", "docs/HTTP.md")
EXAMPLES = [
    (page, example)
    for page in PAGES
    for example in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
]
NAMES = [f"{page}-{number}" for number, (page, _) in enumerate(EXAMPLES)]
ADDRESS = "127.0.0.1:8000"
"""That of the gateway, in the URLs of HTTP and of WebSockets."""
LOCAL_REDIS = ("Client()", "redis_url_of()")
MODEL = '"model.gguf"'
"""The model of the examples that use an engine."""


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return clean | {"PENSTOCK_RUNTIME_DIR": os.environ["PENSTOCK_RUNTIME_DIR"]}


@pytest.fixture(scope="module")
def http_url(demo_file: Path) -> Iterator[str]:
    """The URL of the gateway of `penstock serve` with its default model. The examples find its Redis without a setting.

    With the model's path instead, its answers may not end: the sampling that suits it comes with the default.
    """
    assert demo_file.exists()
    serve = PythonProcess("-m", "penstock", "serve", "--ephemeral", "--port", "0", env=environment())
    assert serve.stdout is not None
    try:
        for line in serve.stdout:
            if match := re.search(r"at (http://\S+)/v1", line):
                yield match[1]
                break
        else:
            pytest.fail(f"serve ended: {serve.communicate()[1]}")
    finally:
        serve.terminate()
        serve.communicate(timeout=60)


def test_readme_has_examples_of_every_interface() -> None:
    assert {name for name, _ in EXAMPLES} == set(PAGES)
    assert all(any(found in example for found in (ADDRESS, MODEL, *LOCAL_REDIS)) for _, example in EXAMPLES)


@pytest.mark.parametrize("example", [example for _, example in EXAMPLES], ids=NAMES)
def test_example_of_the_readme_runs_unchanged(
    http_url: str, demo_file: Path, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Some examples write files.
    example = example.replace(ADDRESS, http_url.removeprefix("http://")).replace(MODEL, repr(str(demo_file)))
    if ".embed(" in example or ".rerank(" in example:  # the demo model is for chats, so that warns
        example = f"import warnings\nwarnings.filterwarnings('ignore', '.* is for chat')\n{example}"
    done = run_python("-W", "error", "-c", example, env=environment(), imports=("openai",))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3
    assert done.stderr == ""
