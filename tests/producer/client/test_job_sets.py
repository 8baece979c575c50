"""Sets of jobs: counts and progress of a tag or a batch, and their results in a file that a killed export continues."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.fake_node import MODEL, FakeNode
from fakes.waiting import until

from penstock.contract.errors import NotFoundError, RequestError
from penstock.producer.client import AsyncClient, Client
from tests.producer.client.conftest import node_on_thread

TAG = "run:7"


async def submitted(client: AsyncClient, count: int, **options: Any) -> list[str]:
    return [
        (await client.submit("hello", model=MODEL, max_tokens=2, tags=[TAG], custom_id=str(at), **options)).id
        for at in range(count)
    ]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def test_progress_is_told_until_no_job_of_the_tag_is_open(client: AsyncClient, node: FakeNode) -> None:
    await submitted(client, 5)
    await client.submit("hello", model=MODEL, max_tokens=2)
    seen = [counts async for counts in client.sets.progress(tag=TAG, every_s=0.01)]
    assert {counts.total for counts in seen} == {5}
    last = seen[-1]
    assert (last.num_open, last.num_ended, dict(last.states)) == (0, 5, {"succeeded": 5})
    assert last.by_class == {("batch", True): {"succeeded": 5}}
    assert (await client.sets.counts()).states == {"succeeded": 6}
    assert (await client.sets.counts(tag="none")).total == 0
    for wrong, param in (({"tag": "a b"}, "tag"), ({"pool": ""}, "pool"), ({"batch": "b", "tag": TAG}, "batch")):
        with pytest.raises(RequestError) as refused:
            await client.sets.counts(**wrong)  # type: ignore[arg-type]
        assert refused.value.param == param
    with pytest.raises(NotFoundError):
        await client.sets.counts(batch="batch_unknown")


async def test_results_are_written_while_jobs_end_once_each_across_kills(
    client: AsyncClient, told_node: FakeNode, redis_url: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    ids = await submitted(client, 4)
    await client.cancel(ids[0])
    first = asyncio.create_task(client.sets.export(path, tag=TAG))
    await until(lambda: path.exists() and path.stat().st_size)
    await until(lambda: json.loads(path.with_name("out.jsonl.cursor").read_text(encoding="utf-8"))["jobs"] >= 1)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    with path.open("a", encoding="utf-8") as file:
        file.write('{"id": "half of a li')
    for job_id in ids[1:]:
        await client.cancel(job_id)
    report = await client.sets.export(path, tag=TAG)
    assert (report.num_jobs, report.num_new) == (4, 3)
    assert [line["id"] for line in lines_of(path)] == ids
    assert [line["custom_id"] for line in lines_of(path)] == ["0", "1", "2", "3"]
    again = await client.sets.export(path, tag=TAG)
    assert (again.num_jobs, again.num_new, len(lines_of(path))) == (4, 0, 4)
    with pytest.raises(RequestError, match="is the export of tag 'run:7'"):
        await client.sets.export(path, tag="other")
    other = tmp_path / "own.txt"
    other.write_text("mine", encoding="utf-8")
    with pytest.raises(RequestError, match="name another file"):
        await client.sets.export(other, tag=TAG)
    assert other.read_text(encoding="utf-8") == "mine"


def test_a_synchronous_client_has_the_same_sets(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with node_on_thread(redis_url), Client(redis_url) as client:
        for _ in range(3):
            client.submit("hello", model=MODEL, max_tokens=2, tags=[TAG])
        assert client.sets.export(path, tag=TAG).num_jobs == 3
        assert [counts.num_ended for counts in client.sets.progress(tag=TAG, every_s=0.01)] == [3]
        assert client.sets.counts(tag=TAG).as_object()["states"] == {"succeeded": 3}
        table = tmp_path / "out.parquet"
        if importlib.util.find_spec("pyarrow") is None:
            with pytest.raises(RequestError, match="penstock-llm\\[parquet\\]"):
                client.sets.export(table, tag=TAG)
        else:
            assert client.sets.export(table, tag=TAG).num_jobs == 3
            rows = importlib.import_module("pyarrow.parquet").read_table(table).to_pylist()
            assert [row["id"] for row in rows] == [line["id"] for line in lines_of(path)]
            assert {(row["state"], *row["tags"], row["completion_tokens"] > 0) for row in rows} == {
                ("succeeded", TAG, True)
            }
            assert [row["text"] for row in rows] == [line["result"]["choices"][0]["text"] for line in lines_of(path)]
    assert all(line["result"]["choices"][0]["text"] and line["result"]["usage"] for line in lines_of(path))
