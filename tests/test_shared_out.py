"""Workers get each test once, whole files at a time, and few of them compute while tests that wait are left."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.shared_out import MAX_COMPUTING, WEB, SharedOut, computes, folder

FILES = {
    **{f"tests/kernels/cpu/test_{number}.py": 40 for number in range(6)},
    **{f"tests/gpu_node/engine/test_{number}.py": 10 for number in range(12)},
    **{f"tests/gateway/http/test_{number}.py": 5 for number in range(20)},
    **{f"tests/queue/test_{number}.py": 3 for number in range(20)},
    **{f"tests/gateway/apis/web/test_{number}.py": 2 for number in range(3)},
}


class Worker:
    """Runs what it is sent. It keeps the last test until it knows the next one, or that there is none."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.waiting: list[int] = []
        self.done: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.waiting += indexes

    def shutdown(self) -> None:
        self.shutting_down = True

    def run_next(self) -> int | None:
        if not self.waiting or (len(self.waiting) == 1 and not self.shutting_down):
            return None
        self.done.append(self.waiting.pop(0))
        return self.done[-1]


@pytest.fixture(autouse=True)
def files_without_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kinds.kinds_of_file", lambda _: frozenset())


def run(num_workers: int, seed: int, end_at: int = 0) -> tuple[list[str], list[Worker], list[int]]:
    """Run all tests in a random order of workers; the first worker dies at its test `end_at`.

    Return the tests, the workers, and how many computed at each test while tests that wait were left.
    """
    tests = [f"{name}::test_{number}" for name, count in FILES.items() for number in range(count)]
    workers = [Worker(number) for number in range(num_workers)]
    option = SimpleNamespace(tx=[f"{num_workers}*popen"], loadscopereorder=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: getattr(option, name))
    nodes: list[Any] = list(workers)
    shared = SharedOut(config)
    for node in nodes:
        shared.add_node(node)
        shared.add_node_collection(node, tests)
    shared.schedule()
    order, num_computing = random.Random(seed), []
    while running := [node for node in nodes if node.waiting]:
        node = order.choice(running)
        test = node.run_next()
        if test is None:
            continue
        if end_at and node is workers[0] and len(node.done) == end_at:
            nodes.remove(node)
            assert shared.remove_node(node) == tests[test]
            continue
        shared.mark_test_complete(node, test)
        if any(not computes(unit) for unit in shared.workqueue):
            num_computing.append(sum(computes(tests[other.waiting[0]]) for other in nodes if other.waiting))
    return tests, workers, num_computing


@pytest.mark.parametrize("num_workers", [1, 2, 6])
def test_each_test_runs_once_and_files_are_not_cut(num_workers: int) -> None:
    tests, workers, num_computing = run(num_workers, seed=num_workers)
    assert sorted(test for worker in workers for test in worker.done) == list(range(len(tests)))
    for worker in workers:
        files = [tests[test].split("::")[0] for test in worker.done]
        assert len([1 for at, name in enumerate(files) if name != files[at - 1]]) <= len(set(files))
    assert max(num_computing) <= MAX_COMPUTING + 1  # A worker begins its next file before the last test of this one.
    assert sum(any(tests[test].startswith(WEB) for test in worker.done) for worker in workers) == 1


def test_workers_keep_to_their_folders() -> None:
    tests, workers, _ = run(6, seed=3)
    assert sum(len({folder(tests[test].split("::")[0]) for test in worker.done}) for worker in workers) < 18


def test_the_files_of_a_worker_that_dies_are_run_by_others() -> None:
    tests, workers, _ = run(3, seed=5, end_at=20)
    assert {test for worker in workers for test in worker.done} == set(range(len(tests)))
