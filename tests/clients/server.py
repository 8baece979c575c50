"""The servers of the runs: `penstock serve` with the demo model and a chat template that takes tools, with encoders,
and a gateway with a model that says what a script tells it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import httpx
from clients.environments import FOLDER
from fakes.served_model import TOOL_TEMPLATE, served
from fixtures.dequantized import dequantized
from fixtures.minilm import write_minilm
from fixtures.tiny_encoder import write_wide

from penstock.cli.demo_model import demo_model
from penstock.runtime.embedded_redis import EmbeddedRedis

MODEL = "smollm2"
EMBEDDER = "minilm"
RERANKER = "cross-encoder"
SCRIPTED_NAMES = ("scripted", "gpt-5.5", "gpt-6-sol", "claude-opus-5-5")
"""Names of the scripted model. Codex has other tools for each of the first three, Claude Code other prompts for the
last."""
RECEIVERS_HERE = {
    "PENSTOCK_GATEWAY_WEBHOOK_ALLOW_HTTP": "true",
    "PENSTOCK_GATEWAY_WEBHOOK_ALLOWED_NETWORKS": '["127.0.0.1/32"]',
}
"""Settings with which webhooks reach the scripts."""
SCRIPTED_NODE = Path(__file__).resolve().parents[1] / "fakes" / "processes" / "scripted_node.py"
START_TIMEOUT_S = 180.0
LOGS = FOLDER / "logs"


@dataclass(frozen=True)
class Server:
    """A running server, and the folder of its model, whose tokenizer load tools read."""

    url: str
    model_folder: Path
    model: str = MODEL
    reranker: str = ""
    """The model that scores pairs of texts, if there is one beside `model`."""


@contextmanager
def running_server(*, tells_tools: bool = False) -> Iterator[Server]:
    """Start a server, and stop it at the end. tells_tools: the model keeps its own template, which takes no tools."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / MODEL
        shutil.copytree(dequantized(demo_model()), folder, copy_function=os.symlink)
        if not tells_tools:
            template = folder / "chat_template.jinja"
            template.unlink(missing_ok=True)
            template.write_text(TOOL_TEMPLATE)
        LOGS.mkdir(parents=True, exist_ok=True)
        environment = mock.patch.dict(os.environ, RECEIVERS_HERE)
        with (LOGS / "server.log").open("w") as log, environment, served(folder, log) as url:
            yield Server(url, folder)


@contextmanager
def encoder_server() -> Iterator[Server]:
    """Start `penstock serve` with all-MiniLM-L6-v2 and a node with a cross-encoder, and stop them at the end.

    Raises NoMiniLMError if the package with the model is not installed.
    """
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="encoders")))
        folder, reranker, runtime = (temporary / name for name in (EMBEDDER, RERANKER, "runtime"))
        runtime.mkdir(mode=0o700)
        write_minilm(folder)
        reranker.mkdir()
        write_wide(reranker, "bert", "ForSequenceClassification", num_labels=1)
        # Its tokenizer, which spells unknown words by letters, says 64.
        (reranker / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
        LOGS.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context((LOGS / "encoders.log").open("w"))
        url = stack.enter_context(served(folder, log, runtime_dir=runtime))
        env = {**os.environ, "PENSTOCK_RUNTIME_DIR": str(runtime)}
        # The node finds the Redis of `penstock serve` by the folder.
        words = ("-m", "penstock", "node", str(reranker))
        process = subprocess.Popen([sys.executable, *words], env=env, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        for model in (EMBEDDER, RERANKER):
            _wait_for(model, url)
        yield Server(url, folder, EMBEDDER, RERANKER)


@contextmanager
def scripted_server(tool_format: str = "hermes") -> Iterator[Server]:
    """Start `penstock gateway` and a node with the scripted model, and stop them at the end.

    tool_format: in which the model writes its calls.
    """
    name, *aliases = SCRIPTED_NAMES
    LOGS.mkdir(parents=True, exist_ok=True)
    with EmbeddedRedis() as redis, ExitStack() as stack, tempfile.TemporaryDirectory(prefix="scripted") as folder:
        node = {"MODEL": name, "ALIASES": json.dumps(aliases), "TOOL_PARSER": tool_format}
        env = {**os.environ, **{f"PENSTOCK_NODE_{key}": value for key, value in node.items()}}
        env |= {"PENSTOCK_REDIS_URL": redis.url, "PENSTOCK_RUNTIME_DIR": folder}
        log = stack.enter_context((LOGS / "scripted.log").open("w"))
        port = _free_port()
        for words in ([str(SCRIPTED_NODE)], ["-m", "penstock", "gateway", "--port", str(port)]):
            process = subprocess.Popen([sys.executable, *words], env=env, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        _wait_for(name, url)
        yield Server(url, Path(folder))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for(model: str, url: str) -> None:
    """Wait until a gateway serves a model."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        with suppress(httpx.TransportError):
            if any(one["id"] == model for one in httpx.get(f"{url}/v1/models").json()["data"]):
                return
        time.sleep(0.1)
    raise TimeoutError(f"no model {model} at {url}")
