"""Prints the modules that a reader must know to follow one streamed chat and one decode step: `make modules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from fakes.traced_modules import TracedModules, TracedRun
from fixtures.tiny_model import make_tiny_model

from penstock.gpu_node.engine import Engine, EngineConfig
from tests.gateway.conftest import Stack

NUM_TOKENS = 40
NUM_CHATS = 5
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


def print_table(title: str, names: set[str]) -> None:
    print(f"\n{title}: {len(names)} modules\n")
    print("\n".join(sorted(names)))


def test_which_modules_run(record: Callable[[], TracedRun], capsys: pytest.CaptureFixture[str]) -> None:
    """Print them. On a busy machine, modules of the background, such as the heartbeat's, may be among them."""
    runs = [record() for _ in range(NUM_CHATS)]
    steps = [step for run in runs for step in run.steps[NUM_TOKENS // 2 : NUM_TOKENS - 4]]
    with capsys.disabled():
        print_table(
            "A streamed chat, outside of the engine's steps", set.intersection(*(run.around_steps for run in runs))
        )
        print_table("A decode step", set.union(*steps))
