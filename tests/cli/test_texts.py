"""`penstock embed` and `penstock rerank` over a real node with a small random encoder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fakes.command import run_command
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import write_encoder, write_modules

from penstock import Client
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.gateway.conftest import Stack

TEXTS = ["the cat sat", "hello, world", "a dog ran far away"]
LONG = "the dog ran far away " * 9


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis with a node that embeds."""
    folder = tmp_path_factory.mktemp("embed")
    with quiet():
        write_encoder(folder)
        write_modules(folder, "Pooling", "Normalize", prompts={"query": "query "})
    from penstock.gpu_node.engine.encoder.engine import EncoderEngine

    with EmbeddedRedis() as server, closing(Stack(server.url)) as stack:
        stack.start_node(EncoderEngine(str(folder), num_threads=1), model="acme/mini", pool="mini")
        yield server.url


def run(pool: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, "--redis-url", pool, stdin=stdin)


def objects(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_gets_a_vector_and_keeps_its_members(pool: str) -> None:
    lines = f'{TEXTS[0]}\n\n{{"text": "{TEXTS[1]}", "id": 7}}\n'
    done = run(pool, "embed", stdin=lines)
    assert done.returncode == 0, done.stderr
    found = objects(done.stdout)
    assert [(one["line"], one.get("id")) for one in found] == [(1, None), (3, 7)]
    with Client(pool) as client:
        expected = client.embed(TEXTS[:2])
        queries = client.embed(TEXTS[:1], prompt_name="query")
    assert np.abs(np.array([one["embedding"] for one in found]) - [one.values for one in expected]).max() < 1e-5
    asked = objects(run(pool, "embed", "--input-type", "search_query", stdin=TEXTS[0]).stdout)
    assert np.abs(np.array(asked[0]["embedding"]) - queries[0].values).max() < 1e-5


def test_a_killed_command_continues_after_the_last_whole_line(pool: str, tmp_path: Path) -> None:
    source, out = tmp_path / "texts.txt", tmp_path / "vectors.jsonl"
    source.write_text("\n".join(TEXTS))
    assert run(pool, "embed", str(source), "--out", str(out)).returncode == 0
    whole = out.read_bytes()
    out.write_bytes(whole[: whole.index(b"\n") + 9])
    assert run(pool, "embed", str(source), "--out", str(out)).returncode == 0
    assert out.read_bytes() == whole
    out.write_text('{"text": "mine"}\n')
    refused = run(pool, "embed", str(source), "--out", str(out))
    assert (refused.returncode, out.read_text()) == (2, '{"text": "mine"}\n')
    assert "has no results of this command" in refused.stderr


def test_lines_are_ranked_by_a_query(pool: str, tmp_path: Path) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("\n".join(TEXTS))
    done = run(pool, "rerank", "the cat", str(source), "--top-n", "2")
    assert done.returncode == 0, done.stderr
    with Client(pool) as client:
        expected = client.rerank("the cat", TEXTS, top_n=2)
    found = objects(done.stdout)
    assert [(one["line"], one["text"]) for one in found] == [(1 + one.index, TEXTS[one.index]) for one in expected]
    rows = json.dumps({"id": "a", "query": "the cat", "documents": TEXTS})
    (row,) = objects(run(pool, "rerank", "--rows", "-", "--top-n", "2", stdin=rows).stdout)
    assert row["id"] == "a"
    assert [one["index"] for one in row["results"]] == [one.index for one in expected]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (("embed",), f"a\n{LONG}\n", "line 2: 47 tokens, but this model takes 24 at most"),
        (("embed",), '{"text": 7}', "line 1: text: must be a text"),
        (("embed",), "{a", "; --plain takes lines as text"),
        (("embed", "--dimensions", "99"), "a", "this model's embeddings have 32"),
        (("rerank", "a"), f"b\n\n{LONG}\n", "line 3: 47 tokens"),
        (("rerank", "--rows", "-"), '{"query": "a", "documents": []}', "line 1: documents: must be a list of texts"),
        (("rerank", "--rows", "-"), json.dumps({"query": "a", "documents": ["b", LONG]}), "line 1: documents[1]: 47"),
        (("rerank",), "b", "give either a query or --rows"),
        (("rerank", "--rows", "-", "--plain"), "{}", "conflicts with --rows"),
        (("rerank", "a", "--out", __file__), "b", "only the results of --rows can be continued"),
        (("embed", "nowhere.txt"), "", "nowhere.txt cannot be used"),
    ],
)
def test_what_is_wrong_is_named(pool: str, arguments: tuple[str, ...], stdin: str, said: str) -> None:
    done = run(pool, *arguments, stdin=stdin)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
