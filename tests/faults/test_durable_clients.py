"""The public clients of Durable Streams read a job's stream, as they are, while its gateways are killed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients.catalog import Client
from clients.environments import InstallationError, install
from faults.gateway_kills import KeptGateway
from faults.tools.answers import PATIENCE_S, TEXT

from tests.gateway.conftest import MODEL, EchoEngine, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PYTHON = Client("durable-streams", "durable-streams (Python)", "durable_streams_reader.py", "reads")
NODE = Client("durable-streams-node", "@durable-streams/client", "reader.mjs", "reads", folder="durable_streams")
STEP_S = 0.2
AT_MESSAGES = (10, 20, 30)
"""How many messages have come when a gateway is killed."""
TESTS = Path(__file__).parents[1]


@pytest.fixture
def stand(redis_url: str) -> Iterator[tuple[KeptGateway, EchoEngine]]:
    """A gateway with a keeper, and the engine of its only node."""
    engine, stack = EchoEngine(), Stack(redis_url)
    stack.start_node(engine, model=MODEL, pool="echo")
    gateway = KeptGateway(redis_url)
    yield gateway, engine
    gateway.close()
    stack.close()


def messages_of(url: str) -> list[Any]:
    """Return the messages of a stream that has ended."""
    messages, offset, is_closed = list[Any](), "-1", False
    while not is_closed:
        answer = httpx.get(url, params={"offset": offset}).raise_for_status()
        messages += answer.json()
        offset, is_closed = answer.headers["stream-next-offset"], "stream-closed" in answer.headers
    return messages


@pytest.mark.parametrize("live", ["sse", "long-poll"])
@pytest.mark.parametrize("reader", [PYTHON, NODE], ids=lambda reader: reader.name)
def test_a_client_reads_each_message_once_though_gateways_are_killed(
    stand: tuple[KeptGateway, EchoEngine], reader: Client, live: str
) -> None:
    if reader.is_node and shutil.which("npm") is None:
        pytest.skip("needs npm")
    try:
        words = install(reader)
    except InstallationError as error:
        pytest.skip(str(error).partition("\n")[0])
    gateway, engine = stand
    engine.step_s = STEP_S
    body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 50}
    job = httpx.post(f"{gateway.url}/v1/jobs", json=body).raise_for_status().json()["id"]
    url = f"{gateway.url}/v1/jobs/{job}/stream"
    env = {**os.environ, "PENSTOCK_STREAM": url, "PENSTOCK_LIVE": live, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        read = list[Any]()
        for line in process.stdout:
            read.append(json.loads(line))
            if len(read) in AT_MESSAGES:
                gateway.kill()
                gateway.wait_until_it_serves_again()
        assert process.wait(PATIENCE_S) == 0
    assert len(read) > AT_MESSAGES[-1]
    assert read == messages_of(url)
