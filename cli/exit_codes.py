"""Exit codes of commands that end with an error."""

from __future__ import annotations

from penstock.contract.errors import (
    EXIT_WRONG_USE,
    BusyError,
    ConfigError,
    PenstockError,
    RequestError,
    UnavailableError,
)

EXIT_FAILED = 1
EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h."""


def exit_code_of(error: PenstockError) -> int:
    """Return 2 for a usage error, 75 if the same command may succeed later, and 1 for other errors."""
    if isinstance(error, RequestError | ConfigError):
        return EXIT_WRONG_USE
    if isinstance(error, BusyError | UnavailableError):
        return EXIT_TRY_AGAIN
    return EXIT_FAILED
