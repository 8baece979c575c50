"""Settings of other people's Celery apps: penstock's tasks arrive in them, or a sentence says what to set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker
from fakes.command import restored_process
from fakes.fake_node import FakeNode
from kombu.entity import Queue

from penstock.celery import QUEUE, PenstockTasks, install
from penstock.contract.errors import ConfigError, UnavailableError
from penstock.producer.batch.settings import CelerySettings

OWN: Any = [Queue("shop")]  # type: ignore[no-untyped-call]  # kombu ships no types
LEASES = CelerySettings(task_lease_s=5)


@contextmanager
def shop(**settings: Any) -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(settings)
    yield app
    # A worker of a test sends no signal at its end, by which its process closes the client.
    signals.worker_shutdown.send(sender=app)
    app.close()


def num_waiting(app: Celery, queue: str) -> int:
    """Return how many messages a queue of the broker in memory has."""
    with app.connection_for_read() as connection:
        return int(connection.default_channel._size(queue))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"accept_content": ["pickle"], "result_serializer": "pickle"}, r"set accept_content to \['pickle', 'json'\]"),
        ({"accept_content": ["application/x-python-serialize"]}, "accept_content"),
        ({"accept_content": ["auth"], "task_serializer": "auth"}, r"accept_content to \['auth', 'json'\]"),
        ({"accept_content": []}, "accept_content"),
        ({"result_serializer": "pickle"}, "accept_content: .* writes results as pickle"),
        ({"result_accept_content": ["pickle"]}, r"set result_accept_content to \['pickle', 'json'\]"),
    ],
)
def test_an_app_that_would_lose_tasks_or_results_is_told_what_to_set(settings: dict[str, Any], remedy: str) -> None:
    with shop(**settings) as app, pytest.raises(ConfigError, match=remedy):
        install(app)


@pytest.mark.parametrize(
    "settings",
    [
        {"accept_content": ["application/json"]},
        {"accept_content": ["pickle", "json"], "task_serializer": "pickle", "result_serializer": "pickle"},
        {"accept_content": ["json"], "result_accept_content": ["pickle"], "result_serializer": "pickle"},
    ],
)
def test_an_app_that_reads_json_is_taken(settings: dict[str, Any]) -> None:
    with shop(**settings) as app:
        assert install(app).generate("x").delay().id


def test_settings_that_follow_the_installation_are_checked_when_a_task_is_sent_and_when_a_worker_starts() -> None:
    with shop() as app:
        llm = install(app, settings=CelerySettings())
        before, app.conf.accept_content = num_waiting(app, QUEUE), ["pickle"]
        with pytest.raises(ConfigError, match="accepts only pickle"):
            llm.generate("x").delay()
        with pytest.raises(ConfigError, match="would drop them"):
            _start_steps(app)
        assert num_waiting(app, QUEUE) == before


def _start_steps(app: Celery) -> None:
    """Do what a worker of the app does before it connects."""
    for step in app.steps["worker"]:
        worker = SimpleNamespace(app=app)
        step(worker).create(worker)


def test_a_visibility_timeout_below_the_lease_is_named_where_the_broker_is_redis() -> None:
    with shop(broker_transport_options={"visibility_timeout": 2}) as app:
        install(app, settings=LEASES)
        _start_steps(app)  # Other brokers have no such timeout.
        app.conf.broker_url = "redis://localhost:1/0"
        with pytest.raises(ConfigError, match=r"visibility_timeout is 2 s.*at least 5"):
            _start_steps(app)


@pytest.mark.parametrize(
    "settings",
    [
        {"task_create_missing_queues": False},
        {"task_create_missing_queues": False, "task_queues": OWN, "task_default_queue": "shop"},
        {"task_routes": {"*": {"exchange": "elsewhere", "routing_key": "nowhere"}}},
        {"task_routes": {"penstock.*": {"queue": "moved"}}},
        {"task_default_exchange": "shop", "task_default_exchange_type": "topic"},
        {"task_queues": OWN, "task_default_queue": "shop", "task_ignore_result": True},
    ],
)
def test_tasks_reach_their_queue_and_answers_are_kept(settings: dict[str, Any]) -> None:
    with shop(**settings) as app:
        llm = install(app, queue="ours")
        before = num_waiting(app, "ours")
        sent = [llm.generate("x").delay(), app.send_task("penstock.generate", ["x"])]
        assert num_waiting(app, "ours") == before + 2
        assert not any(task.ignored for task in sent)


def test_a_worker_may_name_the_queue_where_the_app_creates_none() -> None:
    with shop(task_create_missing_queues=False) as app:
        install(app)
        # As a worker does before it reads `-Q`.
        signals.celeryd_init.send(sender="w", instance=SimpleNamespace(app=app), conf=app.conf, options={})
        app.amqp.queues.select([QUEUE])
        assert set(app.amqp.queues.consume_from) == {QUEUE}


async def test_an_app_that_creates_no_queues_and_ignores_results_gets_its_answer(redis_url: str) -> None:
    settings = {"task_create_missing_queues": False, "task_ignore_result": True, "accept_content": ["pickle", "json"]}
    with shop(**settings) as app:
        llm = install(app, redis_url=redis_url)
        async with FakeNode(redis_url):
            answer = await asyncio.to_thread(_answered, app, llm)
    assert answer["usage"]["completion_tokens"] == 3


def _answered(app: Celery, llm: PenstockTasks) -> dict[str, Any]:
    # A worker sets the handlers and the level of the root logger.
    with restored_process(), start_worker(app, perform_ping_check=False, pool="solo"):
        answer: dict[str, Any] = llm.generate("once", max_tokens=3).delay().get(timeout=60)
    return answer


def test_an_eager_task_raises_the_error_of_a_client_instead_of_retrying_without_a_pause(tmp_path: Any) -> None:
    with shop(task_always_eager=True) as app:
        llm = install(app, redis_url=f"unix://{tmp_path}/none.sock")
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            llm.generate("x").delay().get()
        assert time.monotonic() - began < 60
