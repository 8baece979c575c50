"""Exchanges between the ranks that compute one model: a process alone, threads of one process, or many processes."""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, distributed

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory

log = logging.getLogger(__package__)

Result = TypeVar("Result")
_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others at an exchange; the first step of a lazily read model takes long."""


class RanksLostError(RuntimeError):
    """An exchange did not come to its end, because another rank is gone. The group cannot compute any more."""


class RankFailedError(RuntimeError):
    """A step failed at another rank. The next step may succeed."""


class Communicator(Protocol):
    """One rank's connection to all ranks. They make the same exchanges in the same order, with equal shapes.

    Methods raise RanksLostError. Tensors are contiguous; the caller does not use them afterwards.
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

    def gather(self, x: Tensor, places: list[Tensor]) -> list[Tensor]:
        """Return the tensors of all ranks at rank 0, [] at the others.

        places: at rank 0, memory for a tensor of each rank, which the result may use; [] at the others.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Return at each rank the rows of all ranks, one after another."""


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

    def gather(self, x: Tensor, places: list[Tensor]) -> list[Tensor]:
        """Return x alone."""
        return [x]

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


ONE_RANK = OneRank()


class ThreadRanks:
    """A rank among threads of one process."""

    def __init__(self, rank: int, meeting: threading.Barrier, tables: tuple[list[Tensor], list[Tensor]]) -> None:
        """tables: the tensors of an exchange, [size] each; two, because a rank may begin the next exchange early."""
        self.rank = rank
        self.size = meeting.parties
        self._meeting = meeting
        self._tables = tables
        self._count = 0

    @classmethod
    def group(cls, size: int) -> list[ThreadRanks]:
        """Return all ranks of a group."""
        meeting = threading.Barrier(size)
        tables = [torch.empty(0)] * size, [torch.empty(0)] * size
        return [cls(rank, meeting, tables) for rank in range(size)]

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

    def gather(self, x: Tensor, places: list[Tensor]) -> list[Tensor]:
        """Implement `Communicator.gather`."""
        every = self._exchanged(x)
        return every if self.rank == 0 else []

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement `Communicator.all_gather`."""
        return torch.cat(self._exchanged(x))

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        table = self._tables[self._count % 2]
        self._count += 1
        table[self.rank] = x
        try:
            self._meeting.wait(_TIMEOUT.total_seconds())
        except threading.BrokenBarrierError as error:
            raise RanksLostError("another rank did not come to an exchange") from error
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

    def sum(self, x: Tensor) -> Tensor:
        """Implement `Communicator.sum`."""
        with _translate_losses():
            distributed.all_reduce(x, group=self._group)
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Implement `Communicator.from_first`."""
        with _translate_losses():
            distributed.broadcast(x, self._first, group=self._group)
        return x

    def gather(self, x: Tensor, places: list[Tensor]) -> list[Tensor]:
        """Implement `Communicator.gather`."""
        with _translate_losses():
            distributed.gather(x, places or None, self._first, group=self._group)
        return places

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement `Communicator.all_gather`."""
        rows = torch.empty(self.size * len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
        with _translate_losses():
            _all_gather(rows, x, group=self._group)
        return rows


@contextmanager
def joined(folder: Path, rank: int, size: int) -> Iterator[ProcessRanks]:
    """Join the ranks on this host that name the same folder, until the context ends. Computation is on the CPU.

    folder: an empty one that only this user may enter. Raises RanksLostError if a rank does not come in time.
    """
    # Ranks on one host need no other network; gloo would take the interface that the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
    with _translate_losses():
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield ProcessRanks()
    finally:
        distributed.destroy_process_group()


@contextmanager
def joined_gpus(
    folder: Path, rank: int, size: int, device: torch.device
) -> Iterator[tuple[ProcessRanks, ProcessRanks]]:
    """Join the ranks on this host that name the same folder, each with a GPU of its own, until the context ends.

    Yields the connections for tensors on the GPU and for those in host memory. Raises RanksLostError.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
    with _translate_losses():
        distributed.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=device
        )
    try:
        yield ProcessRanks(), ProcessRanks(distributed.new_group(backend="gloo"))
    finally:
        distributed.destroy_process_group()


class _translate_losses(AbstractContextManager[None]):  # noqa: N801 a context manager is used like a function
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise RanksLostError(f"an exchange between ranks failed: {error}") from error


class Exchange(NamedTuple):
    """An exchange of a step, by its kind and the shape of its tensor."""

    kind: Literal["sum", "from_first"]
    rows: int
    columns: int


