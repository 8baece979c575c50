"""What the bodies of several APIs share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from penstock.contract.fields import Wire, only


def class_of(value: object) -> object:
    """Return the class for vLLM's integer priority, of which a lower one is more urgent and 0 is the default."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not isinstance(value, int | float) or isinstance(value, bool) or not is_whole:
        return value
    return "interactive" if value < 0 else "batch" if value > 0 else "standard"


class BodyOfJob(Wire):
    """The fields that a body has otherwise inside of a job, whose stream has a path of its own."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    stream_options: Annotated[Any, only(None)] = None
