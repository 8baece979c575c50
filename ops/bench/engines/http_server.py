"""A server with OpenAI's API and Redis, gateway and whatever else it starts: measured from a client on the same cores.

Options: `command`, in which {weights}, {port} and {context} are replaced; {context} is the tokens that the cache
must hold.
`env` is the environment, and `ready` the path that answers 200 once requests are served. `log` is the file that gets
its output; by default that goes to stderr.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from bench.child import Spec, free_port, main
from bench.drive import drive_streams, fine_runner
from bench.engines.sse import stream
from bench.stopwatch import Stopwatch
from bench.workload import BenchRequest, Workload

HOST = "127.0.0.1"
POLL_S = 0.01
MAX_SLOTS = 64
CONTEXT_MARGIN = 2048
"""Tokens for the warm-up, and for a server that rounds up."""
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


class _Served:
    in_own_process = False

    def __init__(self, port: int, runner: asyncio.Runner) -> None:
        self._port = port
        self._runner = runner
        self._model = json.loads(_get(port, "/v1/models")[1])["data"][0]["id"]

    def run(self, workload: Workload, watch: Stopwatch) -> None:
        self._runner.run(drive_streams(self._ask, workload, watch))

    def extra(self) -> dict[str, float]:
        return {}

    async def _ask(self, i: int, request: BenchRequest, watch: Stopwatch) -> None:
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "temperature": 0,
            "ignore_eos": True,
        }
        watch.told(i, await stream(HOST, self._port, body, lambda: watch.saw(i, 0)))


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, path: str) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            if _get(port, path)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(POLL_S)
    raise RuntimeError(f"the server was not ready within {READY_TIMEOUT_S:.0f} s")


@contextmanager
def open_session(spec: Spec) -> Iterator[_Served]:
    port = free_port()
    context = spec.requests_of().most_tokens(MAX_SLOTS) + CONTEXT_MARGIN
    command = [word.format(weights=spec.weights, port=port, context=context) for word in spec.options["command"]]
    env = os.environ | spec.options.get("env", {})
    with open(spec.options["log"], "ab") if "log" in spec.options else nullcontext(sys.stderr) as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        _wait_until_ready(server, port, spec.options["ready"])
        with fine_runner() as runner:
            yield _Served(port, runner)
    finally:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main(open_session)
