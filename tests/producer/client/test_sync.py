"""The synchronous client behaves as the asynchronous one does, from any thread."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from fakes.fake_node import FakeNode, fake_text, fake_tokens
from fakes.processes.python_process import run_python
from fakes.waiting import wait_until

from penstock.contract.errors import JobCancelledError, NotFoundError, RequestError, UnavailableError
from penstock.producer.client import Client
from tests.producer.client.conftest import node_on_thread


@pytest.fixture
def node(redis_url: str) -> Iterator[FakeNode]:
    with node_on_thread(redis_url) as node:
        yield node


@pytest.fixture
def client(redis_url: str, node: FakeNode) -> Iterator[Client]:
    with Client(redis_url) as client:
        yield client


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-client"]


def test_stream_and_result(client: Client) -> None:
    job = client.submit("hello", max_tokens=30)
    chunks = list(job.stream())
    assert [t for chunk in chunks for t in chunk.token_ids] == fake_tokens(job.id, 30)
    assert "".join(chunk.text for chunk in chunks) == fake_text(fake_tokens(job.id, 30))
    assert job.result().choices[0].token_ids == tuple(fake_tokens(job.id, 30))
    assert client.result(job.id).outcome.state == job.status().state == client.status(job.id).state == "succeeded"
    assert [chunk.index for chunk in client.attach(job.id, after=27).stream()] == [28, 29, 30]
    assert [client.served_pool().pool] == list(client.pools())


def test_stream_by_one_call(client: Client) -> None:
    assert len(list(client.stream("hello", max_tokens=5))) == 6


def test_many_threads_share_one_client(client: Client) -> None:
    def run(number: int) -> bool:
        job = client.submit(f"hello {number}", max_tokens=20)
        return [t for chunk in job.stream() for t in chunk.token_ids] == fake_tokens(job.id, 20)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(run, range(64)))
    assert client.stats.log_reads == 0


def test_errors_come_through(client: Client) -> None:
    with pytest.raises(RequestError) as caught:
        client.submit("hello", top_p=2)
    assert caught.value.param == "top_p"
    job = client.submit("hello", max_tokens=3000)
    stream = job.stream()
    next(stream)
    assert job.cancel() == "cancelling"
    with pytest.raises(JobCancelledError):
        list(stream)


def test_leaving_a_stream_early_detaches_the_job(client: Client, node: FakeNode) -> None:
    job = client.submit("hello", max_tokens=3000)
    for _ in job.stream():
        break
    feed = job._job._source.feed
    wait_until(lambda: not feed.boxes)
    job.cancel()


def test_closing_wakes_waiting_threads(redis_url: str, node: FakeNode) -> None:
    client = Client(redis_url)
    job = client.submit("hello", max_tokens=4000)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(job.result)
        reading = threads.submit(lambda: list(job.stream()))
        time.sleep(0.1)
        client.close()
        for future in (waiting, reading):
            with pytest.raises(UnavailableError):
                future.result(timeout=60)
    with pytest.raises(UnavailableError):
        client.pools()
    client.close()
    assert client_threads() == []


def test_client_that_is_garbage_collected_is_closed(redis_url: str, node: FakeNode) -> None:
    job = Client(redis_url).submit("hello", max_tokens=5)
    assert job.result().outcome.state == "succeeded"
    del job
    gc.collect()
    assert client_threads() == []


def test_connecting_to_nothing_leaves_no_thread() -> None:
    with pytest.raises(UnavailableError):
        Client("unix:///nonexistent/redis.sock")
    gc.collect()
    assert client_threads() == []


def test_forked_process_must_create_its_own_client(client: Client) -> None:
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        with suppress(BaseException):
            signal.alarm(10)
            try:
                client.status("nobody's")
            except UnavailableError as error:
                os.write(write_end, error.code.encode())
            client.close()
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as said:
        assert said.read() == b"client_closed"
    os.wait()
    assert client.submit("hello", max_tokens=3).result().outcome.state == "succeeded"


def test_stream_collected_during_a_call_blocks_no_other_call(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    job = client.submit("hello", max_tokens=3000)
    stream = job.stream()
    next(stream)
    abandoned: list[object] = [stream]
    abandoned.append(abandoned)
    start = asyncio.run_coroutine_threadsafe

    def start_with_a_collection(*args: Any) -> Any:
        gc.collect()
        return start(*args)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", start_with_a_collection)
    del stream, abandoned
    assert job.cancel() == "cancelling"


def test_webhook_endpoints_are_kept_by_a_synchronous_client(client: Client) -> None:
    endpoint, secret = client.webhooks.create("https://hook.example/", name="a", event_types=["job.failed"])
    assert client.webhooks.update(endpoint.id, {"name": "b"}).name == "b"
    assert client.webhooks.rotate_secret(endpoint.id, keep_old=True)[1] != secret
    assert [one.name for one in client.webhooks.all()] == [client.webhooks.get(endpoint.id).name] == ["b"]
    assert client.webhooks.deliveries(endpoint.id, "pending").deliveries == []
    assert client.webhooks.redeliver(endpoint.id) == 0
    for ask in (lambda: client.webhooks.delivery(endpoint.id, "evt_0"), lambda: client.webhooks.get("none")):
        with pytest.raises(NotFoundError):
            ask()
    client.webhooks.delete(endpoint.id)
    assert client.webhooks.all() == []


def test_interpreter_exits_although_the_client_is_open(redis_url: str, node: FakeNode) -> None:
    program = f"""
from penstock.producer.client import Client
client = Client({redis_url!r})
job = client.submit("hello", max_tokens=3000, background=False)
stream = job.stream()
print(next(stream).index)
"""
    done = run_python("-c", program)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_nothing_is_logged_unless_the_application_configures_logging() -> None:
    script = "import logging, penstock.producer.client; logging.getLogger('penstock.queue').warning('nodes are lost')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
