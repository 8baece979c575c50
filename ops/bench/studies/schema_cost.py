"""What a JSON schema costs 16 streams: `PYTHONPATH=ops python -m bench.studies.schema_cost`.

One server with the demo model. Turns of 16 streams with a schema alternate with turns without one; each has the same
prompts and numbers of tokens. Printed are the ratio of their tokens per second, by pairs with its 95 % interval, and
the CPU time a token of the node and of its grammar processes. `--url` measures a running server of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from bench.engines.sse import stream
from bench.pairs import interval

HOST = "127.0.0.1"
NUM_STREAMS = 16
NUM_TOKENS = 96
READY_S = 120.0
MARK = "structured.template"
"""A word of the command of the grammar processes."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["engineer", "doctor", "teacher"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "is_active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "tags", "is_active"],
}
SCHEMA = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": PERSON, "minItems": 40}},
    "required": ["people"],
}
CONSTRAINED = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}}


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """A server with the demo model: its process id and port."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port: int = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PENSTOCK_RUNTIME_DIR": folder}
        command = [sys.executable, "-m", "penstock", "serve", "--port", str(port)]
        with subprocess.Popen(command, env=env, stdout=sys.stderr) as process:
            try:
                yield process.pid, port
            finally:
                process.terminate()


def wait_until_ready(port: int) -> None:
    """Raise TimeoutError if the server does not answer in time."""
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the server was not ready within {READY_S:.0f} s")


def cpu_s(pid: int) -> dict[str, float]:
    """Return the CPU time of a server's processes: those of grammars, the node, and all."""
    found = {"grammar": 0.0, "node": 0.0, "all": 0.0}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent = times.user + times.system
        found["all"] += spent
        if MARK in command:
            found["grammar"] += spent
        elif " node " in f"{command} ":
            found["node"] += spent
    return found


async def turn(port: int, seed: int, options: dict[str, Any]) -> tuple[float, int]:
    """Run the streams of a turn; return its seconds and its tokens."""
    bodies = [
        {"prompt": f"List {20 + i} people of turn {seed}:", "max_tokens": NUM_TOKENS, "seed": i}
        for i in range(NUM_STREAMS)
    ]
    began_s = time.perf_counter()
    counts = await asyncio.gather(*(stream(HOST, port, body | options, lambda: None) for body in bodies))
    return time.perf_counter() - began_s, sum(counts)


def measure(pid: int, port: int, pairs: int) -> None:
    """Run the turns and print what they show."""
    kinds: dict[str, dict[str, Any]] = {"without": {"ignore_eos": True}, "with": CONSTRAINED}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    spent: dict[str, dict[str, float]] = {kind: {"grammar": 0.0, "node": 0.0, "all": 0.0} for kind in kinds}
    tokens = dict.fromkeys(kinds, 0)
    for kind in kinds:
        asyncio.run(turn(port, 0, kinds[kind]))
    for pair in range(1, pairs + 1):
        for kind in list(kinds)[:: 1 if pair % 2 else -1]:
            before = cpu_s(pid)
            took_s, count = asyncio.run(turn(port, pair, kinds[kind]))
            after = cpu_s(pid)
            rates[kind].append(count / took_s)
            tokens[kind] += count
            for name in before:
                spent[kind][name] += after[name] - before[name]
    ratios = [one / other for one, other in zip(rates["with"], rates["without"], strict=True)]
    low, high = interval(ratios)
    print(f"with ÷ without: {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}] of {pairs} pairs")
    for kind in kinds:
        parts = ", ".join(f"{name} {value / tokens[kind] * 1e6:.0f}" for name, value in spent[kind].items())
        print(f"{kind}: {statistics.median(rates[kind]):.0f} tokens/s; CPU us a token: {parts}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    with server() as (pid, port):
        wait_until_ready(port)
        measure(pid, port, options.pairs)


if __name__ == "__main__":
    main()
