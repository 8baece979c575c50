"""The audit of a pool: it compares the pool's keys with the jobs' own records and checks these invariants.

    I1   every accepted job has one terminal record, or is queued where a node will find it
    I2   a job's log is in order, and its result agrees with it
    I3   nothing is written after a job's end, and no token is written twice (a node without its lease would do that)
    I4   all KV blocks of an idle node are free
    I5   sets, indexes, sums and ledgers agree with the jobs' records
    I6   one idempotency key of a tenant names one job
    I7   a tenant below its part of a pool's limit is not refused by that limit
    I8   no tenant can read or cancel another tenant's job over HTTP
    I9   another node continues a dead node's job within a lease and 3 s, for 99 of 100 jobs
    I10  keys that belong to no open job expire
    I11  `node_lost` ends only a job that lost as many nodes as the pool allows

Tests cover the invariants that need a reader, a clock or two tenants: I6 to I9, and delivered chunks equal the log.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from penstock.contract.errors import PenstockError
from penstock.contract.output import Choice, Chunk, Result
from penstock.queue import results
from penstock.queue.broker.admin import MAX_ROWS, AdminBroker, JobHistory
from penstock.queue.wire import WireError, decode_chunks

T = TypeVar("T")
_HISTORIES_AT_ONCE = 32
_MAX_SHOWN = 32
_INVARIANT_OF = {
    "missing": "I5",
    "stray": "I5",
    "wrong_score": "I5",
    "wrong_sum": "I5",
    "wrong_size": "I5",
    "wrong_ledger": "I5",
    "wrong_type": "I5",
    "wrong_field": "I5",
    "wrong_setting": "I5",
    "unchecked": "I5",
    "lost_field": "I5",
    "foreign": "I5",
    "no_record": "I1",
    "would_vanish": "I1",
    "no_terminal_chunk": "I1",
    "end_of_open_job": "I1",
    "no_request": "I1",
    "stranded": "I1",
    "no_result": "I1",
    "wrong_count": "I2",
    "wrong_index": "I2",
    "wrong_job": "I2",
    "unreadable": "I2",
    "result_differs": "I2",
    "not_contiguous": "I3",
    "behind_the_end": "I3",
    "blocks_held": "I4",
    "lives_for_ever": "I10",
    "not_lost": "I11",
}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One violation: its name, the key without the pool's prefix, the job, tenant or node, and details."""

    name: str
    key: str
    subject: str
    detail: str

    @property
    def invariant(self) -> str:
        """The violated invariant, such as `I5`."""
        return _INVARIANT_OF[self.name]

    def __str__(self) -> str:
        return f"{self.invariant} {self.name}: {self.key} {self.subject}: {self.detail}"


async def audit(broker: AdminBroker, pool: str, *, repair: bool = False) -> list[Finding]:
    """Return all violations in a pool. With `repair`, wrong keys and sums are corrected; faults in a log are not.

    Repair is safe beside running processes. Raises NotFoundError for an unknown pool, BusyError while another audit
    repairs it.
    """
    repairer = secrets.token_hex(8) if repair else ""
    try:
        return await _audit(broker, pool, repairer)
    finally:
        if repairer:
            with suppress(PenstockError):
                await broker.release(pool, repairer)


async def _audit(broker: AdminBroker, pool: str, repairer: str) -> list[Finding]:
    seen = await broker.scan_jobs(pool)
    findings = [Finding("foreign", key, "-", "its name is no text") for key in seen.foreign]
    if ("config", "hash") in seen.wrong_types:
        return [*findings, Finding("wrong_setting", "config", "-", "it is no hash; the pool's nodes write it")]
    rows = await broker.check(pool, repairer=repairer)
    rows += await broker.check_keys(pool, seen, repairer=repairer)
    # Without a repair, the key of another type that stands for a record is left as it is.
    readable = [item for item in sorted(seen.jobs.items()) if repairer or item[0] not in seen.unreadable]
    for jobs in _parts(readable, MAX_ROWS):
        rows += await broker.check(pool, jobs, repairer=repairer)
    # After the jobs, because repairing jobs changes which tenants have queued jobs.
    for tenants in _parts(sorted(seen.virtual_times), MAX_ROWS):
        rows += await broker.check(pool, virtual_times=tenants, repairer=repairer)
    for idems in _parts(sorted(seen.idems), MAX_ROWS):
        rows += await broker.check(pool, idems=idems, repairer=repairer)
    for feeds in _parts(sorted(seen.feeds), MAX_ROWS):
        rows += await broker.check(pool, feeds=feeds, repairer=repairer)
    findings += [Finding(*row) for row in rows]
    findings += [
        Finding("wrong_setting", "config", name, f"is {value[:_MAX_SHOWN]!r}; the pool's nodes write it")
        for name, value in await broker.damaged_config(pool)
    ]
    findings += await _sums(broker, pool, repairer)
    findings += await _nodes(broker, pool)
    for job_ids in _parts(sorted(seen.jobs), _HISTORIES_AT_ONCE):
        for history in await broker.histories(job_ids):
            findings += findings_of(history)
    return sorted(set(findings))


