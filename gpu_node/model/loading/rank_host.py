"""Rank 0's side of a torch or GPU runner with several ranks: how the others start, and how all of them join."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.rank_part import Parallel
from penstock.gpu_node.model.checkpoint.description import Description, weights_revision_of
from penstock.gpu_node.model.gpu.load import gpu_of
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.ranks.connection import RankConnection, read_secret
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.group import START_PATIENCE_S, RankGroup, RankHandle
from penstock.gpu_node.model.ranks.hosts import RankListener, RemoteRank, own_address, parse_address
from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange, StoppedRank
from penstock.gpu_node.model.ranks.processes import RankProcess
from penstock.gpu_node.model.torch_common.ranked_runner import PartRunner
from penstock.gpu_node.model.torch_common.ranks import Joining, RankLinks, join, join_gpus, leave_gpus, open_store
from penstock.kernels.cpu.probe import usable_cores

log = logging.getLogger(__package__)

RANK_MODULE = "penstock.gpu_node.model.loading.torch_rank_process"
_LOOPBACK = "127.0.0.1"

LoadPart = Callable[[RunnerOptions, RankLinks], tuple[PartRunner, str]]
"""Loads the part of a rank; returns its runner and the name of its arithmetic."""


class RankProcesses:
    """The further ranks of a model: processes of this host, and others that join from other hosts."""

    def __init__(self, described: Description, options: RunnerOptions, load: LoadPart) -> None:
        """Start nothing yet, but listen if ranks are to join.

        Raises ConfigError if the host has too few cores or GPUs, or cannot listen.
        """
        self._options = options
        self._load = load
        self._parallel = Parallel(options.tensor_parallel_size, options.pipeline_parallel_size)
        self.num_stages, size = self._parallel.pipeline, self._parallel.num_ranks
        self._num_here = size - options.remote_ranks
        check_devices(options, self._num_here)
        self._model = described.source.gguf or described.source.folder
        self._facts = facts_of(described)
        self._store: tuple[Any, int] = None, 0
        self._name = ""
        # The thread that starts ranks again may be pinned to a core, and they would inherit that.
        self._cores = sorted(os.sched_getaffinity(0))
        self._listener = listener_of(options) if options.remote_ranks else None
        self._joined: list[RankConnection] = []
        self.group: RankGroup[PlainExchange] = RankGroup(
            size,
            self._words,
            self._start_rank,
            stall_s=options.rank_stall_s,
            watch=StoppedRank,
            # A GPU that waits for a lost one would never stop waiting.
            on_lost=partial(leave_gpus, is_lost=True),
        )

    def start(self) -> None:
        """Implement `RankHost.start`."""
        self.group.close()
        self._store, self._name = open_store(self._address, self._parallel.num_ranks), secrets.token_hex(16)
        if self._listener is not None:
            remote = range(self._num_here, self._parallel.num_ranks)
            where = {"address": self._listener.address, "port": self._listener.port, "num_ranks": len(remote)}
            log.info("waiting for ranks of other hosts", extra=where)
            self._joined = self._listener.accept(remote, START_PATIENCE_S)
        self.group.start(self._facts)

    def load(self) -> tuple[PartRunner, str, RankLinks]:
        """Implement `RankHost.load`."""
        links = join_others(self._options, self._joining(0), self.group.exchange, self._store[0])
        part, arithmetic = self._load(self._options, links)
        # Engine and group keep their blocks when the ranks start again.
        sizes = part.cache_sizes
        blocks = {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
        self._options = self._options.model_copy(update=blocks)
        return part, arithmetic, links

    def leave(self, *, is_lost: bool) -> None:
        """Implement `RankHost.leave`."""
        leave_gpus(is_lost=is_lost)
        for connection in self._joined:
            connection.close()
        self._joined, self._store = [], (None, 0)

    def close(self) -> None:
        """Implement `RankHost.close`."""
        if self._listener is not None:
            self._listener.close()

    def _words(self, memory: GroupMemory) -> PlainExchange:
        return PlainExchange(memory, 0, readers=range(1, self._num_here))

    def _start_rank(self, rank: int, memory: GroupMemory) -> RankHandle:
        own = options_of_rank(self._options, rank, is_here=rank < self._num_here)
        config = {"rank": rank, "model": str(self._model), "options": own, "facts": self._facts, "cores": self._cores}
        config["joining"] = self._joining(rank)._asdict()
        if rank >= self._num_here:
            remote = RemoteRank(self._joined.pop(0), rank, memory, config)
            self.group.exchange.forwards.append(remote.send_message)
            return remote
        return RankProcess(RANK_MODULE, {**config, "memory": memory.descriptors}, memory.descriptors)

    @property
    def _address(self) -> str:
        return _LOOPBACK if self._listener is None else self._listener.address

    def _joining(self, rank: int) -> Joining:
        # A rank of another host puts its own address in.
        sizes = self._parallel.tensor, self._parallel.pipeline, self._num_here
        return Joining(rank, *sizes, self._address, self._address, self._store[1], self._name)


def listener_of(options: RunnerOptions) -> RankListener:
    """Listen for ranks of other hosts. Raises ConfigError."""
    if options.remote_ranks >= options.tensor_parallel_size * options.pipeline_parallel_size:
        sizes = f"tensor_parallel_size x pipeline_parallel_size is {options.tensor_parallel_size}"
        sizes += f" x {options.pipeline_parallel_size}"
        problem = f"remote_ranks {options.remote_ranks} leaves no rank for this host: {sizes}"
        raise ConfigError(problem, param="remote_ranks")
    if options.rank_address is None or options.rank_secret_file is None:
        missing = "rank_address" if options.rank_address is None else "rank_secret_file"
        raise ConfigError(f"remote_ranks {options.remote_ranks} needs {missing}", param=missing)
    host, port = parse_address(options.rank_address, "rank_address")
    return RankListener(own_address(host, "rank_address"), port, read_secret(options.rank_secret_file))


def facts_of(described: Description) -> dict[str, str]:
    """Return what all ranks must have in common, by name. Their settings are those of rank 0."""
    return {
        "version of penstock": version("penstock-llm"),
        "model": weights_revision_of(described.source, described.origin),
    }


def options_of_rank(options: RunnerOptions, rank: int, *, is_here: bool) -> dict[str, Any]:
    """Return the options of a rank. On rank 0's host each has a GPU of its own, in their order."""
    own = options.model_dump(mode="json", include=set(RunnerOptions.model_fields))
    if options.wants_gpu:
        has_number = is_here and torch.cuda.is_available()
        own["runner"] = f"gpu:{(options.gpu_number or 0) + rank}" if has_number else "gpu"
    return own


