"""What every record that comes in as JSON has in common, and fields that may only ask for what happens anyway."""

from __future__ import annotations

import json

from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from penstock.contract.named import Named


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


def at_most(limit: int) -> BeforeValidator:
    """Counts an object's members before any of them is looked at: pydantic collects an error for each that is wrong."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "must have at most {limit} members", {"limit": limit})
        return value

    return BeforeValidator(check)


class Wire(Named):
    """Base of what comes in as JSON: strict about names and types."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
