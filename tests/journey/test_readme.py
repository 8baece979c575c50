"""The README's Python examples, run as they stand there against running processes; only the addresses are replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.source_tree import ROOT

pytestmark = pytest.mark.model

EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
REDIS_URL, HTTP_URL = "redis://localhost:6379", "http://127.0.0.1:8000"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


@pytest.fixture(scope="module")
def urls(demo_folder: Path) -> Iterator[dict[str, str]]:
    """Where `penstock serve` is reached, by the README's addresses."""
    with EmbeddedRedis() as redis:
        command = [sys.executable, "-m", "penstock", "serve", str(demo_folder), "--port", "0", "--redis-url", redis.url]
        serve = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert serve.stdout is not None
        try:
            for line in serve.stdout:
                if match := re.search(r"at (http://\S+)/v1", line):
                    yield {REDIS_URL: redis.url, HTTP_URL: match[1]}
                    break
            else:
                pytest.fail(f"serve ended: {serve.communicate()[1]}")
        finally:
            serve.terminate()
            serve.communicate(timeout=60)


def test_there_are_examples_of_every_door() -> None:
    assert len(EXAMPLES) == 7
    assert all(REDIS_URL in example or HTTP_URL in example for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_readme_runs_as_it_stands(urls: dict[str, str], example: str) -> None:
    for theirs, ours in urls.items():
        example = example.replace(theirs, ours)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 3
    assert done.stderr == ""
