"""A background response survives its client, its gateway, its node and Redis."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess
from fakes.processes.reference_engine import reference_choice
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess
from faults.tools.work import PROMPT, check_settled

from penstock.cli.demo_model import demo_model
from penstock.contract.job import SamplingParams
from penstock.queue.broker.connection import connect

POOL = "durable"
NUM_TOKENS = 150
SEED = 11
NUM_SEEN = 30
"""Events that the first client receives before it is killed."""
BODY: dict[str, Any] = {"model": POOL, "input": PROMPT, "seed": SEED, "ignore_eos": True}
BODY |= {"max_output_tokens": NUM_TOKENS}
NODE: dict[str, Any] = {"pool": POOL, "lease_ms": 3000, "stream_interval_ms": 0}
REFERENCE: dict[str, Any] = {"step_s": 0.02}
CLIENT = """
import sys, httpx
url, body = sys.argv[1:]
with httpx.stream("POST", url, content=body, headers={"content-type": "application/json"}, timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


def events_of_killed_client(url: str) -> list[dict[str, Any]]:
    """The first events of a new background response, as a client process receives them until it is killed."""
    body = json.dumps({**BODY, "background": True, "stream": True})
    events: list[dict[str, Any]] = []
    with PythonProcess("-c", CLIENT, f"{url}/v1/responses", body) as client:
        assert client.stdout is not None
        for line in client.stdout:
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == NUM_SEEN:
                break
        client.kill()
        assert client.wait() == -signal.SIGKILL, "the client ended before it was killed"
    return events


def events_after(url: str, response_id: str, number: int) -> list[dict[str, Any]]:
    """All events of a stored response after the one with this sequence number."""
    query = {"stream": "true"} | ({"starting_after": str(number)} if number >= 0 else {})
    answer = httpx.get(f"{url}/v1/responses/{response_id}", params=query, timeout=60)
    *lines, last = (line for line in answer.text.splitlines() if line.startswith("data: "))
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's only item."""
    (item,) = response["output"]
    return str(item["content"][0]["text"])


def undisturbed_text(http: httpx.Client, job_id: str, *, computed: bool) -> str:
    """Return the text of the same request without a fault: computed for the reference engine, else requested again."""
    if computed:
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=SEED)
        return reference_choice(job_id, params, list(PROMPT.encode())).text
    return text_of(http.post("/v1/responses", json=BODY).raise_for_status().json())


async def check_ended(url: str) -> None:
    """Assert that no job is open and that an audit finds nothing."""
    redis = connect(url)
    await check_settled(redis, POOL)
    await redis.aclose()


@pytest.mark.parametrize("engine", [REFERENCE, pytest.param({}, id="demo model", marks=pytest.mark.slow)])
def test_a_background_response_survives_the_death_of_client_gateway_node_and_redis(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    node_settings = {**NODE, **(engine or {"model": demo_model(), "num_kv_blocks": 256})}
    with RedisProcess(tmp_path / "redis") as server:
        with NodeProcess(server.url, **node_settings) as node, GatewayProcess(server.url) as gateway:
            seen = events_of_killed_client(gateway.url)
            gateway.kill()
            node.kill()
            server.kill()
        server.start()
        response_id = seen[0]["response"]["id"]
        job_id = response_id.removeprefix("resp_")
        with GatewayProcess(server.url) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
            job, response = (http.get(path).json() for path in (f"/v1/jobs/{job_id}", f"/v1/responses/{response_id}"))
            assert 0 < job["num_chunks"] < NUM_TOKENS, "all four were killed in the middle of it"
            assert response["status"] in ("queued", "in_progress") and response["output"] == []
            with NodeProcess(server.url, **node_settings):
                rest = events_after(gateway.url, response_id, seen[-1]["sequence_number"])
                whole = events_after(gateway.url, response_id, -1)
                response = http.get(f"/v1/responses/{response_id}").raise_for_status().json()
                ledger = http.get(f"/v1/jobs/{job_id}").json()["ledger"]
                expected = undisturbed_text(http, job_id, computed=bool(engine))
                asyncio.run(check_ended(server.url))

    assert seen + rest == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    deltas = [event["delta"] for event in whole if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(response) == expected
    assert response == whole[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == NUM_TOKENS
    assert (ledger["num_past_leases"], [event["event"] for event in ledger["events"]][-2:]) == (
        1,
        ["moved", "finished"],
    )
