"""Why a job takes its time: how long each part took and on which node, what it waits for now, and what would help.

All of it comes from the job's record and the state of its pool. It names no tenant but the job's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.contract.job import pool_of
from penstock.contract.output import JobLedger, LedgerEvent
from penstock.contract.pauses import Pause
from penstock.contract.pool import PoolStats
from penstock.contract.priority import level_of
from penstock.queue.broker.jobs import JobStatus

if TYPE_CHECKING:
    from penstock.producer.client.client import AsyncClient

PartName = Literal["scheduled", "queue", "first_token", "rest"]
TOLD: dict[PartName, str] = {
    "scheduled": "waited for its start time",
    "queue": "waited in the queue",
    "first_token": "until the first token",
    "rest": "ran",
}
LOSSES_ALONE = 2
"""From so many losses on, a pool with the default of `max_losses` runs a job alone."""
_LEASE_ENDS = ("preempted", "given_back", "node_lost")
_ENDED: dict[str, str] = {"preempted": "which lacked KV capacity", "node_lost": "which was lost"}
_GIVEN_BACK: dict[str, str] = {
    "drain": "which was stopped",
    "lacking": "which lacked the job's adapter, or did not know a field of it",
    "unlisted": "which did not know of it",
    "repaired": "until an audit queued it again",
}


@dataclass(frozen=True, slots=True)
class JobPart:
    """A part of a job's time."""

    part: PartName
    seconds: float
    node: str = ""
    ended: str = ""
    """Why the node stopped before the job had ended."""

    @property
    def text(self) -> str:
        """The part as words."""
        on = f" on {self.node}" if self.node else ""
        return f"{TOLD[self.part]}{on}" + (f", {self.ended}" if self.ended else "")


@dataclass(frozen=True, slots=True)
class Cause:
    """What a job waits for, and what would help."""

    waits_for: str
    helps: str


def parts_of(ledger: JobLedger, submitted_ms: int, now_ms: int) -> list[JobPart]:
    """Return the parts of a job's time in order, the last one up to now if the job is open."""
    end_ms = ledger.finished_ms or now_ms
    parts, node, since_ms, is_first = list[JobPart](), "", ledger.queued_ms, True
    if submitted_ms > ledger.queued_ms:
        due_ms = min(submitted_ms, ledger.taken_ms or submitted_ms, end_ms)
        parts.append(_part("scheduled", since_ms, due_ms))
        since_ms = due_ms
    for event in ledger.events():
        if event.event in ("taken", "moved"):
            parts.append(_part("queue", since_ms, event.at_ms))
            node, since_ms = event.node_id, event.at_ms
        elif event.event == "first_token" and node:
            parts.append(_part("first_token", since_ms, event.at_ms, node))
            since_ms, is_first = event.at_ms, False
        elif event.event in _LEASE_ENDS:
            parts.append(_part(_running(is_first), since_ms, event.at_ms, node, _why_ended(event)))
            node, since_ms = "", event.at_ms
    if end_ms > since_ms or not parts:
        parts.append(_part(_running(is_first) if node else "queue", since_ms, end_ms, node))
    return parts


def _running(is_first: bool) -> PartName:
    return "first_token" if is_first else "rest"


def _why_ended(event: LedgerEvent) -> str:
    return _ENDED.get(event.event) or _GIVEN_BACK.get(event.reason, event.reason)


def _part(name: PartName, from_ms: int, to_ms: int, node: str = "", ended: str = "") -> JobPart:
    return JobPart(name, max(0, to_ms - from_ms) / 1000, node, ended)


def causes_of(status: JobStatus, pool: PoolStats, pauses: Sequence[Pause], now_ms: int) -> list[Cause]:
    """Return what a job that no node has waits for; empty for another one."""
    if status.state == "scheduled" and status.submitted_ms > now_ms:
        wait_s = (status.submitted_ms - now_ms) / 1000
        return [Cause(f"its start time, in {wait_s:.1f} s", "`penstock jobs change ID --not-before 0` starts it now")]
    if status.state == "scheduled":
        return [Cause("its turn among the due jobs, or its tenant's limit of tokens", "waiting, or a higher limit")]
    if status.state != "queued":
        return []
    found = [*_of_pauses(status, pauses), *_of_nodes(status, pool)]
    if status.ledger.losses >= LOSSES_ALONE:
        alone = f"an empty node: {status.ledger.losses} nodes were lost while they ran it, so it may have to run alone"
        found.append(Cause(alone, "its end if its request kills nodes: `penstock jobs cancel ID`; else another node"))
    if status.num_waiting_ahead:
        ahead = f"{status.num_waiting_ahead} queued jobs that are older or of a more urgent class"
        found.append(Cause(ahead, "another node, or a more urgent class"))
    return found or [Cause("a node to take it", "nothing: nodes with room take it within a second")]


def _of_pauses(status: JobStatus, pauses: Sequence[Pause]) -> Iterator[Cause]:
    level = level_of(status.priority, status.is_background)
    for pause in pauses:
        if pause.tenant is not None and pause.tenant == status.tenant:
            yield Cause("a pause of its tenant", "`penstock pools resume` with --tenant")
        elif pause.level is not None and pause.level == level:
            yield Cause("a pause of its class", "`penstock pools resume` with the class")
        elif pause.tenant is None and pause.level is None:
            yield Cause("a pause of the whole pool", "`penstock pools resume`")


def _of_nodes(status: JobStatus, pool: PoolStats) -> Iterator[Cause]:
    taking = [node for node in pool.nodes if node.takes_jobs]
    if not pool.nodes:
        yield Cause(f"a node: pool {pool.pool} has none that lives", "start a node; `penstock doctor` names dead ones")
    elif not taking:
        what = f"a node: those of pool {pool.pool} drain or are unhealthy ({len(pool.nodes)})"
        yield Cause(what, "`penstock doctor` says why; start another node")
    elif all(node.sequences_available == 0 or node.kv_tokens_available <= 0 for node in taking):
        what = f"room: the nodes of pool {pool.pool} are full ({len(taking)})"
        yield Cause(what, "another node; `penstock top` shows the load")


async def explain(client: AsyncClient, job_id: str, *, tenant: str | None = None) -> dict[str, Any]:
    """Explain a job as a JSON object. Raises NotFoundError, and UnavailableError if its Redis is away."""
    status, pool = await client.status(job_id, tenant=tenant), pool_of(job_id)
    server = client.servers.of(pool)
    now_ms, stats = await server.stats.look(pool)
    pauses = await server.steering.paused([pool])
    return explanation_object(status, stats, pauses, now_ms)


def explanation_object(status: JobStatus, pool: PoolStats, pauses: Sequence[Pause], now_ms: int) -> dict[str, Any]:
    """Return an explanation as a JSON object."""
    ledger = status.ledger
    parts = parts_of(ledger, status.submitted_ms, now_ms)
    causes = causes_of(status, pool, pauses, now_ms)
    missing = ledger.num_past_leases - len(ledger.past_leases)
    outcome = status.outcome
    return {
        "id": status.job_id,
        "object": "job.explanation",
        "pool": pool_of(status.job_id),
        "state": status.state,
        "seconds": round(max(0, (ledger.finished_ms or now_ms) - ledger.queued_ms) / 1000, 3),
        "parts": [{"text": part.text, **asdict(part), "seconds": round(part.seconds, 3)} for part in parts],
        "not_recorded": f"{missing} earlier leases" if missing > 0 else None,
        "waits_for": [asdict(cause) for cause in causes],
        "code": outcome.code or None if outcome is not None else None,
        "message": outcome.message or None if outcome is not None else None,
    }
