"""A node as a process: it loads the model, serves until a signal, and reports its progress to a supervisor."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from penstock.contract.errors import ConfigError, PenstockError
from penstock.gpu_node.engine.opening import open_engine
from penstock.gpu_node.engine.shared_cores import Gate, SharedCores
from penstock.gpu_node.engine.worker import EngineLike
from penstock.gpu_node.node import Node
from penstock.gpu_node.service.health import EngineStalledError
from penstock.gpu_node.service.seats import Seats, declare_dead_before_loading, take_seats
from penstock.gpu_node.settings import NodeSettings, engine_config
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import config_of_pool
from penstock.runtime.event_loop import cancel_until_done
from penstock.runtime.file_descriptors import DescriptorWatch
from penstock.runtime.logging import LOADING_STAGES, ProgressLog, tell_crash, tell_end
from penstock.runtime.loop_watch import LoopWatch
from penstock.runtime.process_memory import freeze_gc, make_collections_rare
from penstock.runtime.service_manager import ServiceManager
from penstock.runtime.stack_dump import offer_stacks
from penstock.runtime.stall_guard import StallGuard

log = logging.getLogger(__package__)


THREAD_PATIENCE_S = 1.0
"""How long a running step may take to finish."""


@contextmanager
def exiting_despite_threads(exit_code_of: Callable[[PenstockError], int]) -> Iterator[None]:
    """End the process after the block, without cleanup, if a thread that the block started is still running.

    Python frees memory at its exit, but a thread inside a library may go on writing to it. The process then died with
    status 139 (SIGSEGV). If all threads have ended, the block ends normally.

    `exit_code_of`: exit status of an error reported in one line.
    """
    before = set(threading.enumerate())
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        # After an error, idle pool threads cannot be told from hung ones, so any living thread counts.
        if _are_running(before, daemons_only=error is None):
            _end(_report_end(error, exit_code_of))


def _are_running(before: set[threading.Thread], *, daemons_only: bool) -> bool:
    """Return whether threads other than those of `before` still run after a short wait for daemon threads.

    It looks again and again instead of joining: a thread that is being started is listed, but cannot be joined.
    """
    deadline_s = time.monotonic() + THREAD_PATIENCE_S
    while True:
        running = set(threading.enumerate()) - before
        daemons = {thread for thread in running if thread.daemon}
        if not daemons or time.monotonic() >= deadline_s:
            return bool(daemons if daemons_only else running)
        time.sleep(0.005)


def _report_end(error: BaseException | None, exit_code_of: Callable[[PenstockError], int]) -> int:
    """Report an error as the command line would, and return the exit status."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, PenstockError):
        tell_end(error.reason)
        return exit_code_of(error)
    tell_crash(error)
    return 1


