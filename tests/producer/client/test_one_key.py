"""One idempotency key, asked a hundred times at once by several processes: one generation, a hundred equal streams."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
import redis as sync_redis
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess

from penstock.queue import keys

NUM_PROCESSES, NUM_CLIENTS, NUM_SUBMITS = 4, 5, 5
ASKER = """
import asyncio, json, sys
from penstock.producer.client import AsyncClient

async def ask(client):
    job = await client.submit("one question", idempotency_key="k", max_tokens=60, n=2)
    chunks = [chunk async for chunk in job.stream()]
    return job.id, [[c.index, c.choice, c.position, c.token_ids, c.text, c.finish_reason] for c in chunks]

async def ask_often(url, num_clients, num_submits):
    clients = [await AsyncClient(url).connect() for _ in range(num_clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    answers = await asyncio.gather(*(ask(client) for client in clients for _ in range(num_submits)))
    for client in clients:
        await client.close()
    print(json.dumps(answers), flush=True)

asyncio.run(ask_often(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.fixture
def served(redis_url: str) -> Iterator[str]:
    with NodeProcess(redis_url, step_s=0.01):
        yield redis_url


def test_hundred_submits_from_four_processes_are_one_generation(served: str) -> None:
    words = ("-c", ASKER, served, str(NUM_CLIENTS), str(NUM_SUBMITS))
    askers = [PythonProcess(*words, stdin=subprocess.PIPE, stderr=None) for _ in range(NUM_PROCESSES)]
    for asker in askers:
        assert asker.stdout is not None
        assert asker.stdout.readline() == "ready\n"
    for asker in askers:
        assert asker.stdin is not None
        asker.stdin.write("go\n")
        asker.stdin.flush()
    answers = [answer for asker in askers for answer in json.loads(asker.communicate(timeout=100)[0])]

    assert len(answers) == NUM_PROCESSES * NUM_CLIENTS * NUM_SUBMITS == 100
    assert len({job_id for job_id, _ in answers}) == 1
    assert [chunks for _, chunks in answers] == [answers[0][1]] * 100
    assert sum(len(tokens) for _, _, _, tokens, _, _ in answers[0][1]) == 2 * 60
    with sync_redis.Redis.from_url(served) as client:
        (record,) = client.keys(f"{keys.prefix('reference')}:job:*")
        assert client.hmget(record, "state", "losses", "preemptions") == [b"succeeded", b"0", b"0"]
