"""`penstock node` and `penstock gateway`: run a node or an HTTP gateway in this process."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from penstock.cli.demo_model import SAMPLING, default_model, is_demo
from penstock.cli.keeper_upgrade import CHECK_VARIABLE, say_version
from penstock.cli.kept_gateway import run_kept_gateway
from penstock.cli.options import Problems, docstrings_of, options_of, taken_for, takes, words_of
from penstock.cli.output import exit_code_of
from penstock.cli.processes import gateway_command, node_command
from penstock.cli.replicas import Replica, replicas_of, run_replicas
from penstock.contract.errors import ConfigError, ConflictError, PenstockError
from penstock.contract.problems import joined
from penstock.contract.tenant import MIN_SAFE_CHARS, UNLIMITED, Scope, given_keys
from penstock.gateway.settings import GatewaySettings, given_records
from penstock.gpu_node.gpus import this_machine, version_of
from penstock.gpu_node.settings import VLLM_NAME_BY_NAME, NodeSettings, check_model, engine_config
from penstock.runtime import event_loop
from penstock.runtime.kept_sockets import Inherited
from penstock.runtime.logging import LogSettings, configure_logging
from penstock.runtime.process_memory import no_collection
from penstock.runtime.redis_source import tell_redis_source
from penstock.runtime.settings import KeySettings, pool_urls, redis_url_of

_log = logging.getLogger(__package__)

_FIELDS = NodeSettings.model_fields
_MODEL_HELP = docstrings_of(NodeSettings).get("model")
NODE_FLAGS = {"aliases": ("--alias", "--served-model-name"), "lora": ("--lora", "--lora-modules")} | {
    ours: (f"--{ours.replace('_', '-')}", f"--{theirs.replace('_', '-')}") for ours, theirs in VLLM_NAME_BY_NAME.items()
}
"""Flags of settings that also have vLLM's name, or whose flag differs from the setting's name."""


_NEEDS_GPU = {
    "gpu_memory_utilization": "needs a GPU; on the CPU, --kv-cache-gib sizes the KV cache",
    "cpu_offload_gib": "needs a GPU; on the CPU, all weights are in host memory already",
}


def node_replicas(node: NodeSettings) -> tuple[Replica, ...]:
    """Return the replicas that a node's settings ask for, as `replicas_of` does."""
    return replicas_of(node, ranks=node.tensor_parallel_size * node.pipeline_parallel_size)


def check_node(problems: Problems, node: NodeSettings, *, reads_model: bool) -> None:
    """Note what is wrong with a node's settings and with its model, as far as it is known before anything starts."""
    problems.of(lambda: _require_gpu(node))
    problems.of(lambda: node_replicas(node))
    if (config := problems.of(lambda: engine_config(node))) is not None:
        problems.of(lambda: _require_adapters(config.lora))
        if reads_model:
            problems.of(lambda: check_model(node))


def _require_gpu(node: NodeSettings) -> None:
    of_gpu = next((name for name in _NEEDS_GPU if getattr(node, name)), None)
    if of_gpu is not None and not node.wants_gpu and (node.runner != "auto" or not this_machine().gpus):
        raise ConfigError(f"{of_gpu}: {_NEEDS_GPU[of_gpu]}", param=of_gpu)


def _require_adapters(adapters: Mapping[str, Path]) -> None:
    for name, folder in adapters.items():
        if not folder.expanduser().is_dir():
            raise ConfigError(f"lora: adapter {name}: there is no folder {folder}", param="lora")


def _node_problems(given: Mapping[str, Any]) -> list[PenstockError]:
    problems, model = Problems(), given["model"] or os.environ.get("PENSTOCK_NODE_MODEL")
    problems.settings(LogSettings, {name: given[name] for name in LogSettings.model_fields})
    named = {"redis_url": given["redis_url"] or "unix://unused", "model": default_model() if model == "demo" else model}
    of_node = {name: value for name, value in given.items() if name in NodeSettings.model_fields}
    node = problems.settings(NodeSettings, of_node | named)
    if node is not None:
        # A supervisor has read the model.
        check_node(problems, node, reads_model=os.environ.get("PENSTOCK_NODE_PROGRESS") != "json")
    return problems.found


@takes(
    *options_of(NodeSettings, [name for name in _FIELDS if name != "model"], flags=NODE_FLAGS),
    *options_of(LogSettings),
    problems=_node_problems,
)
def node(model: Annotated[str | None, typer.Argument(help=_MODEL_HELP)] = None, **given: Any) -> None:
    """Load a model and run jobs of its pool until SIGTERM. Unfinished jobs then return to the queue.

    Each option can also be set with the environment variable PENSTOCK_NODE_<NAME>, and the Redis with
    PENSTOCK_REDIS_URL.

    Examples:
        penstock node ORG/MODEL --redis-url redis://localhost
        penstock node model.gguf --kv-cache-dtype int8 --alias small
        penstock node ORG/MODEL --replicas auto
        penstock node demo
    """
    if problems := _node_problems({**given, "model": model}):
        raise joined(problems)
    logs = LogSettings.load(**taken_for(LogSettings, given))
    settings = NodeSettings.load(**given | {"model": model, "redis_url": redis_url_of(given["redis_url"])})
    if is_demo(settings.model):
        if settings.generation_config == "auto":
            given["generation_config"] = SAMPLING
        settings = NodeSettings.load(**given | {"model": default_model(), "redis_url": settings.redis_url})
    if given["redis_url"] is None and (of_pool := pool_urls().get(settings.pool_name)) is not None:
        settings = settings.model_copy(update={"redis_url": of_pool})
    configure_logging(logs)
    tell_redis_source(settings.redis_url, "node")
    if replicas := node_replicas(settings):
        # The URL may be a secret, so it is no argument.
        arguments = words_of({name: value for name, value in given.items() if name != "redis_url"}, NODE_FLAGS)
        command = node_command(settings.model, settings.redis_url, arguments=arguments, drain_s=settings.drain_s)
        run_replicas(settings, command, replicas, logs)
        return
    try:
        with no_collection():
            from penstock.gpu_node.process import exiting_despite_threads, run_node
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock-llm[cpu]', or [gpu]") from error

    with exiting_despite_threads(exit_code_of):
        event_loop.run(run_node(settings))


