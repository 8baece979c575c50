"""The base class of records that arrive as JSON, and validators for their fields."""

from __future__ import annotations

import json

from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from penstock.contract.named import Named


def only(*accepted: object) -> AfterValidator:
    """Return a validator for an unsupported option. It accepts only the values that do not change the answer."""

    def check(value: object) -> object:
        # In Python False == 0, but a Boolean in place of a number is a wrong type, not a neutral value.
        if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
            return value
        raise PydanticCustomError(
            "unsupported_value",
            "not supported; omit it or send {neutral}",
            {"neutral": " or ".join(json.dumps(a) for a in accepted if a is not None) or "null"},
        )

    return AfterValidator(check)


def at_most(limit: int) -> BeforeValidator:
    """Return a validator that limits an object's members before pydantic validates each of them.

    Otherwise pydantic would collect one error for each invalid member.
    """

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "must have at most {limit} members", {"limit": limit})
        return value

    return BeforeValidator(check)


class Wire(Named):
    """Base of records that arrive as JSON. Unknown names and wrong types are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
