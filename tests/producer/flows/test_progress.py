"""Random flows end as a model says: each row once, none before its parents, also if the process changes meanwhile."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import InvariantError
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.flows.progress import End, FlowProgress
from tests.producer.flows.model import Rows, ends_of, flows


def graph_of(rows: Rows) -> FlowGraph:
    graph = FlowGraph()
    for line, (name, row) in enumerate(rows.items(), 1):
        fields = {field: row[field] for field in ("after", "on_failure", "for_each") if field in row}
        graph.add(line, name, {**fields, "body": {"prompt": "{{item}}" if "for_each" in row else "x"}})
    assert [*graph.problems()] == []
    return graph


def run(rows: Rows, rng: Random, *, restarts: bool) -> dict[str, End]:
    """Run a flow: rows that are ready finish in any order, parts store some, and at times all else is lost."""
    graph = graph_of(rows)
    progress, made, ends = FlowProgress(graph), list[tuple[int, int]](), dict[int, End]()
    finished = deque[tuple[int, End, int]]()
    while True:
        if restarts and rng.random() < 0.1:
            progress, finished = FlowProgress(graph, made, ends), deque()
        if progress.ready and rng.random() < 0.6:
            number = progress.ready[rng.randrange(len(progress.ready))]
            progress.ready.remove(number)
            finished.append(one := end_of(rows, progress, number))
            progress.finish(number, one[2])
        elif finished:
            part = [finished.popleft() for _ in range(rng.randint(1, len(finished)))]
            for number, end, num_made in part:
                assert [*progress.waits_for(number)] == []
                progress.store(number, end, num_made)
                ends[number] = end
                made += [(number, num_made)] if num_made else []
        elif not progress.ready:
            break
    return {progress.name_of(number): end for number, end in ends.items()}


def end_of(rows: Rows, progress: FlowProgress, number: int) -> tuple[int, End, int]:
    row, index = progress.row_of(number)
    fields = rows[row.custom_id]
    verdict = progress.verdict(row) if index is None else None
    if verdict is not None and verdict.end != "succeeded":
        return number, verdict.end, 0
    if index is None and row.for_each is not None:
        has_list = bool(progress.rows_with_texts(row.for_each.name))
        return number, "succeeded", fields["made"] if has_list else 0
    return number, "failed" if fields["fails"] else "succeeded", 0


@pytest.mark.parametrize("restarts", [False, True])
@settings(max_examples=30, deadline=None)
@given(rows=flows(), seed=st.integers(0, 1 << 30))
def test_random_flows_end_as_a_model_says(rows: Rows, seed: int, restarts: bool) -> None:
    assert run(rows, Random(seed), restarts=restarts) == ends_of(rows)


def test_no_row_ends_twice() -> None:
    progress = FlowProgress(graph_of({"a": {"after": [], "on_failure": "fail", "fails": False}}))
    progress.store(0, "succeeded")
    with pytest.raises(InvariantError):
        progress.store(0, "succeeded")


def test_a_part_is_wanted_at_once_only_when_rows_wait_for_nothing_else() -> None:
    """So 10,000 rows and one that waits for all have no more parts than the rows alone."""
    roots = {f"r{i}": {"after": [], "on_failure": "fail", "fails": False} for i in range(100)}
    progress = FlowProgress(graph_of({**roots, "all": {"after": [*roots], "on_failure": "fail", "fails": False}}))
    assert [progress.finish(number) for number in range(100)] == [*[False] * 99, True]


def test_rows_made_from_a_job_wait_for_it_again_after_a_restart() -> None:
    job = "echo.0190b5a0-0000-7000-8000-000000000000"
    graph = FlowGraph()
    graph.add(1, "m", {"after": [{"job": job}], "for_each": f"{job}.json", "body": {"prompt": "{{item}}"}})
    progress = FlowProgress(graph, [(0, 2)], {0: "succeeded", 1: "succeeded"})
    assert [*progress.ready] == [] and progress.open_jobs == [job]
    progress.end_job(job, "succeeded")
    assert [*progress.ready] == [2]
