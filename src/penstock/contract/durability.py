"""What an answered write, or a token that a reader was shown, survives, by the name under which callers ask for it."""

from __future__ import annotations

from typing import Final, Literal, cast, get_args

from penstock.contract.errors import RequestError

Durability = Literal["memory", "fsync", "replicated"]
"""What an answered write survives: `memory`, the death of every process; `fsync`, that of Redis's machine too, because
Redis's disk has it; `replicated`, a fail-over, because a replica has it."""
MEMORY: Final = "memory"
FSYNC: Final = "fsync"
REPLICATED: Final = "replicated"

TOKEN_DURABILITY: Final = "token_durability"
"""The name of the option of readers, in bodies, queries and arguments."""


def checked_durability(name: str | None, param: str = "durability") -> Durability | None:
    """Return the durability of this name; None for None. Raises RequestError, about `param`, for an unknown name."""
    if name not in (None, *get_args(Durability)):
        message = f"{param} must be one of {', '.join(get_args(Durability))}, not {str(name)[:32]!r}"
        raise RequestError(message, param=param)
    return cast("Durability | None", name)
