"""Signatures for `help`: methods that take `SubmitOptions` list each option and its default instead of `**options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.contract.job import JobDef, SamplingParams, SubmitOptions

AnyMethod = TypeVar("AnyMethod", bound=Callable[..., Any])

_DEFAULTS = {"tool_choice": "auto", "parallel_tool_calls": True, "hides_models": False}
"""Defaults of options that are fields of neither `JobDef` nor `SamplingParams`; None for all others of that kind."""


def with_options(options: type = SubmitOptions, **defaults: Any) -> Callable[[AnyMethod], AnyMethod]:
    """Give a method that ends with `**options: Unpack[options]` a signature that lists them.

    `defaults` differ from those of `submit`.
    """

    def listed(method: AnyMethod) -> AnyMethod:
        signature = inspect.signature(method)
        named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*named, *_parameters(options, defaults)]
        method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return listed


def _parameters(options: type, defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, _default(name)), annotation=_Shown(kind)
        )
        for name, kind in options.__annotations__.items()
    ]


def _default(name: str) -> Any:
    for record in (SamplingParams, JobDef):
        if name in record.model_fields:
            return record.model_fields[name].get_default()
    return _DEFAULTS.get(name)


class _Shown:
    """An annotation shown as it is written in the source; `inspect` would quote a string."""

    def __init__(self, kind: Any) -> None:
        self._text = getattr(kind, "__forward_arg__", kind)

    def __repr__(self) -> str:
        return str(self._text)
