"""Base class of records parsed from untrusted input; it refuses unknown field names cheaply."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import AliasChoices, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

UNKNOWN_FIELD = "unknown_field"
"""The pydantic error type, the API error code, and the key under which the error's context holds the field name."""


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
    def _first_unknown_name(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls._known:
                    raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {UNKNOWN_FIELD: name})
        return data


def _names_of(name: str, field: FieldInfo) -> list[Any]:
    alias = field.validation_alias or name
    return [*alias.choices] if isinstance(alias, AliasChoices) else [alias]
