"""Exchanges between the ranks that compute one model: a process alone, threads of one process, or many processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, distributed

from penstock.contract.errors import InvariantError

_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others at an exchange; the first step of a lazily read model takes long."""


class BrokenExchangeError(RuntimeError):
    """An exchange did not come to its end, because another rank is gone. The group cannot compute any more."""


class Communicator(Protocol):
    """One rank's connection to all ranks. They make the same exchanges in the same order, with equal shapes.

    Methods raise BrokenExchangeError. Tensors are contiguous; the caller does not use them afterwards.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, 0 <= rank < size. Rank 0 samples."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, the same to the last bit on each rank."""

    def from_first(self, x: Tensor) -> Tensor:
        """Return the tensor of rank 0."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return at each rank the rows of all ranks, one after another."""

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor to a rank, without waiting until it is received."""

    def receive(self, place: Tensor, rank: int) -> None:
        """Write the next tensor from a rank, of the same shape, to `place`."""


class OneRank:
    """A rank that computes the whole model."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def send(self, x: Tensor, rank: int) -> None:
        """Raise InvariantError: there is no other rank."""
        raise InvariantError(f"the only rank sends to rank {rank}")

    def receive(self, place: Tensor, rank: int) -> None:
        """Raise InvariantError: there is no other rank."""
        raise InvariantError(f"the only rank receives from rank {rank}")


ONE_RANK = OneRank()


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the ranks of a group share."""

    meeting: threading.Barrier
    tables: tuple[list[Tensor], list[Tensor]]
    """The tensors of an exchange by rank; two tables, because a rank may begin the next exchange early."""
    mail: Mapping[tuple[int, int], SimpleQueue[Tensor]]
    """Sent tensors by sender and receiver."""


class ThreadRanks:
    """A rank among threads of one process."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = shared.meeting.parties
        self._shared = shared
        self._count = 0

    @classmethod
    def group(cls, size: int) -> list[Self]:
        """Return all ranks of a group."""
        shared = _Shared(
            meeting=threading.Barrier(size),
            tables=([torch.empty(0)] * size, [torch.empty(0)] * size),
            mail={(sender, to): SimpleQueue() for sender in range(size) for to in range(size)},
        )
        return [cls(rank, shared) for rank in range(size)]

    def sum(self, x: Tensor) -> Tensor:
        """Implement `Communicator.sum`, in the order of the ranks."""
        first, *others = self._exchanged(x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def from_first(self, x: Tensor) -> Tensor:
        """Implement `Communicator.from_first`."""
        return self._exchanged(x)[0]

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement `Communicator.all_gather`."""
        return torch.cat(self._exchanged(x))

    def send(self, x: Tensor, rank: int) -> None:
        """Implement `Communicator.send`."""
        self._shared.mail[self.rank, rank].put(x)

    def receive(self, place: Tensor, rank: int) -> None:
        """Implement `Communicator.receive`."""
        try:
            place.copy_(self._shared.mail[rank, self.rank].get(timeout=_TIMEOUT.total_seconds()))
        except Empty as error:
            raise BrokenExchangeError(f"rank {rank} did not send") from error

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        table = self._shared.tables[self._count % 2]
        self._count += 1
        table[self.rank] = x
        try:
            self._shared.meeting.wait(_TIMEOUT.total_seconds())
        except threading.BrokenBarrierError as error:
            raise BrokenExchangeError("another rank did not come to an exchange") from error
        return list(table)


# Its older name is deprecated in torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class ProcessRanks:
    """A rank among processes, on this host or others, by torch.distributed."""

    def __init__(self, group: Any = None) -> None:
        """group: None for the default group, which the caller has made."""
        self._group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)
        self._first = 0 if group is None else distributed.get_global_rank(group, 0)
        self._sent: list[tuple[Any, Tensor]] = []

    def sum(self, x: Tensor) -> Tensor:
        """Implement `Communicator.sum`. What was sent before has arrived then, and is not kept any longer."""
        with _translate_losses():
            for work, _ in self._sent:
                work.wait()
            self._sent.clear()
            distributed.all_reduce(x, group=self._group)
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Implement `Communicator.from_first`."""
        with _translate_losses():
            distributed.broadcast(x, self._first, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement `Communicator.all_gather`."""
        rows = torch.empty(self.size * len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
        with _translate_losses():
            _all_gather(rows, x, group=self._group)
        return rows

    def send(self, x: Tensor, rank: int) -> None:
        """Implement `Communicator.send`; only within the group of all ranks."""
        with _translate_losses():
            self._sent.append((distributed.isend(x, rank, group=self._group), x))

    def receive(self, place: Tensor, rank: int) -> None:
        """Implement `Communicator.receive`; only within the group of all ranks."""
        with _translate_losses():
            distributed.recv(place, rank, group=self._group)


class RankLinks(NamedTuple):
    """A rank's connections to the ranks that compute a model together."""

    tensor: Communicator = ONE_RANK
    """To those that compute the same layers; on a GPU for tensors there."""
    world: Communicator = ONE_RANK
    """To all of them, for tensors in host memory: rank `stage * tensor.size + tensor.rank`."""

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.world.size // self.tensor.size

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.world.rank // self.tensor.size


ALONE = RankLinks()


def linked_threads(tensor_size: int, num_stages: int = 1) -> list[RankLinks]:
    """Return the connections of all ranks of a model, as threads of this process."""
    world = ThreadRanks.group(tensor_size * num_stages)
    stages = [ThreadRanks.group(tensor_size) for _ in range(num_stages)]
    return [RankLinks(stages[rank // tensor_size][rank % tensor_size], own) for rank, own in enumerate(world)]


@contextmanager
def joined(folder: Path, rank: int, tensor_size: int, num_stages: int = 1) -> Iterator[RankLinks]:
    """Join the ranks on this host that name the same folder, until the context ends. Computation is on the CPU.

    folder: an empty one that only this user may enter. Raises BrokenExchangeError if a rank does not come in time.
    """
    size = tensor_size * num_stages
    with _process_group("gloo", folder, rank, size):
        # All processes make all groups.
        stages = [range(first, first + tensor_size) for first in range(0, size, tensor_size)]
        groups = [distributed.new_group(list(stage)) if num_stages > 1 else None for stage in stages]
        yield RankLinks(ProcessRanks(groups[rank // tensor_size]), ProcessRanks())


@contextmanager
def joined_gpus(folder: Path, rank: int, size: int, device: torch.device) -> Iterator[RankLinks]:
    """As `joined`, where each rank has a GPU of its own, `device`. There are no stages."""
    with _process_group("nccl", folder, rank, size, device_id=device):
        yield RankLinks(ProcessRanks(), ProcessRanks(distributed.new_group(backend="gloo")))


@contextmanager
def _process_group(backend: str, folder: Path, rank: int, size: int, **options: Any) -> Iterator[None]:
    # Ranks on one host need no other network; gloo would take the interface that the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
    options |= {"store": store, "timeout": _TIMEOUT}
    with _translate_losses():
        distributed.init_process_group(backend, rank=rank, world_size=size, **options)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class _translate_losses(AbstractContextManager[None]):  # noqa: N801 a context manager is used like a function
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise BrokenExchangeError(f"an exchange between ranks failed: {error}") from error
