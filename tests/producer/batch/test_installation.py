"""penstock's tasks in a user's own Celery app, whose broker, results, settings and other tasks stay as they are."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis as sync_redis
from celery import Celery, chain, chord, group
from fakes.fake_node import FakeNode
from fakes.waiting import wait_until
from faults.test_batches import ended, make_without_gateway
from faults.tools.redis_process import free_port
from kombu.common import ignore_errors

from penstock.celery import QUEUE, PenstockTasks, install, text_of
from penstock.contract.errors import ConflictError, RequestError
from penstock.producer.batch.celery_app import celery_url
from penstock.producer.batch.installation import STORED_BATCHES
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.task_leases import survive_lost_broker
from penstock.producer.batch.tasks import GENERATE
from penstock.producer.client import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.faults.tools.redis_process import RedisProcess
from tests.producer.batch.conftest import kill_group, process
from tests.producer.batch.test_worker_metrics import scrape

SHOP = """
import os, time
from celery import Celery
from penstock.celery import install

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
llm = install(app, stored_batches=True)

@app.task(name="shop.shout")
def shout(answer):
    texts = answer if isinstance(answer, list) else [answer]
    return " ".join(text["choices"][0]["text"].upper() for text in texts)

@app.task(name="shop.topic")
def topic():
    return "a turbine"

@app.task(name="shop.slow", acks_late=True)
def slow():
    time.sleep(60)
"""
WORKER = (sys.executable, "-m", "celery", "--workdir")


@contextmanager
def shop_worker(
    folder: Path, jobs_url: str, broker: str, results: str, *words: str, forked: bool = True
) -> Iterator[tuple[Any, Path]]:
    """Start a worker of the user's app. Yield its process and its log."""
    (folder / "shop.py").write_text(SHOP)
    log = folder / f"{time.monotonic_ns()}.log"
    env = {"SHOP_BROKER": broker, "SHOP_RESULTS": results, "PENSTOCK_REDIS_URL": jobs_url}
    command = (*WORKER, str(folder), "-A", "shop", "worker", "--loglevel", "INFO", *words)
    with process(*command, log=log, forked=forked, **env, PENSTOCK_CELERY_TASK_LEASE_S="1") as running:
        yield running, log


def shop(broker: str, results: str | None = None) -> tuple[Celery, PenstockTasks]:
    """Return the app as a web server of the user has it, which knows no Redis of the queue."""
    app = Celery("shop", broker=broker, backend=results or broker)
    return app, install(app)


def says(log: Path, words: str, count: int) -> bool:
    return log.read_text().count(words) >= count


def are_noted(server: RedisProcess, results: Path, count: int) -> bool:
    """Whether the worker has noted all tasks that are not done. kombu loses one if the broker dies just before."""
    with server.client() as redis:
        num_done = len(list(results.iterdir()))
        return redis.llen(QUEUE) == 0 and int(cast(Any, redis.hlen("unacked"))) + num_done >= count


def results_in(folder: Path) -> str:
    """Return a backend of results in files, which outlive the user's Redis."""
    (folder / "results").mkdir()
    return f"file://{folder / 'results'}"


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    """URL of the user's own Redis."""
    with EmbeddedRedis() as server:
        yield celery_url(server.url)


