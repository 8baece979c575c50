"""What the page on other queues shows of them is real: it runs there, with this server as the model, or it parses."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import boto3  # type: ignore[import-untyped]
import openai
import pytest
from celery import Celery, chord
from celery.schedules import crontab
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from tests.gateway.conftest import MODEL, EchoEngine
from tests.pages import Block, blocks_of
from tests.source_tree import ROOT

PAGE = ROOT / "docs/howto/from_queues.md"
NAMES = ["the Nile", "the Rhine"]


def blocks(*reasons: str) -> list[str]:
    """Return the blocks of the page that its own test does not run, for these reasons."""
    return [block.text for block in blocks_of(PAGE) if block.way == "not run" and block.reason in reasons]


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose tasks run where they are sent."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_always_eager = app.conf.task_eager_propagates = True
    yield app
    app.close()


def test_celerys_tasks_and_chord_ask_this_server(app: Celery, api: openai.OpenAI, engine: EchoEngine) -> None:
    tasks, chords = blocks("needs a broker and a worker of its own")
    names: dict[str, Any] = {"app": app, "openai": api, "names": NAMES, "chord": chord, "crontab": crontab}
    exec(tasks.replace('"m"', repr(MODEL)), names)
    assert names["texts"] == [f"Describe {name}." for name in NAMES]
    summaries = list[str]()

    def summarize(texts: list[str]) -> None:
        summaries.extend(texts)

    names["summarize"] = app.task(summarize)
    exec(chords, names)
    assert summaries == names["texts"]
    assert app.conf.beat_schedule["report"]["schedule"] == crontab(hour=3, minute=0, day_of_week="1-5")


def test_a_consumer_of_sqs_asks_this_server(
    api: openai.OpenAI, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (consumer,) = blocks("needs an account of a cloud")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        sqs = boto3.client("sqs", endpoint_url=f"http://{host}:{port}", region_name="eu-central-1")
        url, answers = sqs.create_queue(QueueName="rivers")["QueueUrl"], list[str]()

        def ask_model(prompt: str) -> str:
            return api.completions.create(model=MODEL, prompt=prompt).choices[0].text

        exec(
            consumer,
            {"sqs": sqs, "url": url, "prompt": "The Nile is", "json": json, "ask_model": ask_model}
            | {"store": answers.append},
        )
        assert answers == ["The Nile is"]
        left = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        assert {left[name] for name in left if name.startswith("ApproximateNumberOfMessages")} == {"0"}
        sqs.close()
    finally:
        server.stop()


@pytest.mark.parametrize("block", [block for block in blocks_of(PAGE) if block.way == "not run"], ids=lambda _: "")
def test_what_needs_another_server_parses(block: Block) -> None:
    if block.language == "python":
        compile(block.text, str(PAGE), "exec")
        return
    assert block.language == "js"
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    words = (node, "--input-type=module", "--check", "-")
    done = subprocess.run(words, input=block.text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
