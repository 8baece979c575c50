"""What a model is good for: `/v1/models` and `penstock doctor` say it, and another use carries a notice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.command import run_command
from fakes.served_model import TOOL_TEMPLATE, served
from fixtures.gguf_file import write_gguf
from fixtures.tiny_model import make_tiny_model
from websockets.sync.client import connect

from penstock import Client, Engine
from penstock.cli.machine.doctor import check_nodes
from penstock.runtime.embedded_redis import EmbeddedRedis

NOTICE = "X-Penstock-Notice"
OF_DEMO = "the model's files say that it is for chat, completion, not for embed"
Change = Callable[[Path], Path]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def door(demo_file: Path, redis_url: str) -> Iterator[httpx.Client]:
    with served(demo_file, redis_url=redis_url) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


EMBEDDINGS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "Hi"}),
    ("/rerank", {"query": "Hi", "documents": ["a", "b"]}),
    ("/score", {"text_1": "Hi", "text_2": ["a"]}),
    ("/v1/jobs", {"url": "/v1/embeddings", "body": {"input": "Hi"}}),
]
CLAIMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    ("/tokenize", {"prompt": "Hi"}),
]


def test_the_list_of_models_says_what_each_is_good_for(door: httpx.Client) -> None:
    (model,) = door.get("/v1/models").json()["data"]
    assert model["capabilities"] == ["chat", "completion"]
    assert door.get(f"/v1/models/{model['id']}").json() == model


async def test_doctor_says_what_a_model_is_good_for(door: httpx.Client, redis_url: str) -> None:
    said = [check.finding for check in await check_nodes(redis_url)]
    assert [line for line in said if line.endswith("its model is good for chat, completion")]
    assert [line for line in said if line.endswith("have the format json (the template takes no tools)")]


@pytest.mark.parametrize(("path", "body"), EMBEDDINGS, ids=[path for path, _ in EMBEDDINGS])
def test_a_use_that_the_files_do_not_claim_carries_a_notice(
    door: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = door.post(path, json=body)
    assert (answer.is_success, answer.headers.get(NOTICE)) == (True, OF_DEMO)


@pytest.mark.parametrize(("path", "body"), CLAIMED, ids=[path for path, _ in CLAIMED])
def test_a_use_that_the_files_claim_carries_none(door: httpx.Client, path: str, body: dict[str, Any]) -> None:
    (model,) = door.get("/v1/models").json()["data"]
    answer = door.post(path, json={"model": model["id"], **body})
    assert (answer.is_success, answer.headers.get(NOTICE)) == (True, None)


def test_the_python_client_warns_once(door: httpx.Client, redis_url: str) -> None:
    with Client(redis_url) as client, pytest.warns(UserWarning, match=OF_DEMO) as said:
        for _ in range(2):
            assert len(client.embed(["Hi"])) == 1
    assert len({str(one.message) for one in said}) == 1


def test_a_row_of_a_batch_has_the_notice_in_its_body(door: httpx.Client, redis_url: str, tmp_path: Path) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hi"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    files = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    done = run_command("batch", "run", *files, "--redis-url", redis_url)
    assert done.returncode == 0, done.stderr
    (answer,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(answer)["response"]["body"]["notice"] == OF_DEMO


def plain(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink()
    return folder


def with_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def with_tools(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


def of_sentence_transformers(folder: Path) -> Path:
    (folder / "modules.json").write_text("[]")
    return with_template(folder)


def with_pooling(folder: Path) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    return folder


def without_head(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    return folder


def of_gguf_with_pooling(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pooling_type": 3}))
    return write_gguf(folder, folder / "model.gguf", "llama")


@pytest.mark.parametrize(
    ("change", "capabilities"),
    [
        (plain, ("completion",)),
        (with_template, ("chat", "completion")),
        (with_tools, ("chat", "completion", "tools")),
        (of_sentence_transformers, ("embed",)),
        (with_pooling, ("embed",)),
        (without_head, ("embed",)),
        (of_gguf_with_pooling, ("embed",)),
    ],
)
def test_the_files_say_what_a_model_is_good_for(tmp_path: Path, change: Change, capabilities: tuple[str, ...]) -> None:
    with_model = change(make_tiny_model(tmp_path))
    assert Engine(str(with_model), dtype="bfloat16", num_threads=1).capabilities() == capabilities


def test_text_of_a_model_for_embeddings_carries_a_notice_too(tmp_path: Path) -> None:
    said = "the model's files say that it is for embed, not for completion"
    with served(of_sentence_transformers(make_tiny_model(tmp_path)), dtype="bfloat16") as url:
        (model,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        assert model["capabilities"] == ["embed"]
        body = {"model": model["id"], "prompt": "Hi", "max_tokens": 1}
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
            assert stream.headers[NOTICE] == said
        assert (
            NOTICE
            not in httpx.post(f"{url}/v1/embeddings", json={"model": model["id"], "input": "Hi"}, timeout=60).headers
        )
        with connect(f"{url.replace('http', 'ws')}/v1/stream") as socket:
            socket.send(json.dumps({"type": "submit", "id": "a", "path": "/v1/completions", "body": body}))
            while (message := json.loads(socket.recv(timeout=30)))["type"] != "accepted":
                pass
        assert message["notice"] == said
