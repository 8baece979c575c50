"""`penstock serve` as a process continues to serve after its node, its gateway or its Redis is killed."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fakes.processes.python_process import PythonProcess, run_python
from fakes.waiting import wait_until
from fixtures.tiny_model import make_tiny_model

from penstock import Client

PATIENCE_S = 60.0
PARTS = {"node": "-m penstock node", "gateway": "-m penstock gateway", "redis": "-server "}


class Serving:
    """The command, its output, and its child processes."""

    def __init__(self, folder: Path, *options: str, pool: str = "tiny") -> None:
        model = make_tiny_model(folder / pool)
        words = ("serve", str(model), "--kv-cache-gib", "0.01", "--port", "0", *options)
        env = {name: value for name, value in os.environ.items() if name != "PENSTOCK_REDIS_URL"}
        # The native runner is there in a tenth of a second, torch in three.
        env |= {"PENSTOCK_NODE_DTYPE": "bfloat16", "PENSTOCK_NODE_LEASE_MS": "3000", "PENSTOCK_LOG_FORMAT": "console"}
        self.process = PythonProcess("-m", "penstock", *words, env=env)
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self.process.stdout is not None
        shown = ""
        while not (url := re.search(r"at (http://\S+)/v1 ", shown)):
            line = self.process.stdout.readline()
            assert line, self.said
            shown += line
        self.url = url[1]

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    def close(self) -> None:
        """Send SIGINT, as Ctrl-C does, and wait for the end."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE_S) == 128 + signal.SIGINT
        self._listener.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def answers(self) -> bool:
        body = {"model": "tiny", "prompt": "the gate", "max_tokens": 4, "ignore_eos": True}
        try:
            return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def pid_of(self, part: str) -> int:
        """Return the process id of a part, not of its guard process."""
        parents = {pid: int(stat.rpartition(") ")[2].split()[1]) for pid, stat in read_all("stat")}
        for pid, words in read_all("cmdline"):
            guard = parents.get(pid, 0)
            if PARTS[part] in words.replace("\0", " ") and parents.get(guard) == self.process.pid:
                return pid
        raise AssertionError(part)

    def wait_for(self, line: str) -> str:
        return wait_until(lambda: [said for said in self.said if line in said], what=lambda: self.said)[-1]


def read_all(name: str) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / name).read_text(errors="replace")
        except OSError:
            continue


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    one = Serving(tmp_path, "--data-dir", str(tmp_path / "data"))
    yield one
    one.close()
    assert not any("Traceback" in line for line in one.said), one.said


@pytest.mark.parametrize(
    "part", ["node", *(pytest.param(part, marks=pytest.mark.slow) for part in ("gateway", "redis"))]
)
def test_a_part_that_is_killed_starts_again_at_its_address(serving: Serving, part: str) -> None:
    assert serving.answers()
    os.kill(serving.pid_of(part), signal.SIGKILL)
    why = serving.wait_for(f"{part} ended with status 137 (SIGKILL")
    head, _, told = why.partition(" WARNING ")
    assert re.fullmatch(r"serve   \| [\d:]{8}", head)
    # Nothing else: the last line of a killed process's log says nothing about its end.
    again = "at once, and 0 connections wait for it" if part == "gateway" else "in 0.5 s"
    assert told == (
        f"{part} ended with status 137 (SIGKILL, as the system does when memory runs out); it starts again {again}"
    )
    serving.wait_for(f"{part} serves again")
    wait_until(serving.answers, what=lambda: serving.said)
    assert serving.process.poll() is None


@pytest.mark.slow
def test_a_second_serve_joins_the_first_and_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    first, second = Serving(folders[0]), Serving(folders[1])
    second.wait_for(f"joins the Redis of another penstock serve url=unix://{tmp_path}/run/redis.sock")
    assert first.answers() and second.answers()
    first.process.kill()
    second.wait_for(f"the Redis of process {first.process.pid} has ended")
    third = Serving(folders[2])
    second.wait_for("redis serves again")
    wait_until(second.answers, what=lambda: second.said)
    for one in (second, third):
        one.close()
    first.process.communicate()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_jobs", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_accepted_jobs_end_after_every_process_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_jobs: int
) -> None:
    """The level is `memory`: Redis has passed each job to the kernel, so only the machine's end could lose one."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = Serving(tmp_path)
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    with Client(f"unix://{tmp_path}/run/redis.sock") as client:
        job_ids = [client.submit("the gate", **options).id for _ in range(num_jobs // 2)]
        # The other half is open at the kill.
        not_before_s = 6 + num_jobs / 25
        job_ids += [client.submit("the gate", not_before_s=not_before_s, **options).id for _ in range(num_jobs // 2)]
    family = [psutil.Process(first.process.pid), *psutil.Process(first.process.pid).children(recursive=True)]
    for one in family:
        one.kill()
    psutil.wait_procs(family, timeout=PATIENCE_S)
    first.process.communicate()
    second = Serving(tmp_path)
    said = second.wait_for("jobs of an earlier run go on")
    assert int(said.rpartition("num_open=")[2]) >= num_jobs // 2
    with Client(f"unix://{tmp_path}/run/redis.sock") as client:
        ended = [client.attach(job_id).result(timeout=PATIENCE_S) for job_id in job_ids]
    assert [one.usage and one.usage.completion_tokens for one in ended] == [24] * num_jobs
    second.close()


def test_a_serve_of_another_model_tells_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = Serving(tmp_path)
    with Client(f"unix://{tmp_path}/run/redis.sock") as client:
        client.submit("the gate", max_tokens=4, not_before_s=600)
    first.close()
    second = Serving(tmp_path, pool="other")
    said = second.wait_for("jobs wait for a model that this command does not serve")
    assert "penstock serve MODEL --port PORT" in said and "pool=tiny" in said and "num_open=1" in said
    second.close()


def test_an_ephemeral_queue_tells_how_many_jobs_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    one = Serving(tmp_path, "--ephemeral")
    with Client(f"unix://{tmp_path}/run/redis.sock") as client:
        for _ in range(2):
            client.submit("the gate", max_tokens=4, not_before_s=600)
    one.close()
    assert "num_open=2" in one.wait_for("open jobs end with this queue, which was only in memory")
    assert not (tmp_path / "state" / "penstock" / "redis").exists()


def test_a_node_that_cannot_start_at_all_ends_the_command(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    ran = run_python("-m", "penstock", "serve", str(model), "--port", "0", "--ephemeral")
    assert ran.returncode == 2, ran.stderr
    assert "the file is cut short" in ran.stderr and "starts again" not in ran.stderr
    assert ran.stderr.count("cut short") == 1, "the reason is told once"
