"""From a caller's arguments to a `Job`, with errors that name the argument at fault and its limit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import uuid_utils
from pydantic import ValidationError

from penstock.contract.errors import NotFoundError, RequestError, UnavailableError
from penstock.contract.job import Job, Message, SamplingParams
from penstock.contract.wire import PoolRecord

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any] | Message]

_ARGUMENT_OF = {"id": "job_id", "prompt_token_ids": "prompt", "deadline_ms": "deadline_s"}
"""Fields of a job that callers know by another name."""


def choose_pool(records: Iterable[PoolRecord], model: str | None) -> PoolRecord:
    """The pool that serves `model` (one of its shards by lot); without a model, the only one there is."""
    served = list(records)
    if not served:
        raise UnavailableError("no model is served at the moment", code="no_node")
    names = ", ".join(sorted({record.model for record in served}))
    if model is None:
        if len({record.model for record in served}) > 1:
            raise RequestError(f"model must be named: {names} are served", param="model")
        return random.choice(served)
    matching = [r for r in served if model in (r.pool, r.model, *r.aliases)]
    if not matching:
        raise NotFoundError(f"model {model!r} is not served; served: {names}", code="model_not_found", param="model")
    return random.choice(matching)


def mint_job_id(pool: str) -> str:
    """A fresh public id of a job in `pool`."""
    return f"{pool}.{uuid_utils.uuid7()}"


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """The field of a job that a prompt belongs in: text, token ids or messages."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise RequestError("prompt must be text, a sequence of token ids or a sequence of messages", param="prompt")
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], (Mapping, Message)):
        return {"messages": tuple(prompt)}
    return {"prompt_token_ids": tuple(prompt)}


def sampling_params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    """The given params, or those that the keyword arguments describe."""
    if params is None:
        try:
            return SamplingParams(**sampling)
        except ValidationError as error:
            raise request_error(error) from error
    if sampling:
        name = next(iter(sampling))
        raise RequestError(f"{name}: give sampling as params or as keyword arguments, not both", param=name)
    return params


def build_job(**fields: Any) -> Job:
    """A checked job; raises RequestError naming the argument at fault."""
    try:
        return Job(**fields)
    except ValidationError as error:
        raise request_error(error) from error


def request_error(error: ValidationError) -> RequestError:
    """The first thing that pydantic found wrong, under the name the caller gave it."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if path:
        path[0] = _ARGUMENT_OF.get(path[0], path[0])
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown parameter: {param}", code="unknown_parameter", param=param)
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{param}: {message}" if param else message, param=param)
