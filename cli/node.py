"""`penstock node`: run a node with one model in this process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.exit_codes import exit_code_of
from penstock.cli.help_texts import docstrings_of
from penstock.cli.options import options_of, taken_for, takes
from penstock.contract.errors import ConfigError
from penstock.gpu_node.settings import VLLM_NAME_BY_NAME, NodeSettings
from penstock.runtime import event_loop
from penstock.runtime.logging import LogSettings, configure_logging
from penstock.runtime.settings import redis_url_of

_FIELDS = NodeSettings.model_fields
_MODEL_HELP = docstrings_of(NodeSettings).get("model")
NODE_FLAGS = {"aliases": ("--alias", "--served-model-name"), "lora": ("--lora", "--lora-modules")} | {
    ours: (f"--{ours.replace('_', '-')}", f"--{theirs.replace('_', '-')}") for ours, theirs in VLLM_NAME_BY_NAME.items()
}
"""Flags of settings that also have vLLM's name, or whose flag differs from the setting's name."""


@takes(
    *options_of(NodeSettings, [name for name in _FIELDS if name != "model"], flags=NODE_FLAGS), *options_of(LogSettings)
)
def node(model: Annotated[str | None, typer.Argument(help=_MODEL_HELP)] = None, **given: Any) -> None:
    """Load a model and run jobs of its pool until SIGTERM. Unfinished jobs then return to the queue.

    Each option can also be set with the environment variable PENSTOCK_NODE_<NAME>, and the Redis with
    PENSTOCK_REDIS_URL.

    Examples:
        penstock node ORG/MODEL --redis-url redis://localhost
        penstock node model.gguf --kv-cache-dtype int8 --alias small
    """
    try:
        from penstock.gpu_node.process import exiting_despite_threads, run_node
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock[node]'") from error

    logs = LogSettings.load(**taken_for(LogSettings, given))
    settings = NodeSettings.load(**given | {"model": model, "redis_url": redis_url_of(given["redis_url"])})
    configure_logging(logs)
    with exiting_despite_threads(exit_code_of):
        event_loop.run(run_node(settings))
