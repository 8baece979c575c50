"""What a JSON schema costs 16 streams: `PYTHONPATH=ops python -m bench.studies.schema_cost`.

One server with the demo model. Turns of 16 streams with a schema alternate with turns without one; each has the same
prompts and numbers of tokens. Printed are the ratio of their tokens per second, with its 95 % interval, and the
CPU time a token of the node, of its grammar processes and of the server. On a busy machine the CPU time says more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
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

from bench.child import free_port
from bench.engines.sse import stream
from bench.pairs import interval

HOST = "127.0.0.1"
NUM_STREAMS = 16
NUM_TOKENS = 96
READY_S = 120.0
PARTS = ("grammar", "node", "all")
MARK = "structured.template"
"""A word of the command of the grammar processes."""


def schema_of(**limits: int) -> dict[str, Any]:
    """Return the body's field with a schema of a list of persons. `limits`: keywords of its texts."""
    text = {"type": "string", **limits}
    properties = {
        "name": text,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["engineer", "doctor", "teacher"]},
        "tags": {"type": "array", "items": text, "maxItems": 3},
        "is_active": {"type": "boolean"},
    }
    person = {"type": "object", "properties": properties, "required": list(properties)}
    people = {"type": "object", "properties": {"people": {"type": "array", "items": person, "minItems": 40}}}
    schema = people | {"required": ["people"]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": schema}}}


WITHOUT = "no schema"
KINDS: dict[str, dict[str, Any]] = {
    WITHOUT: {"ignore_eos": True},
    "texts of any length": schema_of(),
    "short texts": schema_of(maxLength=20),
}
"""Fields of the bodies. Masks of short texts cost most, because each character has states of its own."""


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """A server with the demo model: its process id and port."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"PENSTOCK_RUNTIME_DIR": folder}
        command = [sys.executable, "-m", "penstock", "serve", "--ephemeral", "--port", str(port)]
        with subprocess.Popen(command, env=env, stdout=sys.stderr) as process:
            try:
                _wait_until_ready(process, port)
                yield process.pid, port
            finally:
                process.terminate()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Raise RuntimeError if the server ends, TimeoutError if it does not answer in time."""
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the server was not ready within {READY_S:.0f} s")


def cpu_s(pid: int) -> dict[str, float]:
    """Return the CPU time of a server's processes: those of grammars, the node, and all."""
    found = dict.fromkeys(PARTS, 0.0)
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


def measure(pid: int, port: int, rounds: int) -> None:
    """Run the turns and print what they show."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    spent: dict[str, dict[str, float]] = {kind: dict.fromkeys(PARTS, 0.0) for kind in KINDS}
    tokens = dict.fromkeys(KINDS, 0)
    for options in KINDS.values():
        asyncio.run(turn(port, 0, options))
    for number in range(1, rounds + 1):
        for kind in list(KINDS)[:: 1 if number % 2 else -1]:
            before = cpu_s(pid)
            took_s, count = asyncio.run(turn(port, number, KINDS[kind]))
            rates[kind].append(count / took_s)
            tokens[kind] += count
            for part, after_s in cpu_s(pid).items():
                spent[kind][part] += after_s - before[part]
    for kind in KINDS:
        ratios = [one / other for one, other in zip(rates[kind], rates[WITHOUT], strict=True)]
        low, high = interval(ratios)
        us = {part: value / tokens[kind] * 1e6 for part, value in spent[kind].items()}
        cost = us["all"] / (spent[WITHOUT]["all"] / tokens[WITHOUT] * 1e6)
        print(
            f"{kind}: {statistics.median(rates[kind]):.0f} tokens/s, {statistics.median(ratios):.3f} of those without "
            f"[{low:.3f}, {high:.3f}]; CPU us a token: "
            f"{', '.join(f'{part} {value:.0f}' for part, value in us.items())}, {cost:.3f} of that without"
        )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with server() as (pid, port):
        measure(pid, port, options.rounds)


if __name__ == "__main__":
    main()
