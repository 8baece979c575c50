"""How xdist's workers share the tests out: some wait while others compute, so that no processor is idle.

A worker runs a file's tests in a row, because they share processes and models. When it has nearly done, it gets the
next file. One or two workers at a time compute: so many that both kinds of files are done at about the same time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

from tests import kinds

WEB = "tests/gateway/apis/web/"
"""The tests of the page share a browser, so they are shared out as one file. They take longest and begin first."""
COMPUTING = ("tests/gpu_node/", "tests/kernels/", "tests/ops/bench/", "tests/ops/bench_gpu/")
"""Most tests elsewhere wait: for processes, for Redis, for a time to pass."""
MAX_COMPUTING = 2


def computes(unit: str) -> bool:
    """Whether the tests of a file compute rather than wait."""
    return unit.startswith(COMPUTING) and "process" not in kinds.kinds_of_file(kinds.TESTS.parent / unit)


def folder(unit: str) -> str:
    """The folder of a file."""
    return unit.rpartition("/")[0]


class SharedOut(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker that has at most two tests left a file of the kind that is behind.

    It goes on in folders in which it has begun: what their tests import and cache is warm there.
    """

    workqueue: OrderedDict[str, dict[str, bool]]
    assigned_work: dict[WorkerController, dict[str, dict[str, bool]]]
    _indexes: Mapping[str, int] = MappingProxyType({})
    """The place of each test among all. It is empty until the first file is given out."""
    _totals: Counter[bool]
    """Numbers of tests that compute (True) and that wait."""
    _left: Counter[bool]
    """Those of files that no worker has got yet."""
    _folders: defaultdict[WorkerController, set[str]]
    """Folders in which a worker has begun."""

    def _split_scope(self, nodeid: str) -> str:
        return WEB if nodeid.startswith(WEB) else nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._indexes:
            self._prepare()
        unit = self._next_unit(node)
        tests = self.workqueue.pop(unit)
        self._left[computes(unit)] -= len(tests)
        # Units that are done are left out: each finished test would look through them.
        begun = {name: left for name, left in self.assigned_work[node].items() if not all(left.values())}
        self.assigned_work[node] = {**begun, unit: tests}
        node.send_runtest_some([self._indexes[test] for test, is_done in tests.items() if not is_done])

    def _prepare(self) -> None:
        self._indexes = {test: index for index, test in enumerate(self.collection)}
        if WEB in self.workqueue:
            self.workqueue.move_to_end(WEB, last=False)
        self._totals = Counter()
        for unit, tests in self.workqueue.items():
            self._totals[computes(unit)] += len(tests)
        self._left, self._folders = Counter(self._totals), defaultdict(set)

    def _next_unit(self, node: WorkerController) -> str:
        begun = {other: next(reversed(units)) for other, units in self.assigned_work.items() if units}
        of_others = [unit for other, unit in begun.items() if other is not node]
        num_computing = sum(map(computes, of_others))
        is_behind = self._left[True] * self._totals[False] > self._left[False] * self._totals[True]
        wanted = num_computing == 0 or (num_computing < MAX_COMPUTING and is_behind)
        units = [unit for unit in self.workqueue if computes(unit) == wanted] or list(self.workqueue)
        known, taken = self._folders[node], set(map(folder, of_others))
        chosen = min(units, key=lambda unit: (folder(unit) not in known, folder(unit) in taken))
        known.add(folder(chosen))
        return chosen