@pytest.fixture(scope="module")
def worker_log(served_url: str, broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of a worker with threads, which takes the tasks of the user and those of penstock."""
    folder = tmp_path_factory.mktemp("shop")
    with shop_worker(folder, served_url, broker, broker, "--pool", "threads", "--concurrency", "8") as (_, log):
        yield log


def test_chains_groups_and_chords_mix_tasks_of_both(broker: str, worker_log: Path) -> None:
    app, llm = shop(broker)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
    shout, topic = (app.signature(f"shop.{name}") for name in ("shout", "topic"))
    whole = chain(topic, llm.generate_from("About {previous}:", **options), llm.generate_from("{previous} and"), shout)
    messages = [{"role": "user", "content": "Shorten: {previous}"}]
    talk = chain(llm.generate("once", **options), llm.generate_from(messages=messages, max_tokens=3))
    many = group(llm.generate(f"prompt {number}", **options) for number in range(30))
    joined = chord([llm.generate(f"part {number}", **options) for number in range(3)], shout)
    summed = chord([llm.generate("one", **options), topic], llm.generate_from("All: {previous}", max_tokens=2))

    sent = [canvas.apply_async() for canvas in (whole, talk, many, joined, summed)]
    shouted, spoken, answers, parts, total = (one.get(timeout=60) for one in sent)

    assert shouted == shouted.upper() and len(shouted) > 5
    assert spoken["object"] == "chat.completion" and spoken["usage"]["completion_tokens"] == 3
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [6] * 30
    assert len({text_of(answer) for answer in answers}) > 1
    assert len(parts.split(" ")) >= 3
    assert total["usage"]["completion_tokens"] == 2
    app.close()


def test_a_task_by_name_reaches_the_queue_and_is_one_job_when_repeated(broker: str, worker_log: Path) -> None:
    app, _ = shop(broker)
    options: dict[str, Any] = {"args": ["once"], "kwargs": {"max_tokens": 5}, "task_id": "twice"}
    task = app.send_task(GENERATE, **options)
    first = task.get(timeout=60)
    # Before the second one, whose result may come at once.
    task.forget()
    assert app.send_task(GENERATE, **options).get(timeout=60)["id"] == first["id"]
    app.close()


def test_a_prompt_without_a_place_for_the_previous_text_is_refused(broker: str, worker_log: Path) -> None:
    app, llm = shop(broker)
    wrong = chain(app.signature("shop.topic"), llm.generate_from("no place", max_tokens=1)).apply_async()
    with pytest.raises(RequestError, match=r"prompt must contain \{previous\}"):
        wrong.get(timeout=60)
    no_text = chain(llm.generate("a", max_tokens=1), app.signature("shop.shout"), llm.generate_from("{previous}", n=99))
    with pytest.raises(RequestError, match="n:"):
        no_text.apply_async().get(timeout=60)
    app.close()


def test_all_tasks_of_a_process_share_one_client(served_url: str, broker: str, worker_log: Path) -> None:
    app, llm = shop(broker)
    tasks = group(llm.generate(f"shared {number}", max_tokens=200) for number in range(8)).apply_async()
    with sync_redis.Redis.from_url(served_url) as client:
        wait_until(lambda: client.scard("penstock:{ref}:open") == 8)
        assert len(client.pubsub_channels("penstock:{ref}:inbox:*")) == 1
    tasks.get(timeout=60)
    app.close()


def test_results_may_be_in_files_and_children_may_run_the_tasks(served_url: str, tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        places = celery_url(server.url), results_in(tmp_path)
        app, llm = shop(*places)
        with shop_worker(tmp_path, served_url, *places, "--concurrency", "2"):
            answers = [llm.generate(f"file {number}", max_tokens=4).delay() for number in range(6)]
            numbers = [answer.get(timeout=60, interval=0.05)["usage"]["completion_tokens"] for answer in answers]
        assert numbers == [4] * 6
        app.close()


def test_a_dead_workers_tasks_of_penstock_return_and_foreign_ones_stay(served_url: str, tmp_path: Path) -> None:
    pool = ("--pool", "threads", "--concurrency", "2")
    with EmbeddedRedis() as server, sync_redis.Redis.from_url(server.url) as client:
        places = celery_url(server.url), results_in(tmp_path)
        app, llm = shop(*places)
        with shop_worker(tmp_path, served_url, *places, *pool) as (first, _):
            foreign, ours = app.send_task("shop.slow"), llm.generate("returns", max_tokens=2000).delay()
            wait_until(lambda: client.hlen("unacked") == 2)
            kill_group(first)
        with shop_worker(tmp_path, served_url, *places, *pool) as (_, log):
            assert ours.get(timeout=60, interval=0.05)["usage"]["completion_tokens"] == 2000
            # The other task has been as silent. Celery stores a result before it acknowledges the task.
            wait_until(lambda: client.hlen("unacked") == 1)
            (kept,) = client.hvals("unacked")
        assert json.loads(kept)[0]["headers"]["id"] == foreign.id
        assert log.read_text().count("the task is queued again") == 1
        assert "shop.slow" not in log.read_text().partition("ready.")[2]
    app.close()


async def test_a_worker_of_the_app_runs_stored_batches_if_asked_and_counts_their_rows(
    redis_url: str, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, files, num_rows = free_port(), tmp_path / "files", 40
    monkeypatch.setenv("PENSTOCK_CELERY_METRICS_PORT", str(port))
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(files))
    async with FakeNode(redis_url), AsyncClient(redis_url) as client, asyncio.timeout(60):
        batch_id = await make_without_gateway(client, files, num_rows)
        pool = ("--pool", "threads", "--concurrency", "1")
        with shop_worker(tmp_path, redis_url, broker, broker, *pool, forked=False) as (_, log):
            await ended(client, batch_id)
            found = await asyncio.to_thread(scrape, port)
        batch = await client.batches.find(batch_id)
    assert (batch.status, batch.num_completed) == ("completed", num_rows), log.read_text()
    assert found["jobs_submitted_total",] == found["rows_total", "answered"] == num_rows
    assert found["rows_total", "failed"] == 0
    assert found["tokens_total", "prompt"] == batch.input_tokens > 0
    assert found["tokens_total", "completion"] == batch.output_tokens > 0


@pytest.mark.parametrize("asked", [True, False])
def test_stored_batches_run_in_an_app_that_asks_for_them(asked: bool) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    install(app, stored_batches=asked, settings=CelerySettings())
    assert (STORED_BATCHES in app.steps["worker"]) is asked
    install(app, stored_batches=True, settings=CelerySettings(stored_batches=False))
    assert (STORED_BATCHES in app.steps["worker"]) is asked, "one worker may switch it off"
    app.close()


def test_installing_changes_no_setting_and_happens_once() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_routes = {"shop.*": {"queue": "shop"}}
    before = {**app.conf}
    llm = install(app)
    assert {**app.conf} == before
    assert install(app) is llm
    with pytest.raises(ConflictError, match="another queue"):
        install(app, queue="other")
    assert llm.generate("x").type.acks_late and llm.generate("x").type.serializer == "json"
    assert "penstock.generate" not in Celery("other", set_as_current=False).tasks
    app.close()


@pytest.mark.parametrize(
    ("chosen", "taken"), [(None, {"celery", QUEUE}), ("celery", {"celery"}), (QUEUE, {QUEUE}), ("a,b", {"a", "b"})]
)
def test_a_worker_takes_from_the_queue_unless_it_names_its_queues(chosen: str | None, taken: set[str]) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    install(app, settings=CelerySettings())
    worker = SimpleNamespace(app=app)
    app.amqp.queues.select(chosen and chosen.split(","))  # As a worker does with `-Q`.
    (step,) = app.steps["worker"]
    step(worker).create(worker)
    assert set(app.amqp.queues.consume_from) == taken
    app.close()


def test_a_worker_with_tasks_outlives_its_broker(served_url: str, tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "broker") as server:
        places = celery_url(server.url), results_in(tmp_path)
        app, llm = shop(*places)
        # Celery's messages to other workers are tried again without a word while Redis is away.
        alone = "--without-mingle", "--without-gossip", "--without-heartbeat"
        with shop_worker(tmp_path, served_url, *places, "--concurrency", "4", *alone) as (worker, log):
            tasks = [llm.generate(f"after {number}", max_tokens=900).delay() for number in range(8)]
            for number in range(2):
                wait_until(partial(says, log, "Connected to", number + 1))
                wait_until(partial(are_noted, server, tmp_path / "results", 8))
                server.kill()
                wait_until(partial(says, log, "(1/", number + 1))
                server.start()
            lengths = [task.get(timeout=60, interval=0.05)["usage"]["completion_tokens"] for task in tasks]
            assert lengths == [900] * 8
            assert worker.poll() is None
        app.close()


def test_a_closed_channel_with_taken_tasks_has_lost_its_connection(tmp_path: Path) -> None:
    """kombu's error is an AttributeError, which ends a worker."""
    with RedisProcess(tmp_path / "redis") as server:
        app = Celery("shop", broker=celery_url(server.url), set_as_current=False)
        app.send_task("any")
        taken: list[Any] = []
        connection = app.connection_for_read()
        consumer = app.amqp.TaskConsumer(connection, accept=["json"], on_message=taken.append)
        consumer.consume()
        connection.drain_events(timeout=60)
        survive_lost_broker(consumer.channel)
        server.kill()
        # As Celery closes it when it notices.
        connection.transport.client = None
        ignore_errors(connection, connection.close)  # type: ignore[no-untyped-call]
        with pytest.raises(connection.connection_errors, match="is lost"):
            taken[0].ack()
        app.close()
