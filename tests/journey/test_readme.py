"""The README's Python examples, run as they stand there against running processes; only the addresses are replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess

from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.source_tree import ROOT

pytestmark = pytest.mark.model

EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
REDIS_URL, HTTP_URL = "redis://localhost:6379", "http://127.0.0.1:8000"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


@pytest.fixture(scope="module")
def urls(demo_folder: Path) -> Iterator[dict[str, str]]:
    """Where a node with the demo model and a gateway are reached, by the README's addresses."""
    with EmbeddedRedis() as redis, NodeProcess(redis.url, model=demo_folder), GatewayProcess(redis.url) as gateway:
        yield {REDIS_URL: redis.url, HTTP_URL: gateway.url}


def test_there_are_examples_of_every_door() -> None:
    assert len(EXAMPLES) == 6
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
