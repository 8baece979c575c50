"""The tree of errors that penstock raises, with their HTTP status.

    PenstockError
    ├── RequestError            400  the caller must change the request; `param` names the field
    │   ├── PromptTooLongError  400
    │   ├── TooCostlyError      400  its grammar takes more time, memory or work than one request may
    │   ├── UnsupportedKindError 400 the model's nodes do not know this kind of job, or a field of it
    │   ├── UnsupportedDurabilityError 400  this Redis cannot promise that its disk or a replica has the write
    │   ├── UnauthorizedError   401  the API key is missing or invalid
    │   ├── ForbiddenError      403  the API key does not permit the request
    │   ├── TooLargeError       413
    │   ├── NotFoundError       404
    │   │   └── GoneError       410  the place in a stream is not there any more
    │   └── ConflictError       409  the id or idempotency key belongs to another request
    │       └── DamagedRecordError 409  what Redis has of the named object cannot be read
    ├── BusyError               429  try again after `retry_after_ms`
    ├── UnavailableError        503  no live node, or Redis is unreachable
    │   └── NotConfirmedError   503  Redis did not confirm in time what `durability` asks for
    │       ├── NotOnDiskError      503  the write is done, but Redis's disk may not have it
    │       └── NotReplicatedError  503  no replica is connected, or the write is done, but a replica may not have it
    ├── JobFailedError          500  the job ended `failed`; `code` says why
    │   ├── JobCancelledError   499
    │   └── JobExpiredError     504
    ├── ResultTimeoutError      504  the caller's `timeout` passed before the result was there; also a TimeoutError
    ├── StreamDivergedError     500  the log no longer matches the chunks already delivered
    ├── ConfigError             500  invalid settings or model files
    │   └── ProtocolVersionError 503  the pool belongs to a release with another protocol version
    └── InvariantError          500  a bug in penstock
        └── DamagedDataError    500  damaged data in Redis, or a bug in a script

Redis errors are translated in `queue/broker`, HTTP errors in `gateway`, torch errors in `gpu_node/model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from penstock.contract.output import Outcome

EXIT_WRONG_USE = 2
"""Exit status of a command that was used wrongly. ConfigError and RequestError end a command with it."""
EXIT_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""


class PenstockError(Exception):
    """Root of all errors that penstock raises on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    also: Sequence[str] = ()
    """The further fields that the message names, as `param` is."""
    detail: str = ""
    """What Redis or the system answered, with addresses and names of scripts. It is for logs, commands and programs
    that use the client. Callers of HTTP and records of jobs get the message alone."""
    redis_state: str = ""
    """The state of Redis that the error shows, one of `REDIS_STATES`; empty if it shows none."""
    pool: str = ""
    """The pool that refused a submission, if one was chosen."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def reason(self) -> str:
        """The message with its detail."""
        return f"{self.message}: {self.detail}" if self.detail else self.message

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.detail}" if self.detail else super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is copied from its positional arguments; subclasses here need keyword arguments.
        return _copy_of, (type(self), self.args, self.__dict__)


def _copy_of(kind: type[PenstockError], args: tuple[Any, ...], fields: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    # An OSError, which every TimeoutError is, takes its arguments only in __init__.
    error.args = args
    error.__dict__.update(fields)
    return error


class RequestError(PenstockError):
    """The request is invalid. Repeating it unchanged fails again."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class PromptTooLongError(RequestError):
    """The prompt plus the requested output exceeds the model's context or the node's KV cache."""

    code = "context_length_exceeded"


class TooCostlyError(RequestError):
    """One part of the request needs more work than one request may cause; `param` names that part."""

    code = "too_costly"


class UnsupportedKindError(RequestError):
    """The model's nodes do not know this kind of job, or a field of it; nodes of an older release may not."""

    code = "unsupported_kind"


class UnsupportedDurabilityError(RequestError):
    """Redis, as it is set, cannot promise that its disk or a replica has a write. Nothing was written."""

    code = "unsupported_durability"


class UnauthorizedError(RequestError):
    """The API key is missing or invalid."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The API key is valid but does not permit the request."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class TooLargeError(RequestError):
    """A request body or field exceeds its size limit."""

    status = 413
    code = "too_large"


class NotFoundError(RequestError):
    """No such job, model or other named object."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class GoneError(NotFoundError):
    """The place in a stream that the request names was there, and is not there any more."""

    status = 410
    code = "offset_gone"