def _end(status: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


async def run_node(settings: NodeSettings) -> None:
    """Load the model and serve until SIGTERM or SIGINT, then drain and return. A second signal ends the grace period.

    Raises ConfigError for settings that contradict each other and for models that cannot run.
    """
    _require_free_port(settings)
    settings = await _with_config_of_pool(settings)
    config = engine_config(settings)
    seats = take_seats(settings)
    beside = [asyncio.create_task(declare_dead_before_loading(settings, seats))]
    report = _report_progress
    if not _has_supervisor():
        progress = ProgressLog(log, settings.model)
        beside.append(asyncio.create_task(progress.run()))
        report = progress.update
    manager = ServiceManager.of_environment()

    def tell(stage: str, fraction: float) -> None:
        report(stage, fraction)
        manager.status(f"{LOADING_STAGES.get(stage, 'loading')}: {fraction:.0%}")

    try:
        engine = await asyncio.to_thread(open_engine, config, tell)
    finally:
        await cancel_until_done(beside)
    freeze_gc()
    make_collections_rare()
    # The node takes as many sequences as the engine runs.
    settings = settings.model_copy(update={"max_num_seqs": engine.max_num_seqs})
    gate = None if config.wants_gpu else SharedCores.join(config.background_share)
    await serve_engine(settings, engine, seats, measures_steps=engine.texts is None, gate=gate)


def _require_free_port(settings: NodeSettings) -> None:
    """Raise ConfigError if the metrics cannot be served, so that this is known before the model is loaded."""
    host, port = settings.metrics_host, settings.metrics_port
    if not port:
        return
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        # Python adds the address in brackets.
        why = str(error.strerror).partition(" (")[0]
        raise ConfigError(f"metrics_port {port} on {host}: {why}", param="metrics_port") from None


async def _with_config_of_pool(settings: NodeSettings) -> NodeSettings:
    """Return the settings with those of the pool's live nodes in place of defaults.

    Raises ConfigError if Redis rejects the credentials or the user, so that this is known before the model is loaded.
    """
    try:
        async with connect(settings.redis_url) as redis:
            config = await config_of_pool(redis, settings.pool_name)
    except ConfigError:
        raise
    except PenstockError as error:
        # If the pool has another config, joining it says so.
        log.warning("the pool's config cannot be read", extra={"reason": error.reason})
        return settings
    taken = settings.with_config(config)
    changed = {name: value for name, value in taken.pool_config.items() if settings.pool_config[name] != value}
    if changed:
        log.info("settings are those of the pool", extra=changed)
    return taken


async def serve_engine(
    settings: NodeSettings,
    engine: EngineLike,
    seats: Seats | None = None,
    *,
    measures_steps: bool = False,
    gate: Gate | None = None,
) -> None:
    """Serve a loaded engine until a signal. `seats`: seats that this process already holds; None: take them here.

    `measures_steps`: run a few steps at the start, so that the pool knows this node's pace. `gate`: lets background
    work wait for other nodes of this host.
    """
    node = Node(settings, engine, take_seats(settings) if seats is None else seats, gate)
    loop = asyncio.get_running_loop()
    manager = ServiceManager.of_environment()
    offer_stacks()

    def stop() -> None:
        manager.stopping()
        node.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    ready, guard = asyncio.Event(), StallGuard(settings.loop_stall_s)

    async def announce() -> None:
        await ready.wait()
        guard.start()  # Not before: loading and compiling may take long.
        _report({"event": "ready", "pool": settings.pool_name})
        manager.ready(f"serves pool {settings.pool_name}")
        if measures_steps:
            await node.measure_steps()

    async def feed_watchdog() -> None:
        await ready.wait()
        await manager.feed(lambda: node.engine_advances)

    beside = [asyncio.create_task(announce()), asyncio.create_task(feed_watchdog())]
    watch = LoopWatch(interval_s=settings.loop_watch_ms / 1000, names_holders=settings.loop_debug)
    watch.start()
    descriptors = DescriptorWatch()
    descriptors.start()
    try:
        with _metrics_of(node, settings, watch):
            await node.run(ready)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        is_known = isinstance(error, (EngineStalledError, ConfigError))
        log.error("the node stops", extra={"reason": str(error)}, exc_info=None if is_known else error)
        raise error from None
    finally:
        guard.stop()
        watch.stop()
        descriptors.stop()
        for task in beside:
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _metrics_of(node: Node, settings: NodeSettings, watch: LoopWatch) -> AbstractContextManager[object]:
    if settings.metrics_port is None:
        return nullcontext()
    # Imported here, because a node without metrics does not need the Prometheus package.
    from penstock.gpu_node.monitor.metrics import serving_metrics

    return serving_metrics(node, settings, watch)


def _report_progress(stage: str, fraction: float) -> None:
    _report({"event": "progress", "stage": stage, "fraction": round(fraction, 3)})


def _report(event: dict[str, object]) -> None:
    """Write one JSON line for a supervisor, if there is one."""
    if _has_supervisor():
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def _has_supervisor() -> bool:
    """Return whether a supervisor started this process and shows its progress."""
    return os.environ.get("PENSTOCK_NODE_PROGRESS") == "json"
