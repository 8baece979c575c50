"""The one tree of errors, with their HTTP status and OpenAI type.

    PenstockError
    ├── RequestError            400  the caller can mend it; `param` names the field
    │   ├── PromptTooLongError  400
    │   ├── TooCostlyError      400  its grammar takes more time, memory or work than one request may
    │   ├── UnauthorizedError   401  no API key, or not a valid one
    │   ├── ForbiddenError      403  the API key is not good for this
    │   ├── TooLargeError       413
    │   ├── NotFoundError       404
    │   └── ConflictError       409  the id or idempotency key is taken by another body
    ├── BusyError               429  try again after `retry_after_ms`
    ├── UnavailableError        503  no node, or Redis away
    ├── JobFailedError          500  the job ended `failed`; `code` says why
    │   ├── JobCancelledError   499
    │   └── JobExpiredError     504
    ├── StreamDivergedError     500  the log no longer matches what was delivered
    ├── ConfigError             500  settings or model files that cannot work
    └── InvariantError          500  a bug of ours

Redis errors are translated in `contract/broker`, HTTP ones in `gateway`, torch's in `gpu_node/model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from penstock.contract.job import Outcome

EXIT_WRONG_USE = 2
"""Status of a command that was called in a way that cannot work: what ConfigError and RequestError mean to a shell."""
EXIT_INTERRUPTED = 130
"""Status of a command that Ctrl-C ended."""


class PenstockError(Exception):
    """Root of all errors that penstock raises on purpose."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # What an exception is copied by otherwise knows nothing of arguments that must be named.
        return _copy_of, (type(self), self.args, self.__dict__)


def _copy_of(kind: type[PenstockError], args: tuple[Any, ...], fields: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class RequestError(PenstockError):
    """The request is wrong and will stay wrong."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class PromptTooLongError(RequestError):
    """Prompt (plus wanted output) does not fit the model's context or the node's KV cache."""

    code = "context_length_exceeded"


class TooCostlyError(RequestError):
    """A part of the request causes more work than one request may; `param` names it."""

    code = "too_costly"


class UnauthorizedError(RequestError):
    """Nobody we know: no API key, or not a valid one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """Somebody we know, who may not do this."""

    status = 403
    type = "permission_error"
    code = "insufficient_scope"


class TooLargeError(RequestError):
    """A body or field above its size limit."""

    status = 413
    code = "too_large"


class NotFoundError(RequestError):
    """No such job or model."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ConflictError(RequestError):
    """The id or idempotency key belongs to another request."""

    status = 409
    type = "conflict_error"
    code = "id_conflict"


class BusyError(PenstockError):
    """The pool is full; the same request will be welcome after `retry_after_ms`."""

    status = 429
    type = "rate_limit_error"
    code = "pool_busy"

    def __init__(self, message: str, *, retry_after_ms: int, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_ms = retry_after_ms


class UnavailableError(PenstockError):
    """Nobody is there to do it now: no node, or Redis is away."""

    status = 503
    type = "service_unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_ms: int = 2000, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_ms = retry_after_ms


class JobFailedError(PenstockError):
    """The job ended without a full answer."""

    code = "job_failed"


class JobCancelledError(JobFailedError):
    """The job was cancelled."""

    status = 499
    code = "cancelled"


class JobExpiredError(JobFailedError):
    """The job's deadline passed before it was done."""

    status = 504
    code = "deadline_exceeded"


class StreamDivergedError(PenstockError):
    """What was delivered is no longer what the log says (Redis lost acknowledged writes)."""

    code = "stream_diverged"


class ConfigError(PenstockError):
    """Settings, or files they point to, that cannot work."""

    code = "bad_config"


class InvariantError(PenstockError):
    """A state that must not exist."""


_BY_CODE: dict[str, type[PenstockError]] = {
    cls.code: cls
    for cls in (RequestError, PromptTooLongError, TooCostlyError, TooLargeError, NotFoundError, UnavailableError)
}


def error_of(outcome: Outcome) -> PenstockError:
    """The error a reader raises for a job that did not end `done`: a refusal by the node keeps its own class."""
    message = outcome.message or f"job {outcome.state}"
    if outcome.state == "cancelled":
        return JobCancelledError(message)
    if outcome.state == "expired":
        return JobExpiredError(message)
    kind = _BY_CODE.get(outcome.code, JobFailedError)
    error = kind(message, code=outcome.code or None)
    error.param = outcome.param or None
    return error
