"""The replicas of a node: a process for each GPU, or for each share of this machine's CPUs.

All that they share of the machine is divided before any of them starts. Each is started again alone when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.cli.child_logs import log_variables, relay_of
from penstock.cli.processes import ChildCommand, Event, Supervisor, first_ready, keep_child, run_until_stopped
from penstock.contract.errors import ConfigError
from penstock.gpu_node.gpus import VISIBLE, GpuDevice, devices_here, gpu_problems, this_machine
from penstock.gpu_node.settings import DEFAULT_KV_CACHE_GIB, MAX_REPLICAS, NodeSettings, replica_name
from penstock.kernels.cpu.probe import available_bytes, cpu_shares
from penstock.runtime.event_loop import cancel_until_done
from penstock.runtime.logging import LogSettings, ProgressLog

_log = logging.getLogger(__package__)

_GIB = 1 << 30
_SWAP_GIB = 4.0
"""The most swap space that a GPU's node takes by default, and the share of the free memory that it leaves at least."""
_SWAP_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Replica:
    """What one replica has of its own."""

    number: int
    arguments: tuple[str, ...]
    """Flags of `penstock node` that come after those of all replicas, and so replace them."""
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    """The CPUs that it stays on; empty: all."""


def replicas_of(settings: NodeSettings, *, ranks: int = 1) -> tuple[Replica, ...]:
    """Return the replicas that a node's settings ask for; none if it is one node, without a supervisor.

    `ranks`: processes of one replica that compute, each on a GPU or on threads of its own. Raises ConfigError, which
    names the setting, if this machine has not as many GPUs, cores or bytes.
    """
    if settings.replicas == "1":
        return ()
    devices = _devices_for(settings)
    most = len(devices) // ranks if devices else 1
    count = most if settings.replicas == "auto" else int(settings.replicas)
    if count > MAX_REPLICAS:
        raise ConfigError(
            f"replicas {count}: at most {MAX_REPLICAS} nodes of a host can be told apart", param="replicas"
        )
    if devices and not 1 <= count <= most:
        need = "" if ranks == 1 else f", of which each replica needs {ranks}"
        raise ConfigError(f"replicas {settings.replicas}: {len(devices)} GPUs are visible{need}", param="replicas")
    if count == 1:
        return ()
    if settings.remote_ranks:
        reason = "ranks of other hosts could not tell the replicas apart; start each node by itself"
        raise ConfigError(
            f"replicas {settings.replicas} with remote_ranks {settings.remote_ranks}: {reason}", param="replicas"
        )
    own = list(_on_gpus(settings, devices, count, ranks) if devices else _on_cpus(settings, count, ranks))
    return tuple(replace(one, arguments=(*_identity(settings, one.number), *one.arguments)) for one in own)


def _devices_for(settings: NodeSettings) -> tuple[GpuDevice, ...]:
    """Return the GPUs of the replicas; none if they compute on the CPU."""
    if settings.gpu_number is not None:
        reason = f"runner cuda:{settings.gpu_number} is one GPU; give cuda, and choose GPUs by {VISIBLE}"
        raise ConfigError(f"replicas {settings.replicas}: {reason}", param="replicas")
    if settings.runner == "auto":
        machine = this_machine()
        return devices_here() if machine.gpus and not any(gpu_problems(machine)) else ()
    if not settings.wants_gpu:
        return ()
    if not (devices := devices_here()):
        raise ConfigError(f"runner gpu: no GPU is visible (nvidia-smi -L, {VISIBLE})", param="runner")
    return devices


def _identity(settings: NodeSettings, number: int) -> Iterator[str]:
    yield from ("--replicas", "1", "--name", replica_name(settings.name, number))
    if settings.metrics_port:
        port = settings.metrics_port + number
        if port > 65535:
            raise ConfigError(
                f"metrics_port {settings.metrics_port}: replica {number} would need {port}", param="metrics_port"
            )
        yield from ("--metrics-port", str(port))


