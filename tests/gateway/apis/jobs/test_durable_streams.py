"""The public suite for servers of Durable Streams, whose streams are read by the gateway's reader of job logs.

The suite makes its streams by PUT and POST, which the gateway does not have. So the reader is mounted over logs in
memory, with a small writer (`fakes.durable_streams`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
READ = (
    *("Read Operations", "Long-Poll Operations", "Browser Security Headers", "HEAD Metadata", "Long-Poll Edge Cases"),
    *("Offset Validation and Resumability", "Caching and ETag", "SSE Mode", "JSON Mode"),
    *("Read-Your-Writes Consistency", "Content-Type Validation", "Case-Insensitivity"),
)
"""Groups of which each test must pass."""
READ_OF_CLOSED = (
    *("Create with Stream-Closed", "Close Operations", "HEAD with Stream Closure", "Read Closed Streams (Catch-up)"),
    *("Long-poll with Stream Closure", "SSE with Stream Closure"),
)
"""Of the group `Stream Closure`."""
OF_WRITERS = (
    *("Stream-Seq", "producer", "Producer", "TTL", "Expir", "expir", "Fork", "fork", "seq", "subscription", "webhook"),
    *(
        "pull-wake",
        "dedup",
        "idempotent-close",
        "large payload",
        "State Hash",
        "Concurrent Writer",
        "Sequence Ordering",
    ),
)
"""What names a test of writers, some of which fail: order of writes, producers, times to live, forks, subscriptions,
and bodies of 10 MiB. The gateway's streams are written by nodes alone, so it has none of these."""


@pytest.fixture
def url() -> Any:
    """The URL of the reader over logs in memory."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    words = [sys.executable, "-m", "fakes.durable_streams"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


def results(folder: Path, url: str) -> list[dict[str, Any]]:
    """Run the suite, and return what it says of each test."""
    shutil.copytree(HERE / "durable_streams", folder, dirs_exist_ok=True)
    words = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    if subprocess.run(words, cwd=folder).returncode:
        pytest.skip("npm finds no registry")
    run = ("node_modules/.bin/vitest", "run", "--reporter=json", "--outputFile=results.json")
    subprocess.run(run, cwd=folder, env={**os.environ, "STREAMS_URL": url}, capture_output=True)
    (file,) = json.loads((folder / "results.json").read_text())["testResults"]
    return list(file["assertionResults"])


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_public_suite_of_durable_streams_passes_but_for_its_tests_of_writers(tmp_path: Path, url: str) -> None:
    found = results(tmp_path, url)
    groups = {one["ancestorTitles"][0] for one in found}
    assert groups >= {*READ, "Stream Closure"}
    for one in found:
        group, name = one["ancestorTitles"], " / ".join([*one["ancestorTitles"], one["title"]])
        is_of_reader = group[0] in READ or any(part in READ_OF_CLOSED for part in group)
        if one["status"] == "failed":
            assert not is_of_reader and any(word in name for word in OF_WRITERS), (name, one["failureMessages"])
    passed = [one for one in found if one["status"] == "passed"]
    assert sum(one["ancestorTitles"][0] in READ for one in passed) > 80
