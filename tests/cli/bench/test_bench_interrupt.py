"""Ctrl-C ends a load of `penstock bench serve`, which prints the results so far."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from fakes.processes.python_process import PythonProcess
from fakes.waiting import wait_until

from tests.cli.bench.stub_server import NUM_PROBES, StubServer, running


def test_ctrl_c_shows_what_was_answered_so_far(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    with running(StubServer(faults={4: "hang"})) as server:
        words = ["bench", "serve", "--base-url", server.url, "--num-prompts", "9", "--max-concurrency", "1"]
        with PythonProcess("-m", "penstock", *words, "--output-json", str(result)) as process:
            wait_until(lambda: len(server.bodies) >= NUM_PROBES + 5)
            process.send_signal(signal.SIGINT)
            shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: 5 requests that were not answered yet are left out." in " ".join(
        shown.replace("│", "").split()
    )
    found = json.loads(result.read_text())
    assert (found["completed"], found["failed"], found["num_prompts"]) == (4, 0, 4)
