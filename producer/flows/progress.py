"""How far a flow is: which of its rows have ended, which wait and for what, and which may run.

A row ends in two steps. It has finished once its answer or its error is known, and it is stored once a part has it.
Only stored rows let others go on: their texts are what any later process finds too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.contract.errors import InvariantError
from penstock.producer.flows.graph import FlowGraph
from penstock.producer.flows.marks import ALL
from penstock.producer.flows.rows import FlowRow, made_name

End = Literal["succeeded", "failed", "skipped"]


class Verdict(NamedTuple):
    """What becomes of a row whose parents have ended: it runs (`succeeded`), fails or is skipped."""

    end: End
    parent: str = ""
    """The parent because of which it does not run."""


class MadeRows(NamedTuple):
    """The rows that a `for_each` has made: their numbers follow each other."""

    maker: int
    first: int
    num_rows: int

    @property
    def numbers(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.num_rows)


class FlowProgress:
    """The state of each row of a flow."""

    def __init__(
        self, graph: FlowGraph, made: Sequence[tuple[int, int]] = (), ends: Mapping[int, End] | None = None
    ) -> None:
        """`made`: rows that have made others, and how many, in their order. `ends`: the rows that parts have."""
        self.graph = graph
        self._children = graph.children()
        self._ends: list[End | None] = [None] * len(graph.rows)
        self._made = dict[int, MadeRows]()
        self._made_in_order: list[MadeRows] = []
        self._made_ends = dict[int, End]()
        """How makers ended together with all rows that they have made."""
        # Of one request.
        self._job_ends = dict[str, End]()
        # Of one request.
        self._waiters_of_job = dict[str, list[int]]()
        for row in graph.rows:
            for job_id in row.jobs:
                self._waiters_of_job.setdefault(job_id, []).append(row.number)
        for maker, count in made:
            self._add_made(maker, count)
        for number, end in (ends or {}).items():
            self._ends[number] = end
        # Rows that each row waits for, and rows of each maker that are open: not stored, and not finished.
        self._waits = [len(row.parents) for row in graph.rows]
        self._made_left = {one.maker: sum(self._ends[i] is None for i in one.numbers) for one in self._made_in_order}
        for row in graph.rows:
            if self._ends[row.number] is not None and not self._made_left.get(row.number):
                for child in self._children[row.number]:
                    self._waits[child] -= 1
        self._unfinished, self._made_unfinished = [*self._waits], {**self._made_left}
        self._held = {one.maker for one in self._made_in_order if graph.rows[one.maker].jobs}
        """Makers of rows that an earlier process has made, while the texts of their jobs are not here again."""
        self.ready = deque(number for number, end in enumerate(self._ends) if end is None and self._is_free(number))
        """Numbers of the rows that may run and were not taken from here yet."""

    def _is_free(self, number: int) -> bool:
        row, index = self.row_of(number)
        return not self._waits[number] if index is None else row.number not in self._held

    @property
    def num_rows(self) -> int:
        """The rows that there are by now."""
        return len(self._ends)

    def end_of(self, number: int) -> End | None:
        """Return how a row ended; None: no part has it."""
        return self._ends[number]

    def made_by(self, number: int) -> MadeRows | None:
        """Return the rows that a row has made."""
        return self._made.get(number)

    def row_of(self, number: int) -> tuple[FlowRow, int | None]:
        """Return a row of the input and None, or the row that made this one, and the index of its entry."""
        if number < len(self.graph.rows):
            return self.graph.rows[number], None
        made = self._made_in_order[bisect_right(self._made_in_order, number, key=lambda one: one.first) - 1]
        return self.graph.rows[made.maker], number - made.first

    def name_of(self, number: int) -> str:
        """Return the `custom_id` of a row."""
        row, index = self.row_of(number)
        return row.custom_id if index is None else made_name(row.custom_id, index)

    def waits_for(self, number: int) -> Iterator[str]:
        """Yield the parents of a row that have not ended."""
        if number < len(self.graph.rows):
            row = self.graph.rows[number]
            yield from (name for name in row.after if self._end_of_parent(self.graph.numbers[name]) is None)
            yield from (job_id for job_id in row.jobs if job_id not in self._job_ends)

    def verdict(self, row: FlowRow) -> Verdict:
        """Return what becomes of a row of the input whose parents have ended."""
        if row.on_failure == "continue":
            return Verdict("succeeded")
        ends = {name: self._end_of_parent(self.graph.numbers[name]) for name in row.after}
        ends |= {job_id: self._job_ends.get(job_id) for job_id in row.jobs}
        if (failed := next((name for name, end in ends.items() if end == "failed"), None)) is not None:
            return Verdict("failed" if row.on_failure == "fail" else "skipped", failed)
        skipped = next((name for name, end in ends.items() if end == "skipped"), None)
        return Verdict("succeeded") if skipped is None else Verdict("skipped", skipped)

    def rows_with_texts(self, name: str) -> list[int]:
        """Return the rows whose texts a parent stands for: itself, or those that it has made. Only succeeded ones."""
        number = self.graph.numbers[name]
        made = self._made.get(number)
        numbers = [number] if self.graph.rows[number].for_each is None else [] if made is None else made.numbers
        return [one for one in numbers if self._ends[one] == "succeeded"]

    def texts_wanted(self) -> tuple[set[int], set[str]]:
        """Return the rows of the input and the jobs whose texts other rows have. A maker stands for its rows."""
        rows, jobs = set[int](), set[str]()
        for row in self.graph.rows:
            names = {*row.parents} if ALL in row.marks else {name for name in row.marks if name in row.parents}
            if row.for_each is not None:
                names.add(row.for_each.name)
            rows |= {self.graph.numbers[name] for name in names if name in self.graph.numbers}
            jobs |= {name for name in names if name not in self.graph.numbers}
        return rows, jobs

    # What has happened.

    def finish(self, number: int, num_made: int = 0) -> bool:
        """Note that a row's end is known. Return whether rows wait for nothing else than that all of it is stored."""
        row, index = self.row_of(number)
        if index is None and num_made:
            self._made_unfinished[number] = num_made
            return True
        if index is not None:
            self._made_unfinished[row.number] -= 1
            if self._made_unfinished[row.number]:
                return False
        return self._count_down(self._unfinished, self._children[row.number]) > 0

    def store(self, number: int, end: End, num_made: int = 0) -> None:
        """Note that a part has a row that has finished. Rows that waited only for it become ready."""
        if self._ends[number] is not None:
            raise InvariantError(f"row {number} of a flow ended twice")
        self._ends[number] = end
        row, index = self.row_of(number)
        if index is None and num_made:
            made = self._add_made(number, num_made)
            self._made_left[number] = num_made
            self.ready.extend(made.numbers)
            return
        if index is not None:
            self._made_left[row.number] -= 1
            if self._made_left[row.number]:
                return
        self._count_down(self._waits, self._children[row.number], are_ready=True)

    def end_job(self, job_id: str, end: End) -> None:
        """Note that an earlier job has ended."""
        self._job_ends[job_id] = end
        waiters = self._waiters_of_job[job_id]
        self._count_down(self._unfinished, waiters)
        # Those that a part has wait no more. An earlier process has seen the end of the job.
        self._count_down(self._waits, waiters, are_ready=True)
        for maker in self._held.intersection(waiters):
            if all(job in self._job_ends for job in self.graph.rows[maker].jobs):
                self._held.remove(maker)
                self.ready.extend(one for one in self._made[maker].numbers if self._ends[one] is None)

    @property
    def open_jobs(self) -> list[str]:
        """The earlier jobs for which rows wait that no part has, or whose texts rows have that are still to be made."""
        return [job for job, waiters in self._waiters_of_job.items() if any(self._is_open(one) for one in waiters)]

    def _is_open(self, number: int) -> bool:
        return self._ends[number] is None or bool(self._made_left.get(number))

    def _add_made(self, maker: int, count: int) -> MadeRows:
        made = MadeRows(maker, len(self._ends), count)
        self._made[maker] = made
        self._made_in_order.append(made)
        self._ends.extend([None] * count)
        return made

    def _end_of_parent(self, number: int) -> End | None:
        end, made = self._ends[number], self._made.get(number)
        if end is None or made is None:
            return end
        if self._made_left[number]:
            return None
        if number not in self._made_ends:
            has_failed = any(self._ends[one] != "succeeded" for one in made.numbers)
            self._made_ends[number] = "failed" if has_failed else "succeeded"
        return self._made_ends[number]

    def _count_down(self, waits: list[int], children: Sequence[int], *, are_ready: bool = False) -> int:
        num_free = 0
        for child in children:
            waits[child] -= 1
            if not waits[child] and self._ends[child] is None:
                num_free += 1
                if are_ready:
                    self.ready.append(child)
        return num_free
