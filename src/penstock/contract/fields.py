"""Records from callers: how their fields are declared, named in bodies, and checked; unknown ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from itertools import islice
from types import NoneType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args, get_origin

from annotated_types import MaxLen
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, to_json

UNKNOWN_FIELD = "unknown_field"
"""The pydantic error type, the API error code, and the key under which the error's context holds the field name."""
WRONG_MEMBER = "wrong_member"
"""The key under which the error's context holds the name of the member that is wrong, if a field holds an object."""
NEAREST_FIELD = "nearest_field"
"""The key under which the error's context holds the most similar known name, if there is one."""
MAX_UNKNOWN = 4
"""Unknown fields that the error of a record names."""
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
    """Base of records from untrusted input. Its error names some unknown fields, and what is wrong in the known ones.

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
    def _no_unknown_names(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or cls.model_config.get("extra") in ("ignore", "allow"):
            return data
        if isinstance(info.context, IgnoredFields) and info.context.of is cls:
            return info.context.without_them(data, cls._known)
        if unknown := [*islice((name for name in data if name not in cls._known), MAX_UNKNOWN)]:
            known = {name: value for name, value in data.items() if name in cls._known}
            raise ValidationError.from_exception_data(
                cls.__name__, [*map(cls._unknown, unknown), *cls._others_in(known, info)]
            )
        return data

    @classmethod
    def _unknown(cls, name: str) -> InitErrorDetails:
        context = {UNKNOWN_FIELD: name, NEAREST_FIELD: nearest_name(name, cls._known)}
        return {"type": PydanticCustomError(UNKNOWN_FIELD, "unknown field", context), "input": None}

    @classmethod
    def _others_in(cls, known: dict[str, Any], info: ValidationInfo) -> Iterator[InitErrorDetails]:
        """Yield what is wrong in the known fields of a record that also has unknown ones."""
        try:
            if info.mode == "json":
                cls.model_validate_json(to_json(known, inf_nan_mode="constants"), context=info.context)
            else:
                cls.model_validate(known, context=info.context)
        except ValidationError as error:
            for one in error.errors(include_url=False, include_input=False):
                kind: Any = PydanticCustomError
                kind = kind(one["type"], one["msg"], one.get("ctx"))
                yield {"type": kind, "loc": one["loc"], "input": None}


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


def encodable(text: str) -> str:
    """Return the text if it can be encoded as UTF-8; otherwise raise ValueError."""
    try:
        # Fifteen times as fast as checking each character, which would block the event loop.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must be valid Unicode, without lone surrogates") from None
    return text


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, AfterValidator(encodable)]

NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
"""A pool's or tenant's name. A shard of a pool is written `<pool>~<n>`, so `~` is not allowed here."""


# What an option's field says beside type, default and bounds: its names in HTTP bodies, and its flag.

Endpoint = Literal["openai", "responses", "compact", "messages", "count_tokens", "jobs", "embeddings", "rows"]
OPENAI: Final = "openai"
"""Chats, completions, and rows of batch files."""
RESPONSES: Final = "responses"
COMPACT: Final = "compact"
MESSAGES: Final = "messages"
COUNT_TOKENS: Final = "count_tokens"
JOBS: Final = "jobs"
EMBEDDINGS: Final = "embeddings"
BATCH_ROWS: Final = "rows"
"""How the jobs of a batch's rows are queued. What they sample is named as in bodies of the row's endpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """The mark of an option's field."""

    named: Mapping[Endpoint, str | None] = field(default_factory=dict)
    """Endpoint → the option's name in bodies there; a name with a dot is a part of another field. Endpoints that are
    absent use the option's own name. None: the body has no field that only says this option."""
    one_is_enough: bool = False
    """Whether OpenAI's bodies may have one item in place of a list of one."""
    in_json: Any = None
    """The type of the body's field, for an option that is no scalar, list or record there."""
    flag: str = ""
    """Help text of the flag of `penstock submit` and `penstock chat`; empty if they have none."""
    help: str = ""
    """What the option means, for callers in Python; empty if the record's docstring says it."""


def option_of(record: type[BaseModel], name: str) -> Option:
    """Return the mark of a record's field."""
    return next((mark for mark in record.model_fields[name].metadata if isinstance(mark, Option)), _UNMARKED)


# Of one user, or of our own code and files.
@cache
def names_at(endpoint: Endpoint, record: type[BaseModel]) -> Mapping[str, str]:
    """Map the record's options to their names in bodies of an endpoint, without those that have none there."""
    found = ((name, option_of(record, name).named.get(endpoint, name)) for name in record.model_fields)
    return {name: there for name, there in found if there is not None}


_UNMARKED = Option()


# Records that arrive as JSON, and validators and marks for their fields.

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
        there: _field_of(record.model_fields[name], lenient, option_of(record, name))
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


def _field_of(field: FieldInfo, lenient: bool, option: Option) -> Any:
    if option.in_json is not None:
        return option.in_json, None
    kind, items = _bare(field.annotation)
    of_items, limit = tuple(_json_type(item, lenient) for item in items if item is not ...), max_items(field)
    if kind is tuple and lenient and option.one_is_enough:
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
