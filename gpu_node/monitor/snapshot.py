"""The state of a node that its heartbeats report, collected from the node's parts at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.inbox import JobInbox
from penstock.gpu_node.ledger import Ledger
from penstock.gpu_node.monitor.engine_watch import EngineWatch
from penstock.gpu_node.outbox import Outbox


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The state of a node. Counters grow from its start."""

    stats: EngineStats
    engine_stalled_s: float
    """Seconds without an answer, or without a step although there is work."""
    answered_call: int
    """Number of the last take call that was answered. `job_ids` lists no jobs of later calls."""
    job_ids: list[str]
    jobs_by_class: tuple[int, ...]
    jobs_by_tenant: dict[str, int]
    kv_tokens_available: int
    has_backlog: bool
    """Whether jobs were waiting when the queue was last read."""
    hears_doorbell: bool
    num_tokenizer_failures: int
    finished_cost: int
    """Total cost of the jobs that finished here."""
    predicted_outputs: tuple[tuple[int, int, int], ...]
    """Predicted output lengths; see `NodePressure`."""
    unsent_bytes: int
    max_unsent_bytes: int


async def take_snapshot(watch: EngineWatch, ledger: Ledger, inbox: JobInbox, outbox: Outbox) -> NodeSnapshot:
    """Look at the engine, then return the state of all parts at that moment. Raises as `EngineWatch.look` does."""
    stats = await watch.look()
    return NodeSnapshot(
        stats=stats,
        engine_stalled_s=watch.stalled_s,
        answered_call=inbox.answered_call,
        job_ids=ledger.job_ids,
        jobs_by_class=ledger.jobs_by_class,
        jobs_by_tenant=ledger.jobs_by_tenant,
        kv_tokens_available=inbox.kv_tokens_available,
        has_backlog=inbox.has_backlog,
        hears_doorbell=inbox.hears_doorbell,
        num_tokenizer_failures=inbox.num_tokenizer_failures,
        finished_cost=ledger.counts.finished_cost,
        predicted_outputs=ledger.predicted_outputs,
        unsent_bytes=ledger.unsent_bytes,
        max_unsent_bytes=outbox.max_unsent_bytes,
    )
