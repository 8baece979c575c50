"""A background response outlives its client, its gateway, its node and Redis."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.reference_engine import reference_choice
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess
from faults.tools.work import PROMPT, check_settled

from penstock.contract.job import SamplingParams
from penstock.queue.broker.connection import connect

pytestmark = pytest.mark.timeout(300)

POOL = "durable"
NUM_TOKENS = 150
NUM_SEEN = 30
"""Events that the first client receives before it is killed."""
NODE: dict[str, Any] = {"pool": POOL, "step_s": 0.02, "lease_ms": 3000, "stream_interval_ms": 0}
CLIENT = """
import sys, httpx
url, body = sys.argv[1:]
with httpx.stream("POST", url, content=body, headers={"content-type": "application/json"}, timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


def events_of_killed_client(url: str) -> list[dict[str, Any]]:
    """The first events of a new background response, as a client process receives them until it is killed."""
    body = {"model": POOL, "input": PROMPT, "background": True, "stream": True, "max_output_tokens": NUM_TOKENS}
    command = [sys.executable, "-c", CLIENT, f"{url}/v1/responses", json.dumps(body)]
    events: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == NUM_SEEN:
                break
        client.kill()
    return events


def events_after(url: str, response_id: str, number: int) -> list[dict[str, Any]]:
    """All events of a stored response after the one with this sequence number."""
    query = {"stream": "true"} | ({"starting_after": str(number)} if number >= 0 else {})
    answer = httpx.get(f"{url}/v1/responses/{response_id}", params=query, timeout=60)
    *lines, last = (line for line in answer.text.splitlines() if line.startswith("data: "))
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def check_ended(url: str) -> None:
    """No job is open, and an audit finds nothing."""
    redis = connect(url)
    await check_settled(redis, POOL)
    await redis.aclose()


def test_a_background_response_survives_the_death_of_client_gateway_node_and_redis(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        with NodeProcess(server.url, **NODE) as node, GatewayProcess(server.url) as gateway:
            seen = events_of_killed_client(gateway.url)
            gateway.kill()
            node.kill()
            server.kill()
        server.start()
        response_id = seen[0]["response"]["id"]
        with NodeProcess(server.url, **NODE), GatewayProcess(server.url) as gateway:
            rest = events_after(gateway.url, response_id, seen[-1]["sequence_number"])
            whole = events_after(gateway.url, response_id, -1)
            response = httpx.get(f"{gateway.url}/v1/responses/{response_id}").raise_for_status().json()
            asyncio.run(check_ended(server.url))

    assert seen + rest == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    job_id = response_id.removeprefix("resp_")
    expected = reference_choice(job_id, SamplingParams(max_tokens=NUM_TOKENS), list(PROMPT.encode())).text
    deltas = [event["delta"] for event in whole if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert response == whole[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["content"][0]["text"] == expected
    assert response["usage"]["output_tokens"] == NUM_TOKENS
