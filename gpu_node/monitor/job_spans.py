"""The spans of a node's jobs, made from the times that its metrics use anyway. Imports OpenTelemetry's API.

A trace has these spans of a node: `queue`, and below the span of the lease `prefill`, `decode` and `emit`. `queue` and
`prefill` are recorded when Redis has stored the first output, since a node that is killed records nothing at its end.
The span of a lease has an id that every node can compute. So the node that takes over records the lost node's lease.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind

from penstock.contract.output import PastLease
from penstock.contract.priority import Priority
from penstock.contract.tasks import Embed
from penstock.gpu_node.engine import RankStats
from penstock.gpu_node.jobs.held_job import HeldJob, JobTrace
from penstock.gpu_node.jobs.times import EndedJob
from penstock.queue.wire import Request
from penstock.runtime.tracing.context import context_carried
from penstock.runtime.tracing.export import Tracing

TAKEN_AWAY = ("lost", "unlisted", "repaired")
"""Ends of leases that the node itself does not record."""


class JobSpans:
    """Records the spans of jobs whose trace is recorded."""

    def __init__(
        self,
        tracing: Tracing,
        past_leases: Callable[[str], Awaitable[tuple[PastLease, ...]]],
        *,
        node_id: str,
        model: str,
        ranks: Callable[[], RankStats],
    ) -> None:
        """`past_leases` reads the leases of a job that ended before the job did, `ranks` what the ranks spent."""
        self._tracing = tracing
        self._past_leases = past_leases
        self._node_id = node_id
        self._model = model
        self._ranks = ranks

    async def taken(self, job: HeldJob, request: Request) -> None:
        """Set the job's trace if its request carries the context of a recorded one."""
        parent = context_carried(request.trace)
        if not (submitted := _context_of(parent)).trace_flags.sampled:
            return
        trace_id = trace.format_trace_id(submitted.trace_id)
        job.trace = found = JobTrace(
            parent, trace_id, _operation_of(request), job.times.submitted_s, ranks=self._ranks()
        )
        if job.times.is_new:
            return
        if leases := await self._past_leases(job.job_id):
            found.queued_s = _local_s(job, leases[-1].ended_ms)
            found.links = (self._previous(job, found, leases[-1]),)

    def _previous(self, job: HeldJob, found: JobTrace, lease: PastLease) -> Link:
        """Return a link to the span of the job's last lease. Record that span if its node was not able to."""
        span_id = _lease_span_id(job.job_id, lease.node_id, lease.taken_ms)
        if lease.why in TAKEN_AWAY:
            times_ns = _wall_ns(_local_s(job, lease.taken_ms)), _wall_ns(found.queued_s)
            attributes = self._of_job(job, found, lease.node_id) | {"penstock.lease.end": lease.why}
            self._tracing.record(
                self._lease_name(job, found),
                found.parent,
                times_ns,
                attributes,
                kind=SpanKind.CONSUMER,
                span_id=span_id,
                error=f"lease ended: {lease.why}",
            )
        return Link(_sibling(_context_of(found.parent), span_id))

    def began(self, job: HeldJob) -> None:
        """Record the spans up to the first output, unless that was done. Called once Redis has stored output."""
        if job.trace is not None and not job.trace.has_begun and job.times.first_output_s is not None:
            self._record_beginning(job, job.trace)

    def lost(self, job: HeldJob) -> None:
        """Record the spans of a job that now belongs to another node. That node records the span of the lost lease."""
        if job.trace is not None:
            self._record_parts(job, job.trace)

    def gave_back(self, job: HeldJob, why: str) -> None:
        """Record the spans of a job that this node has given back."""
        if job.trace is not None:
            self._record_parts(job, job.trace)
            self._record_lease(job, job.trace, time.monotonic(), {"penstock.lease.end": why})

    def ended(self, job: HeldJob, ended: EndedJob, at_s: float) -> None:
        """Record the spans of a job whose end Redis has stored."""
        if (found := job.trace) is None:
            return
        self._record_parts(job, found)
        if job.times.last_token_s:
            self._record("emit", job, self._lease_context(job, found), (max(job.times.last_token_s.values()), at_s))
        error = ended.outcome.code if ended.outcome.state == "failed" else ""
        self._record_lease(job, found, at_s, _results(job, ended, at_s), error)

    def _record_beginning(self, job: HeldJob, found: JobTrace) -> None:
        found.has_begun, times = True, job.times
        self._record("queue", job, found.parent, (found.queued_s, times.taken_s))
        if times.first_output_s is not None:
            self._record("prefill", job, self._lease_context(job, found), (times.taken_s, times.first_output_s))

    def _record_parts(self, job: HeldJob, found: JobTrace) -> None:
        if not found.has_begun:
            self._record_beginning(job, found)
        first_s, last_s = job.times.first_output_s, job.times.last_token_s
        if first_s is not None:
            self._record("decode", job, self._lease_context(job, found), (first_s, max(last_s.values())))

    def _record(self, name: str, job: HeldJob, parent: Context, times_s: tuple[float, float]) -> None:
        attributes = {"penstock.job.id": job.job_id, "penstock.node.id": self._node_id}
        self._tracing.record(name, parent, (_wall_ns(times_s[0]), _wall_ns(times_s[1])), attributes)

    def _record_lease(
        self, job: HeldJob, found: JobTrace, at_s: float, attributes: dict[str, Any], error: str = ""
    ) -> None:
        self._tracing.record(
            self._lease_name(job, found),
            found.parent,
            (_wall_ns(job.times.taken_s), _wall_ns(at_s)),
            self._of_job(job, found, self._node_id)
            | _spent_by_ranks(found.ranks, self._ranks())
            | ({"error.type": error} if error else {})
            | attributes,
            kind=SpanKind.CONSUMER,
            links=found.links,
            span_id=_lease_span_id(job.job_id, self._node_id, job.taken.taken_ms),
            error=error,
        )

    def _lease_name(self, job: HeldJob, found: JobTrace) -> str:
        return f"{found.operation} {job.adapter or self._model}"

    def _lease_context(self, job: HeldJob, found: JobTrace) -> Context:
        """Return the context of this node's lease, whose span is recorded when it ends."""
        span_id = _lease_span_id(job.job_id, self._node_id, job.taken.taken_ms)
        lease = NonRecordingSpan(_sibling(_context_of(found.parent), span_id))
        return trace.set_span_in_context(lease, Context())

    def _of_job(self, job: HeldJob, found: JobTrace, node_id: str) -> dict[str, Any]:
        return {
            "gen_ai.operation.name": found.operation,
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": job.adapter or self._model,
            "penstock.job.id": job.job_id,
            "penstock.node.id": node_id,
            "penstock.tenant": job.taken.tenant,
            "penstock.class": Priority(job.taken.priority).name.lower(),
        }


