"""Waiting for a store behind an fsspec URL, such as s3://, that does not answer for a while."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
OnWait = Callable[[str], None]
"""Called with the reason for which a batch waits."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
MAX_REASON_CHARS = 200
_LIBRARIES = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3"})
"""Packages of stores, whose errors do not derive from OSError."""
_NETWORK = ("Connect", "Connection", "Endpoint", "Timeout", "Unavailable", "SlowDown", "HTTPClient", "ServerError")
"""Parts of the names of errors with which they say that the store cannot be reached."""
_LASTING = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ENOSPC}
)
"""Answers of a store that another attempt does not change."""


def outlast(name: str, call: Callable[[], T], on_wait: OnWait) -> T:
    """Return what `call` returns. While the store of the URL `name` is unreachable, report it and try again."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return call()
        except Exception as error:
            if "://" not in name or not is_outage(error):
                raise
            reason = str(error).strip().partition("\n")[0][:MAX_REASON_CHARS] or type(error).__name__
            on_wait(f"{name} is unreachable ({reason}); next attempt in {pause_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def is_outage(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, says that a store cannot be reached at this moment."""
    return any(_is_of_network(one) for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _LASTING
    kind = type(error)
    return kind.__module__.partition(".")[0] in _LIBRARIES and any(word in kind.__name__ for word in _NETWORK)
