"""`penstock serve`: run Redis, a node and a gateway on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer

from penstock.cli.child_logs import end_in_words, log_prefix, log_variables, relay_of
from penstock.cli.demo_model import ON_HUB, PACKAGE, REMEDY, SAMPLING, SIZE_MB, default_model
from penstock.cli.keeper import ConnectionKeeper
from penstock.cli.kept_gateway import keep_gateway, on_hangup, start_gateway
from penstock.cli.loading_progress import LoadingProgress
from penstock.cli.option_words import show_all
from penstock.cli.options import Problems, options_of, taken_for, takes, words_of
from penstock.cli.output import write_line
from penstock.cli.peers import unread_variables
from penstock.cli.processes import (
    BackOff,
    ChildCommand,
    Event,
    ProcessDiedError,
    Say,
    Supervisor,
    first_ready,
    gateway_command,
    keep_child,
    node_command,
    run_until_stopped,
)
from penstock.cli.replicas import replica_commands
from penstock.cli.services import GATEWAY_FLAGS, NODE_FLAGS, check_node, missing_packages, node_replicas
from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.problems import joined
from penstock.gateway.settings import GatewaySettings, check_address
from penstock.gpu_node.settings import NodeSettings, pool_of_model
from penstock.runtime.cache_folders import state_folder
from penstock.runtime.embedded_redis import (
    DEFAULT_MAXMEMORY_MIB,
    EmbeddedRedis,
    default_data_folder,
    find_or_start_redis,
)
from penstock.runtime.local_redis import RunningRedis, leads_to, note_files, note_gateway
from penstock.runtime.logging import LogSettings, configure_logging
from penstock.runtime.settings import RedisSettings, without_password
from penstock.runtime.trusted_folders import UntrustedError, trusted_folder

# --- Redis as a part that is restarted

_POLL_INTERVAL_S = 0.1
_JOINED_POLL_INTERVAL_S = 1.0


async def keep_redis(server: EmbeddedRedis, say: Say) -> NoReturn:
    """Restart the embedded Redis at the same address whenever it ends or its socket is deleted."""
    back_off, started_s = BackOff(), time.monotonic()
    while True:
        while server.is_running:
            if not server.has_socket:
                say("redis ends, because its socket was deleted and no client reaches it")
                await asyncio.to_thread(server.end)
            await asyncio.sleep(_POLL_INTERVAL_S)
        pause_s = back_off.pause_s(time.monotonic() - started_s)
        words = end_in_words(server.status, [server.last_log_line()])
        say(f"redis ended with {words}; it starts again in {pause_s:g} s")
        if not server.keeps_jobs:
            say("redis kept its jobs only in memory: jobs without a waiting caller are lost, because of --ephemeral")
        await asyncio.sleep(pause_s)
        started_s = time.monotonic()
        try:
            await asyncio.to_thread(server.start_again)
        except (ConfigError, OSError) as error:
            say(f"redis does not start: {error}")
        else:
            say("redis serves again")


async def watch_joined_redis(joined: RunningRedis, say: Say) -> NoReturn:
    """Report when the Redis of another `penstock serve` ends, and when a later `penstock serve` runs one there again.

    It starts no Redis itself: the other command may come back, and its jobs may be in a folder that only it knows.
    """
    while True:
        await _until(joined, accepts=False)
        say(
            f"the Redis of {joined.owner} has ended, which this `penstock serve` joined; to go on, start another "
            "`penstock serve`, or stop this one and start it again"
        )
        await _until(joined, accepts=True)
        say("redis serves again")


async def _until(joined: RunningRedis, *, accepts: bool) -> None:
    while joined.accepts() != accepts:  # noqa: ASYNC110  polled: another command's process raises no event here
        await asyncio.sleep(_JOINED_POLL_INTERVAL_S)


# --- the command

_log = logging.getLogger(__package__)
GATEWAY_START_TIMEOUT_S = 60.0
PORT_TIMEOUT_S = 3.0
"""Seconds to wait for the port of an earlier `penstock serve` that is ending, such as one that was killed."""
_OF_NODE = tuple(name for name in NodeSettings.model_fields if name not in ("model", "redis_url"))
_OF_GATEWAY = tuple(name for name in GatewaySettings.model_fields if name not in ("redis_url", "keep_connections"))
_ONLY_OF_GATEWAY = tuple(name for name in _OF_GATEWAY if name not in _OF_NODE)
"""A setting of both has one option, which is for both."""
_SHORT_HELP = frozenset(
    (
        *("aliases", "lora", "max_model_len", "num_threads", "revision", "dtype", "quantization", "kv_cache_dtype"),
        *("runner", "tensor_parallel_size", "pipeline_parallel_size", "load_format", "generation_config", "replicas"),
        *(
            "kv_cache_gib",
            "scheduling_policy",
            "speculative",
            "max_num_seqs",
            "gpu_memory_utilization",
            "chat_template",
        ),
        *("host", "port", "unknown_fields", "max_tokens_beyond_context", "api_key"),
    )
)
"""The settings that `--help` shows. `--help-all` shows all of them."""


_NO_REDIS = "unix://unused"


def _problems(given: Mapping[str, Any], *, wait_s: float = 0.0) -> list[PenstockError]:
    """Return what is wrong with a command line, as far as that is known before anything starts.

    `wait_s`: seconds to wait for the port, if nothing else is wrong.
    """
    of_node, of_gateway = ({name: given[name] for name in names} for names in (_OF_NODE, _OF_GATEWAY))
    problems, is_demo = Problems(), given["model"] is None
    problems.of(_require_packages)
    if given["ephemeral"] and given["data_dir"] is not None:
        message = "ephemeral: --ephemeral keeps nothing in the folder of --data-dir; give one of them"
        problems.found.append(ConfigError(message, param="ephemeral"))
    problems.settings(LogSettings, {name: given[name] for name in LogSettings.model_fields})
    gateway = problems.settings(GatewaySettings, of_gateway)
    model = default_model() if is_demo else given["model"]
    node = problems.settings(NodeSettings, {**of_node, "model": model, "redis_url": _NO_REDIS})
    if node is not None:
        check_node(problems, node, reads_model=not is_demo)
    if gateway is not None:
        wait_s = 0.0 if problems.found else wait_s
        problems.of(lambda: asyncio.run(check_address(gateway.host, gateway.port, wait_s=wait_s)))
    return problems.found


@takes(
    *options_of(NodeSettings, _OF_NODE, flags=NODE_FLAGS, shown=_SHORT_HELP),
    *options_of(GatewaySettings, _ONLY_OF_GATEWAY, flags=GATEWAY_FLAGS, shown=_SHORT_HELP),
    *options_of(LogSettings),
    problems=_problems,
)
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            envvar="PENSTOCK_NODE_MODEL",
            help="Hugging Face id with optional :FILE.gguf and @revision, a folder, or a .gguf file. "
            "Default: the demo model.",
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="URL of the Redis to use. Default: $PENSTOCK_REDIS_URL, or a Redis of this command."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which that Redis keeps jobs across restarts. Default: "
            "$XDG_STATE_HOME/penstock/redis, or ~/.local/state/penstock/redis."
        ),
    ] = None,
    ephemeral: Annotated[
        bool,
        typer.Option("--ephemeral", help="Keep jobs only in memory, until this command ends, in a Redis for it alone."),
    ] = False,
    maxmemory_mib: Annotated[
        int, typer.Option(min=16, help="Memory limit of that Redis in MiB.")
    ] = DEFAULT_MAXMEMORY_MIB,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all options and exit.")
    ] = False,
    **given: Any,
) -> None:
    """Serve a model on this machine with one command: Redis, a node and a gateway.

    Clients and commands of this user find its Redis by themselves. It takes all options of `penstock node` and
    `penstock gateway`, and many names of vLLM, SGLang and llama.cpp; --help-all shows them. Each setting is also a
    variable: PENSTOCK_NODE_<NAME> or PENSTOCK_GATEWAY_<NAME>.

    Examples:
        penstock serve
        penstock serve ORG/MODEL:FILE.gguf --port 8080
        penstock serve model.gguf --kv-cache-dtype int8 --quantization int8
        penstock serve -m model.gguf -c 4096 -t 4
    """
    if problems := _problems(
        {**given, "model": model, "ephemeral": ephemeral, "data_dir": data_dir}, wait_s=PORT_TIMEOUT_S
    ):
        raise joined(problems)
    logs = LogSettings.load(**taken_for(LogSettings, given))
    of_node, of_gateway = ({name: given[name] for name in names} for names in (_OF_NODE, _OF_GATEWAY))
    if model is None:
        model = default_model()
        if _node_settings(model, of_node).generation_config == "auto":
            of_node["generation_config"] = SAMPLING
    gateway, settings = GatewaySettings.load(**of_gateway), _node_settings(model, of_node)
    replicas = node_replicas(settings)
    configure_logging(logs, prefix=log_prefix("serve"))
    for theirs, ours in unread_variables(os.environ).items():
        _log.warning("a variable of another server is not read", extra={"variable": theirs, "ours": ours})
    folders = {"data_dir": data_dir, "default_dir": None if ephemeral else default_data_folder()}
    with find_or_start_redis(redis_url, **folders, maxmemory_mib=maxmemory_mib, alone=ephemeral) as (url, server):
        kept_in = server.data_dir if isinstance(server, EmbeddedRedis) else data_dir
        if of_gateway["keys_seen_file"] is None:
            of_gateway["keys_seen_file"] = keys_seen_file(str(kept_in.resolve()) if kept_in else without_password(url))
        # Arguments are visible to all users of a machine, variables are not.
        secrets = {GatewaySettings.variable_of("api_key"): key} if (key := of_gateway.pop("api_key")) else {}
        words = (words_of(of_node, NODE_FLAGS), words_of(of_gateway, GATEWAY_FLAGS))
        _log_start(model, url, server)
        try:
            removed = server.own_folder if isinstance(server, EmbeddedRedis) else None
            with _files_folder(data_dir, removed, ephemeral=ephemeral) as files:
                of_model = node_command(model, url, arguments=words[0], drain_s=settings.drain_s)
                nodes = replica_commands(of_model, replicas)
                shared = {**secrets, "PENSTOCK_FILES_URL": files}
                runtime_dir = RedisSettings.load().runtime_dir
                if leads_to(runtime_dir, url):
                    note_files(runtime_dir, files)
                run_until_stopped(_serve(url, server, model, nodes, words[1], logs, shared, gateway))
        except ProcessDiedError as error:
            # The log above has the last lines of the process.
            is_download = model == ON_HUB and any(word in error.why for word in ("download", "hub"))
            hint = f"; instead of the download: {REMEDY}" if is_download else ""
            raise ProcessDiedError(f"{error.why}{hint}", error.why) from error
        finally:
            if isinstance(server, EmbeddedRedis) and not server.keeps_jobs and server.is_running:
                _say_what_ends(url)


@contextmanager
def _files_folder(data_dir: Path | None, removed: Path | None, *, ephemeral: bool) -> Iterator[str]:
    """Yield PENSTOCK_FILES_URL, or a folder for stored files: beside the jobs, or one that is removed at the end.

    removed: a folder that is removed even if this command is killed.
    """
    if given := os.environ.get("PENSTOCK_FILES_URL"):
        yield given
    elif ephemeral and removed is not None:
        yield str(removed / "files")
    elif ephemeral:
        with tempfile.TemporaryDirectory(prefix="penstock-files-") as folder:
            yield folder
    else:
        kept = (data_dir or state_folder()).resolve() / "files"
        try:
            trusted_folder(kept, remedy="choose another folder with --data-dir, or set PENSTOCK_FILES_URL")
        except UntrustedError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}", param="files_url") from error
        except OSError:
            # A server without files still answers. The storage names the reason to each caller that stores one.
            pass
        yield str(kept)


def _require_packages() -> None:
    if missing := [
        f"[{extra}] lacks {', '.join(names)}" for extra in ("cpu", "gateway") if (names := missing_packages(extra))
    ]:
        raise ConfigError(f"packages are missing: pip install 'penstock-llm[cpu,gateway]' ({'; '.join(missing)})")


def keys_seen_file(queue: str) -> Path:
    """Return the file in the state folder that notes that a queue has API keys. The queue is a folder or a URL."""
    name = hashlib.blake2b(queue.encode(), digest_size=8).hexdigest()
    return state_folder() / f"keys-seen-{name}"


def _node_settings(model: str, of_node: Mapping[str, Any]) -> NodeSettings:
    return NodeSettings.load(model=model, redis_url=_NO_REDIS, **of_node)


async def _serve(
    redis_url: str,
    server: EmbeddedRedis | RunningRedis | None,
    model: str,
    nodes: Sequence[ChildCommand],
    of_gateway: Sequence[str],
    logs: LogSettings,
    shared: Mapping[str, str],
    gateway: GatewaySettings,
) -> None:
    """Run the parts. `shared` has the environment variables of all parts."""
    async with Supervisor(relay_of(logs), {**log_variables(logs), **shared}) as supervisor:
        # Counted meanwhile, before the node has taken any of them.
        command = gateway_command(redis_url, arguments=of_gateway, drain_s=gateway.drain_s)
        keeper = await ConnectionKeeper.open(gateway.host, gateway.port)
        if keeper is not None:
            # Before the gateway is asked to end: connections must not wait for one that does not come.
            supervisor.before_stop.append(keeper.close)
            on_hangup(keeper.asked_to_leave.set)
        started = start_all(supervisor, redis_url, model, nodes, command, keeper)
        ready, waiting = await asyncio.gather(started, _waiting_jobs(server))
        if server is not None:
            note_gateway(RedisSettings.load().runtime_dir, redis_url, ready[1]["url"])
        _print_ready(*ready, redis_url, server, needs_key=gateway.api_key is not None)
        _say_what_waits(waiting, ready[0]["pool"])
        # A restarted gateway must use the same port, even if port 0 was requested, because callers know this one.
        port = str(urlsplit(ready[1]["url"]).port)
        command = replace(command, argv=(*command.argv, "--port", port))
        *children, door = supervisor.children
        async with asyncio.TaskGroup() as keepers:
            for child, of_node in zip(children, nodes, strict=True):
                keepers.create_task(keep_child(supervisor, child, of_node, _log.warning))
            keepers.create_task(keep_gateway(supervisor, door, command, keeper, _log.warning))
            if isinstance(server, EmbeddedRedis):
                keepers.create_task(keep_redis(server, _log.warning))
            elif server is not None:
                keepers.create_task(watch_joined_redis(server, _log.warning))


async def _open_jobs(redis_url: str) -> dict[str, int]:
    """Return the number of open jobs of each pool that has some."""
    # Imported late, so that the processes already start meanwhile.
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.pools import StatsBroker

    async with connect(redis_url) as redis:
        return {pool.pool: pool.num_open for pool in await StatsBroker(redis).all() if pool.num_open}


async def _waiting_jobs(server: EmbeddedRedis | RunningRedis | None) -> dict[str, int]:
    """Return the number of jobs of each pool that an earlier run left in the data folder."""
    if not isinstance(server, EmbeddedRedis) or not server.keeps_jobs:
        return {}
    try:
        return await _open_jobs(server.url)
    except PenstockError as error:
        _log.warning("the jobs of earlier runs cannot be counted", extra={"error": str(error)})
        return {}


def _say_what_waits(waiting: Mapping[str, int], served: str) -> None:
    """Log the jobs of an earlier run, by the model that they wait for."""
    for pool, num_open in waiting.items():
        facts = {"pool": pool, "num_open": num_open}
        if pool == served:
            _log.info("jobs of an earlier run go on", extra=facts)
        else:
            remedy = "a second `penstock serve MODEL --port PORT` runs them"
            _log.warning("jobs wait for a model that this command does not serve", extra={**facts, "remedy": remedy})


def _say_what_ends(redis_url: str) -> None:
    """Log how many jobs end with a queue in memory."""
    try:
        num_open = sum(asyncio.run(_open_jobs(redis_url)).values())
    except (PenstockError, OSError):
        return
    if num_open:
        _log.warning("open jobs end with this queue, which was only in memory", extra={"num_open": num_open})


async def start_all(
    supervisor: Supervisor,
    redis_url: str,
    model: str,
    nodes: Sequence[ChildCommand],
    gateway: ChildCommand,
    keeper: ConnectionKeeper | None = None,
) -> tuple[Event, Event]:
    """Start nodes and a gateway, show the progress, and return the ready events of the first ready node and of it."""
    progress = LoadingProgress(_log, pool_of_model(model))
    shown = replace(nodes[0], on_progress=progress.update)
    children = [await supervisor.start(command) for command in (shown, *nodes[1:])]
    # The gateway starts last and so stops first: no request arrives while the node returns its jobs to the queue.
    door = await start_gateway(supervisor, gateway, keeper)
    async with progress.shown():
        return await asyncio.gather(first_ready(children), door.ready(timeout_s=GATEWAY_START_TIMEOUT_S))


def _log_start(model: str, redis_url: str, server: EmbeddedRedis | RunningRedis | None) -> None:
    if isinstance(server, RunningRedis):
        _log.warning("joins the Redis of another penstock serve", extra=asdict(server))
    if model == ON_HUB:
        facts = {"size_mb": SIZE_MB, "package": PACKAGE}
        _log.info("the demo model's package is not installed; the model comes from the hub", extra=facts)
    _log.info("starting", extra={"model": model, "redis": without_password(redis_url)})


def _print_ready(
    node: Event, gateway: Event, redis_url: str, server: EmbeddedRedis | RunningRedis | None, *, needs_key: bool
) -> None:
    body = {"model": node["pool"], "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    data = shlex.quote(json.dumps(body))
    write_line(f"\nServing {node['pool']} at {gateway['url']}/v1   (page: {gateway['url']}/)")
    shared = (
        f"   (of {server.owner}: its models and jobs are shown here too)" if isinstance(server, RunningRedis) else ""
    )
    write_line(f"Redis: {without_password(redis_url)}{shared}\n")
    key = '-H "Authorization: Bearer $KEY" ' if needs_key else ""
    write_line(f"  curl -N {gateway['url']}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {data}")
    if server is not None:
        # Another `penstock serve` has the address at which commands look: this one is reached by its URL.
        is_found = leads_to(RedisSettings.load().runtime_dir, redis_url)
        write_line(f"  {'' if is_found else f'PENSTOCK_REDIS_URL={redis_url} '}penstock submit 'Hello!'")
    write_line()