def _results(job: HeldJob, ended: EndedJob, at_s: float) -> dict[str, Any]:
    """Return what an ended job used, under GenAI's names, and its latencies under vLLM's."""
    times, usage, params = job.times, ended.usage, job.params
    first_s = times.first_output_s
    attributes: dict[str, Any] = {
        "gen_ai.response.finish_reasons": (ended.reason,),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.latency.time_in_queue": times.taken_s - times.submitted_s if times.is_new else None,
        "gen_ai.latency.time_to_first_token": times.first_token_s and times.first_token_s - times.submitted_s,
        "gen_ai.latency.time_in_model_prefill": first_s and first_s - times.taken_s,
        "gen_ai.latency.time_in_model_decode": first_s and max(times.last_token_s.values()) - first_s,
        "gen_ai.latency.e2e": at_s - times.submitted_s,
        "penstock.preemptions": job.num_preemptions,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _spent_by_ranks(before: RankStats | None, now: RankStats) -> dict[str, Any]:
    """Return what the ranks have spent at meetings in between, by rank, for all jobs that the node computed."""
    if before is None or now.num_ranks == 1:
        return {}
    facts: dict[str, Any] = {"penstock.ranks": now.num_ranks, "penstock.stages": now.num_stages}
    spent = now.since(before)
    if spent is None:
        # The counts began anew with the ranks.
        return facts | {"penstock.ranks.losses": now.num_starts - before.num_starts}
    facts |= {"penstock.ranks.meetings": spent.num_meetings, "penstock.ranks.steps": spent.num_steps}
    by_rank_or_stage: dict[str, tuple[float, ...]] = {
        "waited_s": spent.waited_s,
        "exchanged_s": spent.exchanged_s,
        "stage_idle": spent.stage_idle,
        "weight_bytes": spent.weight_bytes,
        "kv_bytes": spent.kv_bytes,
    }
    facts |= {
        f"penstock.ranks.{name}": tuple(round(number, 6) for number in numbers)
        for name, numbers in by_rank_or_stage.items()
        if numbers
    }
    return facts


def _operation_of(request: Request) -> str:
    """Return GenAI's name of what a request asks for."""
    if request.task is not None:
        return "embeddings" if isinstance(request.task, Embed) else request.task.kind
    return "text_completion" if request.messages is None else "chat"


def _context_of(context: Context) -> SpanContext:
    return trace.get_current_span(context).get_span_context()


def _sibling(parent: SpanContext, span_id: int) -> SpanContext:
    """Return the context of another span of the parent's trace."""
    return SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)


def _lease_span_id(job_id: str, node_id: str, taken_ms: int) -> int:
    """Return the id of the span of a lease: the same at every node."""
    digest = hashlib.blake2b(f"{job_id} {node_id} {taken_ms}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _local_s(job: HeldJob, redis_ms: int) -> float:
    """Convert a time of Redis's clock to this process's monotonic clock."""
    return job.times.taken_s - (job.taken.taken_ms - redis_ms) / 1000


def _wall_ns(at_s: float) -> int:
    """Convert a time of this process's monotonic clock to nanoseconds since the epoch."""
    return time.time_ns() - time.monotonic_ns() + int(at_s * 1e9)
