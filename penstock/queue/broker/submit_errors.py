"""Translation of refusals by the submit script into errors."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.contract.errors import BusyError, ConflictError, InvariantError, RequestError, UnavailableError
from penstock.contract.job import Job


def submit_error(kind: str, answer: list[Any], job: Job) -> Exception:
    """Return the error for a refused job; `kind` is the first element of the script's `answer`."""
    match kind:
        case "UNKNOWN_POOL":
            # The client found the pool announced, so Redis lost it since. Its nodes announce it again within seconds.
            return UnavailableError(f"no node serves the pool {job.pool} now", code="no_node")
        case "ID_CONFLICT":
            return ConflictError(f"job id {job.id} belongs to another request", param="job_id")
        case "IDEMPOTENCY_CONFLICT":
            message = "this idempotency key was used with another request"
            return ConflictError(message, code="idempotency_conflict", param="idempotency_key")
        case "BAD_ID_AGE":
            message = f"job id {job.id} is older than {answer[1] // 60_000} min or from the future"
            return RequestError(message, code="bad_id", param="job_id")
        case "BUSY":
            return _busy_error(answer[1].decode(), *answer[2:])
    return InvariantError(f"submit answered {kind}")


def _busy_error(limit_name: str, limit: int, retry_after_ms: int, num_ahead: int, wait_ms: int) -> BusyError:
    busy = partial(
        BusyError,
        retry_after_ms=retry_after_ms,
        num_waiting_ahead=num_ahead,
        estimated_wait_ms=None if wait_ms < 0 else wait_ms,
    )
    if limit_name == "wait":
        return busy(f"this job would wait about {wait_ms // 1000} s; the limit is {limit} s")
    if limit_name == "memory":
        message = f"the limit of {limit} % of Redis's memory is reached, including bytes that open jobs may still write"
        return busy(message, code="redis_full")
    if limit_name == "tenant's memory":
        message = f"this tenant's limit of {limit} % of Redis's memory is reached by its jobs and results"
        return busy(message, code="memory_share_exceeded")
    tenant, _, rest = limit_name.rpartition("'s ")
    if tenant:
        message = f"this tenant's limit of {limit} {rest} is reached"
        return busy(message, code="rate_limit_exceeded")
    return busy(f"the pool's limit of {limit} {rest} is reached")
