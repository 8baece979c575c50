"""The audit: what must be true of a pool's keys, held against the jobs' own records.

    I1   every accepted job has one terminal record, or is where a node will find it
    I2   the log is in order, and the result says the same
    I3   nothing was written behind a job's end, and no token twice (a node that had lost its lease would do that)
    I4   an idle node's KV blocks are all free
    I5   sets, indexes and sums agree with the records
    I6   one idempotency key of a tenant names one job
    I7   no more jobs are open than the pool's limit
    I8   nobody reads or cancels another tenant's job over HTTP
    I9   another node goes on with a dead one's job within a lease and 3 s, for 99 of 100
    I10  what belongs to no open job goes away by itself
    I11  `node_lost` ends only a job that lost as many nodes as the pool allows

What only a reader, a clock or two tenants can see (delivered = log, I6, I8, I9) is left to the tests.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from penstock.contract.job import Choice, Chunk, Result
from penstock.queue import results, wire
from penstock.queue.broker.admin import MAX_ROWS, AdminBroker, JobHistory
from penstock.queue.msgpack_codec import WireError

T = TypeVar("T")
_STORIES_AT_ONCE = 32
_INVARIANT_OF = {
    "missing": "I5",
    "stray": "I5",
    "wrong_score": "I5",
    "wrong_sum": "I5",
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
    "too_many_open": "I7",
    "lives_for_ever": "I10",
    "not_lost": "I11",
}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One disagreement: its name, the key without its pool's prefix, and the job, tenant or node."""

    name: str
    key: str
    subject: str
    detail: str

    @property
    def invariant(self) -> str:
        """The invariant that does not hold."""
        return _INVARIANT_OF[self.name]

    def __str__(self) -> str:
        return f"{self.invariant} {self.name}: {self.key} {self.subject}: {self.detail}"


async def audit(broker: AdminBroker, pool: str, *, repair: bool = False) -> list[Finding]:
    """All disagreements of a pool; with `repair`, those of keys and sums are mended, which is safe beside running
    processes. What a log says is only reported.

    Raises NotFoundError for an unknown pool, BusyError while another audit repairs it.
    """
    repairer = secrets.token_hex(8) if repair else ""
    seen = await broker.look(pool)
    rows = await broker.check(pool, repairer=repairer)
    for jobs in _parts(sorted(seen.jobs.items()), MAX_ROWS):
        rows += await broker.check(pool, jobs, repairer=repairer)
    # Behind the jobs, whose repair may have moved them.
    for turns in _parts(sorted(seen.turns), MAX_ROWS):
        rows += await broker.check(pool, turns=turns, repairer=repairer)
    for idems in _parts(sorted(seen.idems), MAX_ROWS):
        rows += await broker.check(pool, idems=idems, repairer=repairer)
    findings = [Finding(*row) for row in rows]
    findings += await _sums(broker, pool, repairer)
    findings += await _nodes(broker, pool)
    for job_ids in _parts(sorted(seen.jobs), _STORIES_AT_ONCE):
        for story in await broker.stories(job_ids):
            findings += findings_of(story)
    return sorted(set(findings))


async def _sums(broker: AdminBroker, pool: str, repairer: str) -> list[Finding]:
    """A sum counts as wrong when it is off by the same twice: jobs that move between the reads differ each time."""
    once, again = await broker.excess_of_sums(pool), await broker.excess_of_sums(pool)
    wrong = {where: excess for where, excess in once.items() if excess and again.get(where) == excess}
    if repairer:
        await broker.check(pool, sums=[(*where, -excess) for where, excess in wrong.items()], repairer=repairer)
    return [Finding("wrong_sum", key, field, f"off by {excess}") for (key, field), excess in wrong.items()]


async def _nodes(broker: AdminBroker, pool: str) -> list[Finding]:
    findings = []
    for node in await broker.pressure(pool):
        held = node.kv_blocks_total - node.kv_blocks_free
        if held and not node.num_jobs and not node.num_running and not node.num_waiting:
            findings.append(Finding("blocks_held", "pressure", node.node_id, f"{held} blocks, and no job"))
    return findings


def findings_of(story: JobHistory) -> list[Finding]:
    """What is wrong with a job's log, by itself and beside its result."""

    def found(name: str, detail: str, key: str = "log") -> Finding:
        return Finding(name, f"{key}:{story.job_id}", story.job_id, detail)

    try:
        chunks = [chunk for entry in story.log for chunk in wire.decode_chunks(entry)]
    except WireError as error:
        return [found("unreadable", error.message)]
    findings = [found(*problem) for problem in _problems_of(story.job_id, chunks)]
    if story.result is None or story.outcome is None or not chunks:
        return findings
    try:
        result = results.decode_result(story.result, story.job_id, story.outcome, (0, 0, 0, 0))
    except WireError as error:
        return [*findings, found("unreadable", error.message, "out")]
    return findings + [found("result_differs", detail, "out") for detail in _differences(chunks, result)]


def _problems_of(job_id: str, chunks: Sequence[Chunk]) -> Iterator[tuple[str, str]]:
    """(name, detail) of what is wrong with a log."""
    num_tokens: dict[int, int] = {}
    closed: set[int] = set()
    has_ended = False
    for place, chunk in enumerate(chunks):
        if chunk.job_id != job_id:
            yield "wrong_job", f"chunk {place} is of job {chunk.job_id}"
        if chunk.index != place:
            yield "wrong_index", f"chunk {place} says {chunk.index}"
        if has_ended or (chunk.outcome is None and chunk.choice in closed):
            yield "behind_the_end", f"chunk {place} of choice {chunk.choice}"
        if chunk.outcome is not None:
            has_ended = True
            continue
        known = num_tokens.get(chunk.choice, 0)
        if chunk.token_ids and chunk.position != known:
            yield (
                "not_contiguous",
                f"chunk {place} begins at token {chunk.position} of choice {chunk.choice}, not {known}",
            )
        num_tokens[chunk.choice] = known + len(chunk.token_ids)
        if chunk.finish_reason is not None:
            closed.add(chunk.choice)


def _differences(chunks: Sequence[Chunk], result: Result) -> Iterator[str]:
    """Where a result says other than the log did."""
    said = [chunk for chunk in chunks if chunk.outcome is None]
    if result.cuts != tuple((chunk.choice, len(chunk.token_ids), len(chunk.text)) for chunk in said):
        yield f"it was cut into {len(result.cuts)} chunks, the log into {len(said)} or others"
    if result.prompt_logprobs != tuple(entry for chunk in said for entry in chunk.prompt_logprobs):
        yield "what it says of the prompt differs"
    for choice in result.choices:
        own = [chunk for chunk in said if chunk.choice == choice.index]
        told = Choice(
            choice.index,
            "".join(chunk.text for chunk in own),
            tuple(token for chunk in own for token in chunk.token_ids),
            next((chunk.finish_reason for chunk in own if chunk.finish_reason is not None), None),
            tuple(entry for chunk in own for entry in chunk.logprobs),
        )
        if told != choice:
            yield f"choice {choice.index} differs"


def _parts(items: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part
