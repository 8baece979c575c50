"""Signatures for `help`: methods that take `SubmitOptions` list each option and its default instead of `**options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.contract.job import Job, SamplingParams
from penstock.producer.client.request import SubmitOptions

AnyMethod = TypeVar("AnyMethod", bound=Callable[..., Any])

_DEFAULTS = {"channel": False, "tool_choice": "auto", "parallel_tool_calls": True}
"""Defaults of options that are fields of neither `Job` nor `SamplingParams`; None for all others of that kind."""


def with_options(method: AnyMethod) -> AnyMethod:
    """Give a method that ends with `**options: Unpack[SubmitOptions]` a signature that lists them."""
    signature = inspect.signature(method)
    named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    method.__signature__ = signature.replace(parameters=[*named, *_options()])  # type: ignore[attr-defined]
    return method


def _options() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(name), annotation=_Shown(kind))
        for name, kind in SubmitOptions.__annotations__.items()
    ]


def _default(name: str) -> Any:
    for record in (SamplingParams, Job):
        if name in record.model_fields:
            return record.model_fields[name].get_default()
    return _DEFAULTS.get(name)


class _Shown:
    """An annotation shown as it is written in the source; `inspect` would quote a string."""

    def __init__(self, kind: Any) -> None:
        self._text = getattr(kind, "__forward_arg__", kind)

    def __repr__(self) -> str:
        return str(self._text)
