"""What every record that comes in as JSON has in common, and fields that may only ask for what happens anyway."""

from __future__ import annotations

import json
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.problems import UNKNOWN_FIELD


def only(*accepted: object) -> AfterValidator:
    """Accepts the values that ask for nothing and refuses the others."""

    def check(value: object) -> object:
        # In Python, False == 0: a flag where a number belongs is a wrong type, not a neutral value.
        if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
            return value
        raise PydanticCustomError(
            "unsupported_value",
            "not supported; leave it out or send {neutral}",
            {"neutral": " or ".join(json.dumps(a) for a in accepted if a is not None) or "null"},
        )

    return AfterValidator(check)


class Wire(BaseModel):
    """Base of what comes in as JSON: strict about names and types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown_name(cls, data: Any) -> Any:
        # pydantic would collect one error for each of a million unknown names before the request is refused.
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in data:
                if name not in known:
                    raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {UNKNOWN_FIELD: name})
        return data
