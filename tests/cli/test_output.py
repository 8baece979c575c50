"""A model's text is printed on a terminal without its control characters."""

from __future__ import annotations

import pytest
from fakes import fake_node
from fakes.terminal import TerminalProcess

from penstock.producer.client import Client
from tests.producer.client.conftest import node_on_thread

STEERING = "\x1b[2Jone\x07\x9b1mtwo"


@pytest.mark.parametrize(
    "words",
    [
        "submit hello --raw --max-tokens 1",
        pytest.param("jobs tail JOB_ID", marks=pytest.mark.slow),
        pytest.param("jobs show JOB_ID --result", marks=pytest.mark.slow),
    ],
)
def test_control_characters_of_a_model_do_not_reach_the_terminal(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(fake_node, "fake_text", lambda _: STEERING)
    with node_on_thread(redis_url), Client(redis_url) as client:
        job = client.submit("hello", max_tokens=1)
        assert job.result().text == STEERING
        command = words.replace("JOB_ID", job.id).split()
        with TerminalProcess("-m", "penstock", *command, "--redis-url", redis_url) as terminal:
            terminal.wait_for("[2Jone1mtwo")
            assert terminal.wait() == 0
