"""A process without free file descriptors says so once, and once more when it has some again."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

CODE = """
import asyncio, resource, sys
from penstock.runtime.file_descriptors import DescriptorWatch
from penstock.runtime.logging import LogSettings, configure_logging

async def serve(reader, writer):
    await reader.read()
    writer.close()

async def main():
    watch = DescriptorWatch(look_s=0.05, recovered_after_s=0.2)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    watch.start()
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    watch.stop()

configure_logging(LogSettings.load())
if sys.argv[1] == "asyncio":
    asyncio.run(main())
else:
    import uvloop
    uvloop.run(main())
"""
SHORT, FREE = "too few file descriptors are free", "file descriptors are free again"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_shortage_is_logged_once_with_limit_and_remedy_and_again_only_after_recovery(loop: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, loop],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    with process:
        assert process.stdout is not None and process.stderr is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        for _ in range(2):
            with ExitStack() as stack:
                for _ in range(60):
                    stack.enter_context(socket.create_connection(address, timeout=60))
                said.append(json.loads(process.stderr.readline()))
            said.append(json.loads(process.stderr.readline()))
        _, rest = process.communicate("end\n", timeout=60)
    assert (process.returncode, rest) == (0, "")
    assert [line["message"] for line in said] == 2 * [SHORT, FREE]
    assert "may have 40 open files" in said[0]["reason"] and "ulimit -n" in said[0]["reason"]


CONNECTING = """
import asyncio, os, resource, sys
from penstock.contract.errors import UnavailableError
from penstock.queue.broker.connection import connect, translated

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        with translated():
            await connect(sys.argv[1]).ping()
    except UnavailableError as error:
        print(error.code, error.message)

asyncio.run(main())
"""


def test_a_connection_to_redis_without_a_free_descriptor_names_that_cause(redis_url: str) -> None:
    done = subprocess.run([sys.executable, "-c", CONNECTING, redis_url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = "redis_away Redis is unreachable: no file descriptor is free for a connection; this process may have 3 open"
    assert done.stdout.startswith(said) and "LimitNOFILE=" in done.stdout
