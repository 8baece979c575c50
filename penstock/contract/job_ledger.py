"""A job's ledger: when the job was queued, taken, moved and finished, by which nodes, and what it used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.contract.output import Usage

LeaseEnd = Literal["drain", "pressure", "lacking", "lost", "unlisted", "repaired"]
"""Why a lease ended before its job did. `drain`: the node left. `pressure`: it lacked KV capacity. `lacking`: it lacked
the adapter. `lost`: it died. `unlisted`: it did not know the job. `repaired`: an audit queued the job again."""
EventName = Literal["queued", "taken", "moved", "first_token", "preempted", "given_back", "node_lost", "finished"]
_EVENT_OF: dict[str, EventName] = {"pressure": "preempted", "lost": "node_lost"}


@dataclass(frozen=True, slots=True)
class PastLease:
    """A node's lease of a job that ended before the job did. Times are Redis ms."""

    node_id: str
    taken_ms: int
    ended_ms: int
    why: LeaseEnd


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One entry of a job's ledger. `at_ms` is Redis ms."""

    event: EventName
    at_ms: int
    node_id: str = ""
    from_node_id: str = ""
    """For `moved`: the node that had the job before."""
    reason: str = ""
    """For `given_back`: a `LeaseEnd`. For `finished`: the job's terminal state."""


@dataclass(frozen=True, slots=True)
class JobLedger:
    """The events that the queue recorded of a job. Times are Redis ms, 0 for a stage not reached yet.

    `past_leases` are the newest ones; `num_past_leases` counts all of them. `preemptions` counts how often a
    node gave the job back to the queue. `engine_preemptions` counts how often engines took the KV blocks of its
    sequences, which stayed on their node; each lease adds its count when it ends, a lost one none. `losses` counts lost
    nodes since the job last made progress. `usage` and `kv_token_ms` are None before the end, and if the node did not
    report them.
    """

    state: str
    queued_ms: int
    taken_ms: int = 0
    first_token_ms: int = 0
    finished_ms: int = 0
    node_id: str = ""
    """The node that runs the job, or that ended it."""
    retaken_ms: int = 0
    """When that node took the job, if another node or an earlier lease had it before."""
    past_leases: tuple[PastLease, ...] = ()
    num_past_leases: int = 0
    preemptions: int = 0
    engine_preemptions: int = 0
    losses: int = 0
    usage: Usage | None = None
    kv_token_ms: int | None = None
    """KV tokens × milliseconds that the last node held them."""

    def events(self) -> list[LedgerEvent]:
        """Return the entries in order of time. Leases before the oldest listed one are missing."""
        events = [LedgerEvent("queued", self.queued_ms), *self._leases()]
        if self.first_token_ms:
            events.append(LedgerEvent("first_token", self.first_token_ms))
        if self.finished_ms:
            events.append(LedgerEvent("finished", self.finished_ms, self.node_id, reason=self.state))
        # The sort is stable, so a lease's end stays before the next lease of the same millisecond.
        return sorted(events, key=lambda event: event.at_ms)

    def _leases(self) -> Iterator[LedgerEvent]:
        before = ""
        for lease in self.past_leases:
            yield _taken(lease.node_id, lease.taken_ms, before)
            event = _EVENT_OF.get(lease.why, "given_back")
            yield LedgerEvent(event, lease.ended_ms, lease.node_id, reason=lease.why if event == "given_back" else "")
            before = lease.node_id
        if self.node_id:
            yield _taken(self.node_id, self.retaken_ms or self.taken_ms, before)


def _taken(node_id: str, at_ms: int, before: str) -> LedgerEvent:
    has_moved = before not in ("", node_id)
    return LedgerEvent("moved" if has_moved else "taken", at_ms, node_id, before if has_moved else "")
