"""Sampling options reach a node unchanged through every client. HTTP is left to the gateway's tests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from celery.signals import worker_shutdown
from fakes.fake_node import FakeNode
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import run_python
from fixtures.tiny_model import make_tiny_model

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.records import Batch
from penstock.producer.batch.runner import run_batch
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import GENERATE
from penstock.producer.client import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis

PLAIN = {"min_p": 0.25, "presence_penalty": -1.5, "frequency_penalty": 0.5, "max_tokens": 1}
OPTIONS = PLAIN | {"logit_bias": {"20": -100, "3": 1.5}, "bad_words": ["no"], "include_stop_str_in_output": True}
OPTIONS |= {"structured_outputs": {"json": {"type": "object"}}}


async def _by_client(url: str, _folder: Path) -> None:
    async with AsyncClient(url) as client:
        await (await client.submit("hello", **OPTIONS)).result()


async def _by_batch(url: str, folder: Path) -> None:
    row = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hello", **OPTIONS}}
    (folder / "in.jsonl").write_text(json.dumps(row))
    await run_batch(url, Batch(str(folder / "in.jsonl"), str(folder / "out.jsonl")))


async def _by_task(url: str, _folder: Path) -> None:
    with make_app(CelerySettings.load(), url) as app:
        task = app.tasks[GENERATE]
        await asyncio.to_thread(task.apply, args=["hello"], kwargs=OPTIONS, throw=True)
        # A worker's end closes the client that its tasks share.
        await asyncio.to_thread(worker_shutdown.send, sender=app)


async def _by_command(url: str, _folder: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in PLAIN.items()]
    command = ("-m", "penstock", "submit", "hello", "--raw", "--redis-url", url, *options)
    done = await asyncio.to_thread(run_python, *command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("door", [_by_client, _by_batch, _by_task, _by_command])
async def test_sampling_options_reach_the_node(
    redis_url: str, tmp_path: Path, door: Callable[[str, Path], Awaitable[None]]
) -> None:
    async with FakeNode(redis_url, auto=False) as node, asyncio.TaskGroup() as group:
        group.create_task(door(redis_url, tmp_path))
        [job] = await node.take()
        await job.say()
        await job.finish()
    assert job.request.params == SamplingParams(**(PLAIN if door is _by_command else OPTIONS))


@pytest.fixture(scope="module")
def served_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis with a node that serves the tiny model."""
    model = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with EmbeddedRedis() as server, NodeProcess(server.url, model=model, pool="tiny", dtype="bfloat16"):
        yield server.url


async def test_a_job_with_a_frequency_penalty_repeats_less_and_with_a_negative_one_more(served_url: str) -> None:
    numbers = []
    async with AsyncClient(served_url) as client:
        for penalty in (-2.0, 0.0, 2.0):
            job = await client.submit(
                "the gate opens", seed=1, max_tokens=60, ignore_eos=True, temperature=0.7, frequency_penalty=penalty
            )
            numbers.append(len(set((await job.result()).choices[0].token_ids)))
    assert numbers[0] < numbers[1] < numbers[2]


async def test_job_matches_its_grammar_and_an_unenforceable_grammar_is_refused_by_field(served_url: str) -> None:
    options = {"max_tokens": 40, "n": 2, "structured_outputs": {"regex": "[ab]{3,6}!"}}
    async with AsyncClient(served_url) as client:
        result = await (await client.submit("the gate opens", **options)).result()
        assert all(re.fullmatch("[ab]{3,6}!", choice.text) for choice in result.choices)
        impossible = await client.submit("the gate opens", structured_outputs={"json": {"not": {}}})
        with pytest.raises(RequestError, match="cannot be enforced") as caught:
            await impossible.result()
    assert caught.value.param == "structured_outputs.json_schema"
