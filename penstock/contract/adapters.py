"""Which adapter of a model a job runs with."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""An adapter's name, which is a folder's name too."""
LORA_PATTERN = NAME_PATTERN.removesuffix("$") + "=.+$"
"""NAME=PATH, as flags have it."""
AdapterName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class AdapterRef(BaseModel):
    """An adapter by name and, as the pool's record has it, by content; a text is a name alone.

    The digest sees to it that every node that works on a job uses the same weights; without one any will do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: AdapterName
    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")] = ""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given