def check_devices(options: RunnerOptions, num_here: int) -> None:
    """Raise ConfigError unless this host has a GPU, or a core, for each of its ranks."""
    setting = "tensor_parallel_size" if options.tensor_parallel_size > 1 else "pipeline_parallel_size"
    if options.wants_gpu and torch.cuda.is_available():
        first, count = options.gpu_number or 0, torch.cuda.device_count()
        if first + num_here > count:
            has = f"this process sees {count}" + (f", of which {first} come before {options.runner}" if first else "")
            raise ConfigError(f"{num_here} ranks of this host need a GPU each, and {has}", param=setting)
    elif not options.wants_gpu:
        threads = options.num_threads or max(1, usable_cores() - options.reserved_cores)
        if num_here > threads:
            has = f"they have {threads} together (num_threads, or the usable cores)"
            raise ConfigError(f"{num_here} ranks of this host need a thread each, and {has}", param=setting)


def join_others(options: RunnerOptions, joining: Joining, exchange: PlainExchange, store: Any = None) -> RankLinks:
    """Join the other ranks of a model, on a GPU if the options want one and there is one."""
    if options.wants_gpu and torch.cuda.is_available():
        device = gpu_of(options.gpu_number)
        torch.cuda.set_device(device)
        return join_gpus(joining, exchange.waiting, device, store)
    return join(joining, exchange.waiting, store, exchange.waiting_for_stages)
