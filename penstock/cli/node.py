"""`penstock node`: a worker that runs one model, in this process."""

from __future__ import annotations

import asyncio
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from penstock.contract.errors import ConfigError
from penstock.contract.logs import configure_logging
from penstock.contract.settings import redis_url_of
from penstock.gpu_node.settings import POOL_WIDE, VLLM_NAMES, NodeSettings

_FLAGS = {"aliases": ("--alias",)} | {
    ours: (f"--{ours.replace('_', '-')}", f"--{theirs.replace('_', '-')}") for ours, theirs in VLLM_NAMES.items()
}
"""Of settings whose flag is not called as they are, or has two names."""
_KIND = Parameter.KEYWORD_ONLY


def node(**given: Any) -> None:
    """Load a model and work for its pool until SIGTERM, which gives unfinished jobs back.

    Each option is a setting, also read from PENSTOCK_NODE_<NAME>; the Redis from PENSTOCK_REDIS_URL.
    """
    try:
        from penstock.gpu_node.process import run_node
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[node]'") from error

    settings = NodeSettings.load(**given | {"redis_url": redis_url_of(given["redis_url"])})
    configure_logging()
    asyncio.run(run_node(settings))


def _parameter(name: str, field: FieldInfo) -> Parameter:
    """A setting as the command takes it: None where it is not given, so that the environment is asked."""
    if name == "model":
        return Parameter(name, _KIND, default=None, annotation=Annotated[str | None, typer.Argument(help=_help(field))])
    kind: Any = list[str] if name in ("aliases", "lora") else field.annotation
    panel = "The pool's, the same for all its nodes" if name in POOL_WIDE else None
    option = typer.Option(*_FLAGS.get(name, ()), help=_help(field), rich_help_panel=panel)
    return Parameter(name, _KIND, default=None, annotation=Annotated[kind | None, option])


def _help(field: FieldInfo) -> str:
    has_default = not field.is_required() and field.default_factory is None and field.default not in (None, ())
    return f"{field.description} Default: {field.default}." if has_default else str(field.description)


node.__signature__ = Signature(  # type: ignore[attr-defined]
    [_parameter(name, field) for name, field in NodeSettings.model_fields.items()]
)