class ToGather(NamedTuple):
    """A rank's columns of a matrix, and at rank 0 memory for those of each rank."""

    x: Tensor
    places: list[Tensor]


class Exchanges:
    """Makes the exchanges of steps. If a step fails at one rank, it fails at all of them, and none waits in vain.

    A rank whose step fails still takes part in the exchanges that are left, with zeros. Then all ranks vote.
    """

    def __init__(self, ranks: Communicator, max_numbers: int) -> None:
        """max_numbers: of the largest exchange of a step. Their memory is allocated now."""
        self._ranks = ranks
        self._spare = torch.zeros(max_numbers if ranks.size > 1 else 0)
        self._num_made = 0

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._ranks.size

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x in float32; with one rank x itself."""
        if self._ranks.size == 1:
            return x
        wide = x.float().contiguous()
        self._num_made += 1
        return self._ranks.sum(wide)

    def from_first(self, x: Tensor) -> Tensor:
        """Return rank 0's x."""
        if self._ranks.size == 1:
            return x
        x = x.contiguous()
        self._num_made += 1
        return self._ranks.from_first(x)

    def to_gather(self, x: Tensor) -> ToGather:
        """Return x with the memory that gathering its columns takes, as the last part of the work of `run`."""
        if self._ranks.size == 1:
            return ToGather(x, [])
        x = x.contiguous()
        return ToGather(x, [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else [])

    def gathered(self, own: ToGather) -> Tensor:
        """Return at rank 0 the columns of all ranks side by side, [rows, size * columns]; elsewhere the own ones.

        After `run`, once it is known that no rank failed.
        """
        if self._ranks.size == 1:
            return own.x
        return torch.cat(self._ranks.gather(*own) or [own.x], dim=-1)

    def run(self, planned: Sequence[Exchange], work: Callable[[], Result]) -> Result:
        """Do `work`, which makes the planned exchanges in order.

        If it fails at any rank, raises at all of them: MemoryError if all failures are MemoryErrors, else the rank's
        own error or RankFailedError. Raises RanksLostError if another rank is gone.
        """
        if self._ranks.size == 1:
            return work()
        if any(one.rows * one.columns > len(self._spare) for one in planned):
            raise InvariantError(f"an exchange is larger than the {len(self._spare)} numbers that there is memory for")
        self._num_made = 0
        failure: Exception | None = None
        try:
            with translate_out_of_memory():
                result = work()
        except RanksLostError:
            raise
        except Exception as error:
            failure = error
            if self.rank:
                log.warning("a step failed at a rank", extra={"rank": self.rank, "reason": repr(error)})
            self._make_the_rest(planned[self._num_made :])
        self._vote(failure)
        return result

    def _make_the_rest(self, planned: Sequence[Exchange]) -> None:
        for kind, rows, columns in planned:
            getattr(self._ranks, kind)(self._spare[: rows * columns].zero_().view(rows, columns))

    def _vote(self, failure: Exception | None) -> None:
        """Tell all ranks whether this one failed, and raise if any did."""
        lacks_memory = isinstance(failure, MemoryError)
        is_other = failure is not None and not lacks_memory
        votes = torch.tensor([lacks_memory, is_other], dtype=torch.float32)
        num_without_memory, num_other = self._ranks.sum(votes).tolist()
        if num_other:
            own = failure if is_other else None
            raise own or RankFailedError("the step failed at another rank, whose log has the error")
        if num_without_memory:
            raise failure or MemoryError("another rank has no memory for the step")


class Agreement:
    """Checks that all ranks sample the same tokens, from a digest that they compare every so many steps."""

    def __init__(self, ranks: Communicator, every: int = 64) -> None:
        """ranks: connected for tensors in host memory."""
        self._ranks = ranks
        self._every = every
        self._num_noted = self._digest = 0
        self._is_lost = False

    def note(self, tokens: Tensor) -> None:
        """Note the tokens of a step, in the order of steps. Raises RanksLostError if the ranks differ, then always."""
        if self._ranks.size == 1:
            return
        self._num_noted += 1
        self._digest = zlib.crc32(tokens.numpy().tobytes(), self._digest)
        if self._num_noted % self._every == 0:
            digests = self._ranks.all_gather(torch.tensor([self._digest]))
            self._is_lost |= bool((digests != digests[0]).any())
        if self._is_lost:
            raise RanksLostError("the ranks sampled different tokens")