async def _sums(broker: AdminBroker, pool: str, repairer: str) -> list[Finding]:
    """Return the wrong sums, and correct them with a `repairer`.

    A sum is wrong only if two reads find the same difference over the same jobs. Jobs in motion may cause the same
    difference twice, because many jobs occupy equally much, but then the two reads find other jobs.
    """
    once, again = await broker.excess_of_sums(pool), await broker.excess_of_sums(pool)
    wrong = {where: one for where, one in once.items() if (one.by or one.is_lost) and again.get(where) == one}
    if repairer:
        corrections = [(*where, -one.by, one.is_lost) for where, one in wrong.items()]
        await broker.check(pool, sums=corrections, repairer=repairer)
    return [
        Finding("wrong_sum", key, field, "it is no number" if one.is_lost else f"off by {one.by}")
        for (key, field), one in wrong.items()
    ]


async def _nodes(broker: AdminBroker, pool: str) -> list[Finding]:
    findings = []
    for node in await broker.pressure(pool):
        held = node.kv_blocks_total - node.kv_blocks_free
        if held and not node.num_jobs and not node.num_running and not node.num_waiting:
            findings.append(Finding("blocks_held", "pressure", node.node_id, f"{held} blocks held without a job"))
    return findings


def findings_of(history: JobHistory) -> list[Finding]:
    """Return the faults in a job's log, and the differences between log and result."""

    def found(name: str, detail: str, key: str = "log") -> Finding:
        return Finding(name, f"{key}:{history.job_id}", history.job_id, detail)

    try:
        chunks = [chunk for entry in history.log for chunk in decode_chunks(entry)]
    except WireError as error:
        return [found("unreadable", error.message)]
    findings = [found(*problem) for problem in _problems_of(history.job_id, chunks)]
    if history.result is None or history.outcome is None or not chunks:
        return findings
    try:
        result = results.decode_result(history.result, history.job_id, history.outcome, (0, 0, 0, 0))
    except WireError as error:
        return [*findings, found("unreadable", error.message, "result")]
    return findings + [found("result_differs", detail, "result") for detail in _differences(chunks, result)]


def _problems_of(job_id: str, chunks: Sequence[Chunk]) -> Iterator[tuple[str, str]]:
    """Yield (name, detail) of each fault in a log."""
    num_tokens: dict[int, int] = {}
    closed: set[int] = set()
    has_ended = False
    for index, chunk in enumerate(chunks):
        if chunk.job_id != job_id:
            yield "wrong_job", f"chunk {index} is of job {chunk.job_id}"
        if chunk.index != index:
            yield "wrong_index", f"chunk {index} has index {chunk.index}"
        if has_ended or (chunk.outcome is None and chunk.choice in closed):
            yield "behind_the_end", f"chunk {index} of choice {chunk.choice}"
        if chunk.outcome is not None:
            has_ended = True
            continue
        known = num_tokens.get(chunk.choice, 0)
        if chunk.token_ids and chunk.position != known:
            yield (
                "not_contiguous",
                f"chunk {index} begins at token {chunk.position} of choice {chunk.choice}, not {known}",
            )
        num_tokens[chunk.choice] = known + len(chunk.token_ids)
        if chunk.finish_reason is not None:
            closed.add(chunk.choice)


def _differences(chunks: Sequence[Chunk], result: Result) -> Iterator[str]:
    """Yield each difference between a result and the log."""
    logged = [chunk for chunk in chunks if chunk.outcome is None]
    if result.cuts != tuple((chunk.choice, len(chunk.token_ids), len(chunk.text)) for chunk in logged):
        yield f"the result's {len(result.cuts)} chunks differ from the log's {len(logged)}"
    if result.prompt_logprobs != tuple(entry for chunk in logged for entry in chunk.prompt_logprobs):
        yield "the prompt's log-probabilities differ"
    for choice in result.choices:
        own = [chunk for chunk in logged if chunk.choice == choice.index]
        logged_choice = Choice(
            choice.index,
            "".join(chunk.text for chunk in own),
            tuple(token for chunk in own for token in chunk.token_ids),
            next((chunk.finish_reason for chunk in own if chunk.finish_reason is not None), None),
            tuple(entry for chunk in own for entry in chunk.logprobs),
        )
        if logged_choice != choice:
            yield f"choice {choice.index} differs"


def _parts(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
