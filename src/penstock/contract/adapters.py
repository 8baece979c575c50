"""Reference to the LoRA adapter that a job runs with."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""An adapter's name. It also names the adapter's folder, so it holds no path separator."""
LORA_PATTERN = NAME_PATTERN.removesuffix("$") + "=.+$"
"""The `NAME=PATH` argument of a command-line flag."""
AdapterName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class AdapterRef(BaseModel):
    """An adapter's name and the digest of its weights, as the pool record lists it. A plain string is a name alone.

    With a digest, every node that works on the job must use exactly these weights. Without one, any adapter of that
    name is accepted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: AdapterName
    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")] = ""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given