def missing_packages(extra: str) -> list[str]:
    """Return the names of the packages in `missing_requirements`."""
    return [_name_in(line) for line in missing_requirements(extra)]


def missing_requirements(extra: str) -> list[str]:
    """Return the packages of one of penstock's extras, and of the extras in it, that this machine needs and lacks.

    Each has its bounds, as pip takes them.
    """
    marker = re.compile(rf"extra\s*==\s*['\"]{extra}['\"]")
    machine = re.compile(r"platform_machine\s*==\s*['\"](\w+)['\"]")
    found: list[str] = []
    for line in importlib.metadata.requires("penstock-llm") or []:
        wanted = machine.search(line)
        if marker.search(line) is None or (wanted is not None and wanted[1] != platform.machine()):
            continue
        if (inner := re.match(r"penstock-llm\[([\w,]+)\]", line)) is not None:
            found += [one for part in inner[1].split(",") for one in missing_requirements(part) if one not in found]
        elif version_of(_name_in(line)) is None:
            found.append(line.partition(";")[0].strip())
    return found


def _name_in(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


GATEWAY_FLAGS = {
    "cors_origins": ("--cors-origin",),
    "allowed_hosts": ("--allowed-host",),
    "webhook_allowed_networks": ("--webhook-allowed-network",),
}
"""Flags of settings whose flag differs from the setting's name."""


def _gateway_problems(given: Mapping[str, Any]) -> list[PenstockError]:
    problems = Problems()
    for kind in (LogSettings, GatewaySettings):
        problems.settings(kind, {name: given[name] for name in kind.model_fields})
    return problems.found


@takes(*options_of(GatewaySettings, flags=GATEWAY_FLAGS), *options_of(LogSettings), problems=_gateway_problems)
def gateway(**given: Any) -> None:
    """Serve the OpenAI API for the pools of a Redis, and of those that PENSTOCK_POOLS names.

    Each option can also be set with the environment variable PENSTOCK_GATEWAY_<NAME>, and the Redis with
    PENSTOCK_REDIS_URL.

    Examples:
        penstock gateway --redis-url redis://localhost --host 0.0.0.0 --port 8000
    """
    inherited = Inherited.of_environment()
    try:
        with no_collection():
            from penstock.gateway.app import run
            from penstock.gateway.kept.standby import may_start
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock-llm[gateway]'") from error

    if inherited is not None and not may_start(inherited):
        return

    if problems := _gateway_problems(given):
        raise joined(problems)
    logs = LogSettings.load(**taken_for(LogSettings, given))
    url = redis_url_of(given["redis_url"])
    settings = GatewaySettings.load(**given | {"redis_url": url})
    configure_logging(logs)
    if settings.keep_connections and inherited is None:
        if os.environ.get(CHECK_VARIABLE):
            say_version()
            return
        # Arguments are visible to all users of a machine, variables are not.
        words = words_of(
            {name: value for name, value in given.items() if name not in ("redis_url", "api_key")}, GATEWAY_FLAGS
        )
        command = gateway_command(url, arguments=words, drain_s=settings.drain_s)
        if given["api_key"] is not None:
            command = replace(command, env={**command.env, GatewaySettings.variable_of("api_key"): given["api_key"]})
        run_kept_gateway(command, settings, logs)
        return
    if settings.first_key_file is not None:
        _make_first_key(url, settings.first_key_file)
    if settings.api_key is not None:
        _store_given_keys(url, settings)
    run(settings)


def _store_given_keys(redis_url: str, settings: GatewaySettings) -> None:
    """Store the records of the keys that an operator brings, so that `penstock keys` and batches know them."""
    records = given_records(settings, KeySettings.load().key_pepper)
    if any(len(key) < MIN_SAFE_CHARS for key in given_keys(settings.api_key or "")):
        _log.warning("a given API key is short enough to be guessed", extra={"min_chars": MIN_SAFE_CHARS})

    async def store() -> None:
        from penstock.queue.broker.connection import connect
        from penstock.queue.tenants.key_store import KeyStore

        async with connect(redis_url) as redis:
            for record in records.values():
                await KeyStore(redis).add_given(record)

    try:
        asyncio.run(store())
    except ConflictError as error:
        raise ConfigError(f"api_key: {error.message}", param="api_key") from error
    _log.info("requests need one of the given API keys", extra={"key_ids": sorted(records)})


def _make_first_key(redis_url: str, path: Path) -> None:
    """Make a key with all scopes if there is none, and write it to a file that only this user can read."""
    try:
        key = asyncio.run(_first_key(redis_url))
        if key is not None:
            with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                file.write(f"{key}\n")
            _log.warning("made a first API key", extra={"file": str(path)})
    except (PenstockError, OSError) as error:
        _log.warning("cannot make a first API key", extra={"reason": str(error)})


async def _first_key(redis_url: str) -> str | None:
    """Return a new key, or None if there are keys already."""
    from penstock.queue.broker.connection import connect
    from penstock.queue.tenants.key_store import KeyStore

    async with connect(redis_url) as redis:
        store = KeyStore(redis)
        if await store.all():
            return None
        key, _ = await store.add("default", get_args(Scope), UNLIMITED, pepper=KeySettings.load().key_pepper)
        return key
