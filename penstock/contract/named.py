"""Base classes of records from callers, which refuse unknown fields by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

UNKNOWN_FIELD = "unknown_field"
"""The pydantic error type, the API error code, and the key under which the error's context holds the field name."""
WRONG_MEMBER = "wrong_member"
"""The key under which the error's context holds the name of the member that is wrong, if a field holds an object."""
NEAREST_FIELD = "nearest_field"
"""The key under which the error's context holds the most similar known name, if there is one."""
MAX_COMPARED_CHARS = 64
"""An unknown name longer than this is not compared with the known ones, because comparing it would take too long."""


@dataclass(slots=True)
class IgnoredFields:
    """A validation context: unknown fields of one record are dropped and counted instead of refused."""

    of: type[Named]
    """The record. Records inside it still refuse unknown fields."""
    names: list[str] = field(default_factory=list)
    """The dropped names in the order of the input."""

    def without_them(self, data: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        """Return the data without its unknown fields, and note their names."""
        self.names += [name for name in data if name not in known]
        return {name: value for name, value in data.items() if name in known} if self.names else data


class Named(BaseModel):
    """Base of records from untrusted input. Validation stops at the first unknown field.

    pydantic alone would collect one error per unknown field; a million of them would block the event loop for seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    _known: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._known = frozenset(known for name, field in cls.model_fields.items() for known in _names_of(name, field))

    @model_validator(mode="before")
    @classmethod
    def _first_unknown_name(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or cls.model_config.get("extra") in ("ignore", "allow"):
            return data
        if isinstance(info.context, IgnoredFields) and info.context.of is cls:
            return info.context.without_them(data, cls._known)
        for name in data:
            if name not in cls._known:
                context = {UNKNOWN_FIELD: name, NEAREST_FIELD: nearest_name(name, cls._known)}
                raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", context)
        return data


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to an unknown one, or None if none is similar."""
    if len(name) > MAX_COMPARED_CHARS:
        return None
    return next(iter(get_close_matches(name.lower(), sorted(known), n=1)), None)


def _names_of(name: str, field: FieldInfo) -> list[Any]:
    alias = field.validation_alias or name
    return [*alias.choices] if isinstance(alias, AliasChoices) else [alias]


class CheckedInput(BaseModel):
    """Base of records from callers: frozen; unknown fields, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""A pool's or tenant's name. A shard of a pool is written `<pool>~<n>`, so `~` is not allowed here."""
