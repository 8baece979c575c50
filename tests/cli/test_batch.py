"""`penstock batch run`: an interrupted command says how to go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from fakes.processes.node_process import NodeProcess
from fakes.waiting import wait_until

from penstock.producer.client import Client


def test_an_interrupted_batch_says_where_its_answers_are_and_how_to_go_on(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source.write_text(json.dumps(row) + "\n")
    with NodeProcess(redis_url, step_s=1.0), Client(redis_url) as client:
        command = [sys.executable, "-m", "penstock", "batch", "run", str(source), str(output), "--redis-url", redis_url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
            try:
                wait_until(lambda: len(client.jobs(state=("queued", "running")).jobs) == 1)
                run.send_signal(signal.SIGINT)
                stderr = run.communicate(timeout=60)[1]
            finally:
                run.kill()
    assert run.returncode == 128 + signal.SIGINT
    assert f"interrupted: what is answered is in {output}; the same command continues\n" in stderr
