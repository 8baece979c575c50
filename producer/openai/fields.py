"""The base classes of records that arrive as JSON, and validators and marks for their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from penstock.contract.named import Named

NO_EFFECT = "accepted without effect"
"""The mark of a field that is accepted with any value of its type and changes nothing."""
Hint = Annotated[str | None, NO_EFFECT]
"""A text that a caller may send and that changes nothing."""


@dataclass(frozen=True, slots=True)
class Accepts:
    """The mark of a field whose validators accept only some values: `words` say which, for docs/FIELDS.md."""

    words: str


class NeutralValues:
    """A validator of a field that is not supported: it accepts only the values that do not change the answer."""

    def __init__(self, *accepted: object) -> None:
        self.accepted = accepted

    def __call__(self, value: Any) -> Any:
        """Return the value if it is neutral; otherwise raise PydanticCustomError."""
        # In Python False == 0, but a Boolean in place of a number is a wrong type, not a neutral value.
        if any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in self.accepted):
            return value
        raise PydanticCustomError(
            "unsupported_value", "not supported; omit it or send {neutral}", {"neutral": self.shown}
        )

    @property
    def shown(self) -> str:
        """The accepted values as a text for people, without null if there are others."""
        return " or ".join(json.dumps(a) for a in self.accepted if a is not None) or "null"


def only(*accepted: object) -> AfterValidator:
    """Return a validator for an unsupported option. It accepts only the values that do not change the answer."""
    return AfterValidator(NeutralValues(*accepted))


def neutral_values_of(metadata: list[Any]) -> NeutralValues | None:
    """Return the neutral values of a field with this metadata, or None if the field is supported."""
    checks: list[Callable[..., Any]] = [one.func for one in metadata if isinstance(one, AfterValidator)]
    return next((check for check in checks if isinstance(check, NeutralValues)), None)


def at_most(limit: int) -> BeforeValidator:
    """Return a validator that limits an object's members before pydantic validates each of them.

    Otherwise pydantic would collect one error for each invalid member.
    """

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_many", "must have at most {limit} members", {"limit": limit})
        return value

    return BeforeValidator(check)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE_NUMBER = BeforeValidator(_whole)
Whole = Annotated[int, WHOLE_NUMBER]
"""An integer. Some clients write it as 16.0."""


class Wire(Named):
    """Base of records that arrive as JSON. Unknown names and wrong types are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @property
    def dropped(self) -> Sequence[str]:
        """Names of the parts of a body that it accepts and that have no effect, if its answer must list them."""
        return ()


class OpenWire(Wire):
    """Base of the parts of a conversation. Unknown names are ignored.

    Clients send back messages and tools with names that their library or another server added.
    """

    model_config = ConfigDict(extra="ignore")
