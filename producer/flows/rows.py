"""The rows of a flow: what they wait for, and what happens to them if it fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from penstock.contract.errors import RequestError
from penstock.contract.fields import Wire
from penstock.contract.job_id import is_job_id
from penstock.contract.priority import ClassName, Priority
from penstock.contract.problems import request_error
from penstock.producer.flows.marks import ALL, FILLED_FIELDS, ITEM, Mark, mark_of, marks_in

MAX_PARENTS = 50_000
"""Rows and jobs that one row waits for."""
MAX_ITEMS = 10_000
"""Rows that a `for_each` makes."""
OnFailure = Literal["fail", "skip", "continue"]
FLOW_FIELDS = frozenset({"after", "on_failure", "priority", "for_each"})
"""Fields that a row of a flow has, and one of another batch has not."""
_MADE_NAME = re.compile(r"(.+)\[\d+\]", re.DOTALL)


class _Fields(Wire):
    after: Annotated[list[Any], Field(max_length=MAX_PARENTS)] = Field(default_factory=list)
    on_failure: OnFailure = "fail"
    priority: ClassName = "batch"
    for_each: Annotated[str, Field(min_length=1, max_length=600)] | None = None


@dataclass(frozen=True, slots=True)
class FlowRow:
    """A row of a flow, without its body."""

    number: int
    custom_id: str
    line: int
    after: tuple[str, ...] = ()
    """The `custom_id`s of the rows that it waits for."""
    jobs: tuple[str, ...] = ()
    """The ids of the earlier jobs that it waits for."""
    on_failure: OnFailure = "fail"
    """What becomes of it if one of them fails. With `continue`, it waits until all have ended, whatever their ends."""
    priority: Priority = Priority.BATCH
    for_each: Mark | None = None
    """Whose list makes rows of this one: one for each entry."""
    marks: frozenset[str] = frozenset()
    """The names in the marks of its body."""

    @property
    def parents(self) -> tuple[str, ...]:
        """All that it waits for, by name."""
        return self.after + self.jobs


def flow_row(number: int, line: int, custom_id: str, fields: Mapping[str, Any]) -> FlowRow:
    """Return a row of a flow. Raises RequestError that names the field."""
    if custom_id in (ALL, ITEM):
        raise RequestError(f"custom_id: {custom_id!r} has a meaning of its own in marks", param="custom_id")
    body = fields.get("body")
    body = body if isinstance(body, dict) else {}
    if FLOW_FIELDS.isdisjoint(fields) and not any(True for _ in marks_in(body)):
        # Most rows of a wide flow say nothing.
        return FlowRow(number, custom_id, line)
    try:
        given = _Fields.model_validate({name: fields[name] for name in FLOW_FIELDS if name in fields})
    except ValidationError as error:
        raise request_error(error) from None
    after, jobs = list[str](), list[str]()
    for at, one in enumerate(given.after):
        job_id = one.get("job") if isinstance(one, dict) and len(one) == 1 else None
        if isinstance(one, str):
            after.append(one)
        elif isinstance(job_id, str) and is_job_id(job_id):
            jobs.append(job_id)
        else:
            message = f'after[{at}] must be the custom_id of a row, or the id of a job as {{"job": "ID"}}'
            raise RequestError(message, param=f"after[{at}]")
    if len({*after, *jobs}) != len(given.after):
        raise RequestError("after: names a row or a job twice", param="after")
    for_each = None
    if given.for_each is not None:
        for_each = mark_of(given.for_each)
        if for_each is None or for_each.path is None or for_each.name in (ALL, ITEM):
            shown = repr(given.for_each[:64])
            message = f"for_each must name a list in the answer of a row, such as plan.json.sections, not {shown}"
            raise RequestError(message, param="for_each")
    names = _checked_marks(body, bool(given.after), is_made=for_each is not None)
    # A row waits for what its marks name.
    named = names if for_each is None else {*names, for_each.name}
    after += sorted(named.difference((ALL, ITEM), after, jobs))
    priority = Priority.of(given.priority)
    return FlowRow(
        number, custom_id, line, tuple(after), tuple(jobs), given.on_failure, priority, for_each, frozenset(names)
    )


def _checked_marks(body: Mapping[str, Any], has_parents: bool, *, is_made: bool) -> set[str]:
    """Return the names in the marks of a body."""
    names = set[str]()
    for field, mark in marks_in(body):
        shown, param = f"body.{field}: {{{{{mark}}}}}", f"body.{field}"
        if field not in FILLED_FIELDS:
            message = f"{shown} is not replaced there, but only in {', '.join(FILLED_FIELDS)}"
            raise RequestError(message, code="mark_not_allowed", param=param)
        if mark.name == ITEM and not is_made:
            raise RequestError(f"{shown} is the entry of a list, so the row needs for_each", param=param)
        if mark.name == ALL and (mark.path is not None or not has_parents):
            message = (
                f"{shown}: {{{{*.text}}}} joins the texts of all rows that after names, and nothing else begins with *"
            )
            raise RequestError(message, param=param)
        names.add(mark.name)
    return names


def made_name(custom_id: str, index: int) -> str:
    """Return the `custom_id` of a row that a `for_each` has made."""
    return f"{custom_id}[{index}]"


def maker_of(custom_id: str) -> str | None:
    """Return the row whose `for_each` could have made one of this name."""
    found = _MADE_NAME.fullmatch(custom_id)
    return None if found is None else found[1]
