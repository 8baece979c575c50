"""`penstock batch run`: an interrupted command says what it did and how to go on, and then it does go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.waiting import wait_until

from penstock.producer.client import Client


def test_an_interrupted_batch_says_what_it_did_and_the_same_command_goes_on(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    # With one row in flight, the second one is open when the first one is in the file.
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens},
        }
        for name, max_tokens in (("a", 1), ("b", 200), ("c", 1))
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("batch", "run", str(source), str(output), "--in-flight", "1", "--redis-url", redis_url)
    with NodeProcess(redis_url, step_s=0.1), Client(redis_url) as client:
        with subprocess.Popen([sys.executable, "-m", "penstock", *words], stderr=subprocess.PIPE, text=True) as run:
            try:
                assert run.stderr is not None
                assert any("1 of 3 rows done" in line for line in run.stderr)
                run.send_signal(signal.SIGINT)
                stderr = run.communicate(timeout=60)[1]
            finally:
                run.kill()
        assert run.returncode == 128 + signal.SIGINT
        assert "interrupted with 1 of 3 rows done; the same command goes on after these\n" in stderr
        assert not output.exists()
        # Its jobs end with it.
        wait_until(lambda: not client.jobs(state=("queued", "running")).jobs)
    with NodeProcess(redis_url, step_s=0.001):
        done = run_command(*words)
    assert (done.returncode, done.stderr.startswith("3 answered, 0 failed, ")) == (0, True), done.stderr
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["a", "b", "c"]