def _on_gpus(settings: NodeSettings, devices: Sequence[GpuDevice], count: int, ranks: int) -> Iterator[Replica]:
    memory: tuple[str, ...] = ()
    free_gib = available_bytes() / _GIB * _SWAP_SHARE / count
    no_size = (settings.kv_cache_gib, settings.num_kv_blocks, settings.swap_space_gib, settings.num_swap_blocks)
    if no_size == (None,) * 4 and free_gib < _SWAP_GIB:
        # Each would take its share of what is free before the others took theirs.
        memory = ("--swap-space-gib", f"{free_gib:.3g}")
    for number in range(count):
        own = devices[number * ranks : (number + 1) * ranks]
        visible = ",".join(device.token for device in own)
        yield Replica(number, ("--runner", "gpu", *memory), {VISIBLE: visible})


def _on_cpus(settings: NodeSettings, count: int, ranks: int) -> Iterator[Replica]:
    try:
        shares = cpu_shares(count, reserved=settings.reserved_cores)
    except ValueError as error:
        raise ConfigError(f"replicas: {error}", param="replicas") from None
    least = min(share.num_threads for share in shares)
    if settings.num_threads is not None and least < settings.num_threads:
        reason = f"each of {count} replicas has {least} of this machine's cores"
        raise ConfigError(f"num_threads {settings.num_threads}: {reason}", param="num_threads")
    if ranks > (threads := settings.num_threads or least):
        reason = f"its {ranks} ranks need a thread each, and one of {count} replicas has {threads}"
        raise ConfigError(f"replicas {settings.replicas}: {reason}", param="replicas")
    memory = _kv_memory(settings, count)
    runner = ("--runner", "cpu") if settings.runner == "auto" else ()
    for number, share in enumerate(shares):
        own = ("--num-threads", str(settings.num_threads or share.num_threads), "--reserved-cores", "0")
        yield Replica(number, (*runner, *own, *memory), cpus=share.cpus)


def _kv_memory(settings: NodeSettings, count: int) -> tuple[str, ...]:
    """Return the flag for a replica's part of the default KV cache. Sizes that are set hold for each replica."""
    if settings.num_kv_blocks is not None:
        return ()
    each_gib = settings.kv_cache_gib or DEFAULT_KV_CACHE_GIB / count
    wanted_gib, free_gib = count * (each_gib + (settings.swap_space_gib or 0.0)), available_bytes() / _GIB
    if free_gib and wanted_gib > free_gib:
        name = "kv_cache_gib" if settings.kv_cache_gib else "replicas"
        reason = (
            f"KV cache and swap space of {count} replicas take {wanted_gib:.4g} GiB, but {free_gib:.4g} GiB are free"
        )
        raise ConfigError(f"{name}: {reason}", param=name)
    return () if settings.kv_cache_gib else ("--kv-cache-gib", f"{each_gib:.6g}")


def replica_commands(command: ChildCommand, replicas: Sequence[Replica]) -> list[ChildCommand]:
    """Return the command of each replica, made from that of one node; the command itself if there are none."""
    return [
        replace(
            command,
            name=f"{command.name}-{one.number}",
            argv=(*command.argv, *one.arguments),
            env={**command.env, **one.env},
            cpus=one.cpus,
            # They load the same model, so the progress of one is that of all.
            on_progress=command.on_progress if one.number == 0 else None,
        )
        for one in replicas
    ] or [command]


def run_replicas(settings: NodeSettings, command: ChildCommand, replicas: Sequence[Replica], logs: LogSettings) -> None:
    """Run replicas until a signal. One signal lets all drain, a second one lets them give their jobs back."""
    progress = ProgressLog(_log, settings.model)

    def show(event: Event) -> None:
        progress.update(str(event.get("stage")), float(event.get("fraction") or 0.0))

    commands = replica_commands(replace(command, on_progress=show), replicas)
    facts = {"replicas": len(replicas), "gpus": [one.env[VISIBLE] for one in replicas if VISIBLE in one.env]}
    _log.info("starting replicas", extra=facts | {"cpus": [list(one.cpus) for one in replicas if one.cpus]})
    run_until_stopped(_run(commands, progress, logs), status=0)


async def _run(commands: Sequence[ChildCommand], progress: ProgressLog, logs: LogSettings) -> None:
    async with Supervisor(relay_of(logs), log_variables(logs)) as supervisor:
        showing = asyncio.create_task(progress.run())
        try:
            children = [await supervisor.start(command) for command in commands]
            await first_ready(children)
        finally:
            await cancel_until_done([showing])
        async with asyncio.TaskGroup() as keepers:
            for child, command in zip(children, commands, strict=True):
                keepers.create_task(keep_child(supervisor, child, command, _log.warning))
