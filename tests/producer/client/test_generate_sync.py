"""`generate` and `map` of the synchronous client, and what Ctrl-C leaves running."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Iterator

import pytest
from fakes.fake_node import FakeNode, fake_tokens
from fakes.processes.python_process import PythonProcess
from fakes.waiting import until

from penstock.contract.errors import RequestError, ResultTimeoutError
from penstock.producer.client import AsyncClient, Client
from penstock.producer.client.run import Run
from tests.producer.client.conftest import node_on_thread


@pytest.fixture
def sync_client(redis_url: str) -> Iterator[Client]:
    with node_on_thread(redis_url), Client(redis_url) as client:
        yield client


def test_generate_returns_results_in_order(sync_client: Client) -> None:
    results = sync_client.generate([f"prompt {i}" for i in range(30)], max_tokens=3)
    assert [result.token_ids for result in results] == [tuple(fake_tokens(r.job_id, 3)) for r in results]
    assert [result.job_id for result in results] == sorted({result.job_id for result in results})
    assert len(results) == 30
    assert sync_client.generate("a single prompt", max_tokens=1)[0].finish_reason == "length"


def test_map_reads_prompts_on_the_calling_thread_when_it_can_use_them(sync_client: Client) -> None:
    threads: list[threading.Thread] = []

    def prompts() -> Iterator[str]:
        for number in range(1000):
            threads.append(threading.current_thread())
            yield f"prompt {number}"

    results = sync_client.map(prompts(), max_tokens=2, max_in_flight=4)
    assert threads == []
    first, second = next(results), next(results)
    assert first.job_id < second.job_id
    assert set(threads) == {threading.current_thread()}
    assert len(threads) < 40


# What earlier tests have left is collected here, too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finished_map_leaves_no_run_in_the_client(sync_client: Client) -> None:
    def num_runs() -> int:
        gc.collect()
        return sum(type(one) is Run for one in gc.get_objects())

    before = num_runs()
    for _ in range(2):
        assert len(list(sync_client.map(["one", "two"], max_tokens=1))) == 2
        assert len(list(sync_client.map_unordered(["one", "two"], max_tokens=1))) == 2
    assert num_runs() == before


def test_map_unordered_yields_each_prompt_with_its_result(sync_client: Client) -> None:
    pairs = list(sync_client.map_unordered(iter([[1], [2], [3], [4]]), max_tokens=2))
    assert sorted(map(str, (prompt for prompt, _ in pairs))) == ["[1]", "[2]", "[3]", "[4]"]
    assert all(result.outcome.state == "succeeded" for _, result in pairs)


def test_an_error_of_the_prompts_themselves_comes_through(sync_client: Client) -> None:
    def prompts() -> Iterator[str]:
        yield "hello"
        raise LookupError("no such row")

    with pytest.raises(LookupError):
        list(sync_client.map(prompts(), max_tokens=2))
    with pytest.raises(RequestError) as caught:
        list(sync_client.map(["hello"], top_p=2))
    assert caught.value.param == "top_p"


def test_timeouts_hold_for_the_synchronous_client(redis_url: str) -> None:
    with node_on_thread(redis_url, step_s=0.05), Client(redis_url) as client:
        with pytest.raises(ResultTimeoutError):
            client.submit("hello", max_tokens=2000).result(timeout=0.2)
        with pytest.raises(ResultTimeoutError):
            client.generate(["hello"], max_tokens=2000, timeout=0.2)
        with pytest.raises(ResultTimeoutError):
            list(client.map(["hello"], max_tokens=2000, timeout=0.2))


async def test_the_synchronous_client_works_inside_a_running_event_loop(sync_client: Client) -> None:
    # As in a notebook, whose cells run on the thread of a loop.
    assert asyncio.get_running_loop().is_running()
    assert len(sync_client.generate(["hello"] * 5, max_tokens=2)) == 5
    assert len(list(sync_client.stream("hello", max_tokens=2))) == 3


PROGRAM = """
import sys
from penstock import Client
with Client(sys.argv[1]) as client:
    job = client.submit("hello", max_tokens=4000)
    next(job.stream())
    print(job.id, flush=True)
    {call}
"""


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        ("client.generate(['hello'] * 20, max_tokens=4000)", {"cancelled"}),
        ("list(client.map(('hello' for n in iter(int, 1)), max_in_flight=20, max_tokens=4000))", {"cancelled"}),
        ("list(client.map_unordered(['hello'] * 20, max_tokens=4000))", {"cancelled"}),
        ("client.generate(['hello'] * 20, max_tokens=4000, needs_reader=False)", {"running"}),
        ("job.result()", {"running"}),
        ("list(job.stream())", {"running"}),
    ],
)
async def test_what_ctrl_c_leaves_running(redis_url: str, call: str, ends: set[str]) -> None:
    async with FakeNode(redis_url, step_s=0.02) as node, AsyncClient(redis_url) as client:
        program = PROGRAM.format(call=call)
        process = PythonProcess("-c", program, redis_url)
        assert process.stdout is not None
        submitted = (await asyncio.to_thread(process.stdout.readline)).strip()
        await until(lambda: len(node.jobs) >= (21 if "hello" in call else 1))
        others = node.jobs.keys() - {submitted}
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
        assert process.returncode == -signal.SIGINT
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        await asyncio.sleep(0.5)

        async def states() -> set[str]:
            return {(await client.status(job_id)).state for job_id in others or {submitted}}

        await until(states, lambda seen: seen == ends)
        outcomes = [(await client.status(job_id)).outcome for job_id in others]
        assert {one.code for one in outcomes if one} <= {"cancelled"}, (
            "they were canceled, not only left by their reader"
        )
        assert (await client.status(submitted)).state == "running", "a submitted job outlives its reader"


async def test_a_stream_by_one_call_ends_with_its_reader(client: AsyncClient, redis_url: str) -> None:
    async with FakeNode(redis_url, step_s=0.01, reattach_grace_ms=50):
        stream = client.stream("hello", max_tokens=4000)
        first = await anext(stream)
        await stream.aclose()
        status = await until(lambda: client.status(first.job_id), lambda status: status.state != "running")
        assert status.outcome is not None
        assert (status.state, status.outcome.code) == ("cancelled", "unread")