class ConflictError(RequestError):
    """The id or idempotency key belongs to another request."""

    status = 409
    type = "conflict_error"
    code = "id_conflict"


class DamagedRecordError(ConflictError):
    """What Redis has of the named object cannot be read. No repetition helps; `penstock audit` names it."""

    code = "damaged_record"


class BusyError(PenstockError):
    """A limit of the pool, the tenant or Redis is reached. The caller should repeat it after `retry_after_ms`.

    `num_waiting_ahead` and `estimated_wait_ms` say how many queued jobs are as urgent or more urgent, and how long the
    job would wait with them. 4 of 5 waits are to lie between the two percentiles. All are None where the refusal does
    not depend on them.
    """

    status = 429
    type = "rate_limit_error"
    code = "pool_busy"

    def __init__(
        self,
        message: str,
        *,
        retry_after_ms: int,
        code: str | None = None,
        num_waiting_ahead: int | None = None,
        estimated_wait_ms: int | None = None,
        estimated_wait_p10_ms: int | None = None,
        estimated_wait_p90_ms: int | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_ms = retry_after_ms
        self.num_waiting_ahead = num_waiting_ahead
        self.estimated_wait_ms = estimated_wait_ms
        self.estimated_wait_p10_ms, self.estimated_wait_p90_ms = estimated_wait_p10_ms, estimated_wait_p90_ms


class UnavailableError(PenstockError):
    """No live node serves the pool, or Redis is unreachable."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_ms: int = 2000, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_ms = retry_after_ms


class NotConfirmedError(UnavailableError):
    """Redis has the write, but did not confirm in time what the call's `durability` asks for.

    `job_id`: the queued job, if a submission was not confirmed. A repeated call with the same id or idempotency key
    changes nothing more and waits again.
    """

    def __init__(self, message: str, *, job_id: str = "", retry_after_ms: int = 2000, code: str | None = None) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, code=code)
        self.job_id = job_id


class NotOnDiskError(NotConfirmedError):
    """Redis did not confirm in time that its disk has the write."""

    code = "not_on_disk"


class NotReplicatedError(NotConfirmedError):
    """No replica confirmed the write in time. Without a connected replica, nothing is written."""

    code = "not_replicated"


class JobFailedError(PenstockError):
    """The job ended without a complete result."""

    code = "job_failed"


class JobCancelledError(JobFailedError):
    """The job was canceled."""

    status = 499
    code = "cancelled"


class JobExpiredError(JobFailedError):
    """The job's deadline passed before the job was done, or its TTL before a node started it."""

    status = 504
    code = "deadline_exceeded"


class ResultTimeoutError(PenstockError, TimeoutError):
    """The caller's `timeout` passed before the result was there. The message says what happens to the job."""

    status = 504
    code = "result_timeout"


class StreamDivergedError(PenstockError):
    """The job's log no longer matches the chunks already delivered, because Redis lost acknowledged writes."""

    code = "stream_diverged"


class ConfigError(PenstockError):
    """Settings, or files that they point to, are invalid."""

    code = "bad_config"


class ProtocolVersionError(ConfigError):
    """The pool in Redis belongs to a release with another protocol version. This release leaves it as it is."""

    status = 503
    type = "service_unavailable_error"
    code = "protocol_version"


class InvariantError(PenstockError):
    """The process reached a state that must not exist: a bug in penstock."""


class DamagedDataError(InvariantError):
    """Redis refused a call: a key is damaged, or a script has a bug. A node goes on with its next round."""


POOL_PAUSED = "pool_paused"
"""The code for a caller that will not wait for the end of a pause."""
_BY_CODE: dict[str, type[PenstockError]] = {POOL_PAUSED: UnavailableError} | {
    cls.code: cls
    for cls in (
        *(RequestError, PromptTooLongError, TooCostlyError, TooLargeError, NotFoundError, UnavailableError),
        UnsupportedKindError,
    )
}


def error_of(outcome: Outcome) -> PenstockError:
    """Return the error to raise for a job that did not succeed.

    A job that a node refused keeps the class of that refusal, found by its `code`.
    """
    message = outcome.message or f"job {outcome.state}"
    if outcome.state == "cancelled":
        return JobCancelledError(message)
    if outcome.state == "expired":
        return JobExpiredError(message, code=outcome.code or None)
    kind = _BY_CODE.get(outcome.code, JobFailedError)
    error = kind(message, code=outcome.code or None)
    error.param = outcome.param or None
    return error
