"""The rows of a flow together: names, parents and children, and what makes them no flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.contract.errors import RequestError
from penstock.producer.flows.rows import FlowRow, flow_row, maker_of

MAX_EDGES = 500_000
"""Names in the `after` of all rows of a flow."""
MAX_JOBS = 1_000
"""Earlier jobs that the rows of a flow wait for."""
_SHOWN_NAMES = 8
"""Rows of a cycle that an error names."""


@dataclass(slots=True)
class FlowGraph:
    """All rows of a flow."""

    rows: list[FlowRow] = field(default_factory=list)
    # Of one request.
    numbers: dict[str, int] = field(default_factory=dict)
    """The number of each row, by its `custom_id`."""
    num_edges: int = 0

    def add(self, line: int, custom_id: str, fields: Mapping[str, Any]) -> None:
        """Add the next row. Raises RequestError for one that is wrong by itself."""
        row = flow_row(len(self.rows), line, custom_id, fields)
        self.num_edges += len(row.parents)
        if self.num_edges > MAX_EDGES:
            raise RequestError(
                f"the rows name more than {MAX_EDGES} parents in all", code="too_many_edges", param="after"
            )
        self.numbers[custom_id] = row.number
        self.rows.append(row)

    def lines_of_jobs(self) -> dict[str, int]:
        """Return the earlier jobs that rows wait for, each with the line of the first such row."""
        # Of one request.
        found = dict[str, int]()
        for row in self.rows:
            for job_id in row.jobs:
                found.setdefault(job_id, row.line)
        return found

    def children(self) -> list[list[int]]:
        """Return the rows that wait for each row. All names must be known."""
        found = [list[int]() for _ in self.rows]
        for row in self.rows:
            for name in row.after:
                found[self.numbers[name]].append(row.number)
        return found

    def problems(self) -> Iterator[tuple[RequestError, int | None]]:
        """Yield what is wrong with the rows together, and in which line."""
        makers, is_whole = {row.custom_id for row in self.rows if row.for_each is not None}, True
        if len(self.lines_of_jobs()) > MAX_JOBS:
            yield (
                RequestError(f"the rows wait for more than {MAX_JOBS} jobs", code="too_many_jobs", param="after"),
                None,
            )
        for row in self.rows:
            unknown = next((name for name in row.after if name not in self.numbers), None)
            if unknown is not None:
                is_whole = False
                message = f"after: no row has the custom_id {unknown[:64]!r}"
                yield RequestError(message, code="unknown_parent", param="after"), row.line
            if maker_of(row.custom_id) in makers:
                message = f"custom_id {row.custom_id[:64]!r} is kept for the rows that a for_each makes"
                yield RequestError(message, code="duplicate_custom_id", param="custom_id"), row.line
            if row.for_each is not None and row.for_each.name in makers:
                message = f"for_each: {row.for_each.name[:64]!r} has no answer of its own, because it has for_each too"
                yield RequestError(message, code="unknown_parent", param="for_each"), row.line
        if is_whole and (cycle := self._cycle()):
            names = [self.rows[number].custom_id[:64] for number in cycle[:_SHOWN_NAMES]]
            names.append(names[0] if len(cycle) <= _SHOWN_NAMES else "…")
            message = f"after: the rows wait for each other: {' → '.join(names)}"
            yield RequestError(message, code="cycle", param="after"), self.rows[cycle[0]].line

    def _cycle(self) -> list[int]:
        """Return rows of which each waits for the next one, and the last one for the first; none if there are none."""
        left, children = [len(row.after) for row in self.rows], self.children()
        ready = [row.number for row in self.rows if not row.after]
        while ready:
            for child in children[ready.pop()]:
                left[child] -= 1
                if not left[child]:
                    ready.append(child)
        number = next((number for number, waits in enumerate(left) if waits), None)
        if number is None:
            return []
        # Each row that is left waits for one that is left, so a walk from any of them comes back to a row.
        at, walk = dict[int, int](), list[int]()
        while number not in at:
            at[number] = len(walk)
            walk.append(number)
            number = next(self.numbers[name] for name in self.rows[number].after if left[self.numbers[name]])
        return walk[at[number] :]
