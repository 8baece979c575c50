"""How many modules a reader must know to follow one streamed chat, and one decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from fakes.traced_modules import TracedModules, TracedRun
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.engine import Engine, EngineConfig
from tests.gateway.conftest import Stack

MAX_OF_CHAT = 58
MAX_OF_STEP = 29
NUM_TOKENS = 40
NUM_CHATS, MOST_CHATS = 5, 40
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "stream": True,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 1.0,
    "seed": 1,
}


@pytest.fixture(scope="module")
def record(redis_url_of_file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], TracedRun]]:
    """Record a chat with a gateway and a node in this process, after a chat that warms their caches."""
    model = str(make_tiny_model(tmp_path_factory.mktemp("tiny")))
    engine = Engine(EngineConfig(model=model, dtype="bfloat16", num_kv_blocks=256, num_threads=1, weight_cache=False))
    traced = TracedModules()
    with traced.installed():
        stack = Stack(redis_url_of_file)
    try:
        with traced.installed():
            stack.start_node(engine, model=model, pool="tiny")
            url = f"{stack.start_gateway()}/v1/chat/completions"
            with httpx.Client(timeout=60) as client:
                chat(client, url)
                yield lambda: traced_chat(traced, client, url)
    finally:
        stack.close()


def chat(client: httpx.Client, url: str) -> None:
    with client.stream("POST", url, json=CHAT) as answer:
        assert answer.status_code == 200, answer.read()
        # On a busy machine, all tokens may come in one event.
        assert sum(line.startswith("data: ") for line in answer.iter_lines()) >= 2


def traced_chat(traced: TracedModules, client: httpx.Client, url: str) -> TracedRun:
    traced.start()
    chat(client, url)
    return traced.stop()


def in_lines(names: set[str]) -> str:
    return "\n".join([f"{len(names)} modules:", *sorted(names)])


def test_modules_that_run_for_one_streamed_chat(record: Callable[[], TracedRun]) -> None:
    """Modules of the background, such as the heartbeat's, do not run in each of the chats.

    On a busy machine a chat takes so long that they run in nearly all, so there are more chats then.
    """
    found = set.intersection(*(record().around_steps for _ in range(NUM_CHATS)))
    for _ in range(MOST_CHATS - NUM_CHATS):
        if len(found) <= MAX_OF_CHAT:
            break
        found &= record().around_steps
    assert {"gateway/http/entry.py", "gpu_node/publishing/outbox.py"} <= found
    assert len(found) <= MAX_OF_CHAT, in_lines(found)


def test_modules_that_run_for_one_decode_step(record: Callable[[], TracedRun]) -> None:
    runs = [record() for _ in range(NUM_CHATS)]
    steps = [step for run in runs for step in run.steps[NUM_TOKENS // 2 : NUM_TOKENS - 4]]
    found = set.union(*steps)
    assert {"gpu_node/engine/engine.py", "gpu_node/engine/worker.py"} <= found
    assert len(found) <= MAX_OF_STEP, in_lines(found)
