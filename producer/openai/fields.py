"""The base classes of records that arrive as JSON, and validators and marks for their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import MaxLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from penstock.contract.named import Named
from penstock.contract.sampling import Endpoint, names_at, option_of

NO_EFFECT = "accepted without effect"
"""The mark of a field that is accepted with any value of its type and changes nothing."""
Hint = Annotated[str | None, NO_EFFECT]
"""A text that a caller may send and that changes nothing."""


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


# Fields of bodies that are made from the declaration of the options.

AnyBody = TypeVar("AnyBody", bound=BaseModel)


def with_option_fields(
    base: type[AnyBody], endpoint: Endpoint, *records: type[BaseModel], lenient: bool = False
) -> type[AnyBody]:
    """Return `base` with a field for each option of the records that the endpoint's bodies have, and that `base` lacks.

    The records alone check ranges and texts. A body checks types and numbers of items, because pydantic would validate
    a million items before the record refuses the list. A `lenient` body may write a whole number as 16.0 and, where the
    option says so, one item in place of a list.
    """
    fields: dict[str, Any] = {
        there: _field_of(record.model_fields[name], lenient, option_of(record, name).one_is_enough)
        for record in records
        for name, there in names_at(endpoint, record).items()
        if "." not in there and there not in base.model_fields
    }
    return create_model(base.__name__, __base__=base, __module__=base.__module__, **fields)


def given_options(body: BaseModel, options: type[BaseModel], endpoint: Endpoint) -> dict[str, Any]:
    """Return the options that a body sets, by their own names."""
    values, names = vars(body), names_at(endpoint, options)
    return {name: values[there] for name, there in names.items() if values.get(there) is not None}


def renamed_options(options: type[BaseModel], endpoint: Endpoint) -> dict[str, str]:
    """Map the options to their names in a body, where they differ."""
    return {name: there for name, there in names_at(endpoint, options).items() if there != name}


def max_items(field: FieldInfo) -> int | None:
    """Return the most items of a list or an object; None for a field of another type."""
    return next((mark.max_length for mark in field.metadata if isinstance(mark, MaxLen)), None)


def _field_of(field: FieldInfo, lenient: bool, one_is_enough: bool) -> Any:
    kind, items = _bare(field.annotation)
    of_items, limit = tuple(_json_type(item, lenient) for item in items if item is not ...), max_items(field)
    if kind is tuple and lenient and one_is_enough:
        lengths: Any = Field(default_factory=list, max_length=limit)
        return Annotated[list[of_items[0]], FailFast(), lengths, BeforeValidator(_list_of)]  # type: ignore[valid-type]
    if kind is tuple:
        return Annotated[list[of_items[0]] | None, FailFast(), Field(max_length=limit)], None  # type: ignore[valid-type]
    if kind is dict and limit is not None:
        return Annotated[dict[str, of_items[1]] | None, at_most(limit)], None  # type: ignore[valid-type]
    return _json_type(field.annotation, lenient) | None, None


def _json_type(annotation: Any, lenient: bool) -> Any:
    """Return what an option's value is in JSON: a scalar, one of some texts, or an object for a record."""
    kind, members = _bare(annotation)
    if kind is Literal:
        return Literal[members]
    if kind is int:
        return Whole if lenient else int
    return dict[str, Any] if isinstance(kind, type) and issubclass(kind, BaseModel) else kind


def _bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without None and metadata, and the types of its items."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    if NoneType in get_args(annotation):
        (annotation,) = kinds
    annotation = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    return get_origin(annotation) or annotation, get_args(annotation)


def _list_of(value: object) -> object:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value
