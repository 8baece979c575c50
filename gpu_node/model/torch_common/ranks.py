"""Exchanges between the ranks that compute one model: processes on one host or several, or a process alone."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed

from penstock.contract.errors import ConfigError, InvariantError

_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others at an exchange; the first step of a lazily read model takes long."""


_SIOCGIFADDR, _IFREQ_BYTES = 0x8915, 256


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


# Its older name is deprecated in torch 2.13.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class GpuRanks:
    """A rank among processes with a GPU each, by NCCL. There is one such group in a process, and it has no stages."""

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def sum(self, x: Tensor) -> Tensor:
        """Implement `Communicator.sum`."""
        with _translate_losses():
            distributed.all_reduce(x)
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Implement `Communicator.from_first`."""
        with _translate_losses():
            distributed.broadcast(x, 0)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement `Communicator.all_gather`."""
        rows = torch.empty(self.size * len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
        with _translate_losses():
            _all_gather(rows, x)
        return rows

    def send(self, x: Tensor, rank: int) -> None:
        """Raise InvariantError: there are no stages."""
        raise InvariantError(f"a rank sends to rank {rank}, but there are no stages")

    def receive(self, place: Tensor, rank: int) -> None:
        """Raise InvariantError: there are no stages."""
        raise InvariantError(f"a rank receives from rank {rank}, but there are no stages")


class HostRanks:
    """A rank among processes, on this host or others, by gloo, for tensors in host memory."""

    def __init__(self, group: Any, waiting: AbstractContextManager[None]) -> None:
        """group: a ProcessGroupGloo. waiting: entered while this rank waits for others."""
        self._group = group
        self._waiting = waiting
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._sent: list[tuple[Any, Tensor]] = []

    def sum(self, x: Tensor) -> Tensor:
        """Implement `Communicator.sum`. What was sent before has arrived then, and is not kept any longer."""
        with self._waiting, _translate_losses():
            for work, _ in self._sent:
                work.wait()
            self._sent.clear()
            self._group.allreduce([x]).wait()
        return x

    def from_first(self, x: Tensor) -> Tensor:
        """Implement `Communicator.from_first`."""
        with self._waiting, _translate_losses():
            self._group.broadcast(x, 0).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement `Communicator.all_gather`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._waiting, _translate_losses():
            self._group.allgather([parts], [x]).wait()
        return torch.cat(parts)

    def send(self, x: Tensor, rank: int) -> None:
        """Implement `Communicator.send`."""
        with _translate_losses():
            self._sent.append((self._group.send([x], rank, 0), x))

    def receive(self, place: Tensor, rank: int) -> None:
        """Implement `Communicator.receive`."""
        with self._waiting, _translate_losses():
            self._group.recv([place], rank, 0).wait()


class RankLinks(NamedTuple):
    """A rank's connections to the ranks that compute a model together."""

    tensor: Communicator = ONE_RANK
    """To those that compute the same layers; on a GPU for tensors there."""
    world: Communicator = ONE_RANK
    """To all of them, for tensors in host memory: rank `stage * tensor.size + tensor.rank`."""
    num_here: int = 1
    """The number of ranks on this host, which share its cores."""

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.world.size // self.tensor.size

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.world.rank // self.tensor.size


ALONE = RankLinks()


class Joining(NamedTuple):
    """How a rank joins the others. All of its fields are texts and numbers."""

    rank: int
    tensor_size: int
    num_stages: int
    num_here: int
    """The number of ranks on this host."""
    address: str
    """The address of this host that other ranks connect to."""
    store_address: str
    port: int
    """Of the store that rank 0 has opened."""
    name: str
    """Of this group in the store, which cannot be guessed."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor_size * self.num_stages


def open_store(address: str, size: int) -> tuple[Any, int]:
    """Open the store by which ranks find each other, at an address of this host. Return it and its port.

    Raises OSError if this host does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        # Without a socket of ours, it would listen at all addresses of the host.
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            size,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    return store, port


def join(
    joining: Joining,
    waiting: AbstractContextManager[None],
    store: Any = None,
    waiting_for_stages: AbstractContextManager[None] | None = None,
) -> RankLinks:
    """Join the other ranks, for tensors in host memory.

    waiting: entered while this rank waits for others; waiting_for_stages: in its place where the others are of several
    stages. store: of rank 0, if it has opened one. Raises BrokenExchangeError if a rank does not come in time.
    """
    with waiting, _translate_losses():
        store = _store_of(joining, store)
        of_world = waiting if joining.num_stages == 1 else waiting_for_stages or waiting
        world = HostRanks(_gloo("world", store, joining.rank, joining.size, joining.address), of_world)
        if joining.num_stages == 1:
            return RankLinks(world, world, joining.num_here)
        stage, rank = divmod(joining.rank, joining.tensor_size)
        group = _gloo(f"stage{stage}", store, rank, joining.tensor_size, joining.address)
        return RankLinks(HostRanks(group, waiting), world, joining.num_here)


def join_gpus(
    joining: Joining, waiting: AbstractContextManager[None], device: torch.device, store: Any = None
) -> RankLinks:
    """As `join`, where each rank has a GPU of its own, `device`. There are no stages. `leave_gpus` ends it."""
    if "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={_interface_of(joining.address)}"
    with waiting, _translate_losses():
        store = _store_of(joining, store)
        world = HostRanks(_gloo("world", store, joining.rank, joining.size, joining.address), waiting)
        own = distributed.PrefixStore("gpus", store)  # type: ignore[attr-defined]
        options: dict[str, Any] = {"store": own, "timeout": _TIMEOUT, "device_id": device}
        distributed.init_process_group("nccl", rank=joining.rank, world_size=joining.size, **options)
        return RankLinks(GpuRanks(), world, joining.num_here)


def leave_gpus(*, is_lost: bool) -> None:
    """End this process's NCCL group, if there is one. is_lost: whether other ranks are gone; it waits for none then."""
    if not distributed.is_initialized():
        return
    if is_lost:
        distributed.distributed_c10d._abort_process_group()
    else:
        distributed.destroy_process_group()


def _store_of(joining: Joining, store: Any) -> Any:
    if store is None:
        given = joining.store_address, joining.port, joining.size
        store = distributed.TCPStore(*given, is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    return distributed.PrefixStore(joining.name, store)  # type: ignore[attr-defined]


def _gloo(name: str, store: Any, rank: int, size: int, address: str) -> Any:
    """Return a group whose ranks connect to each other at their addresses, at no other interface."""
    gloo = distributed.ProcessGroupGloo
    options: Any = gloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = _TIMEOUT
    return gloo(distributed.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]


def _interface_of(address: str) -> str:
    """Return the name of the interface with an address. Raises ConfigError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # Interfaces without an address of IPv4 have no answer.
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, name.encode().ljust(_IFREQ_BYTES, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise ConfigError(f"no interface has {address} as its address of IPv4; name it in NCCL_SOCKET_IFNAME")


class _translate_losses(AbstractContextManager[None]):  # noqa: N801 a context manager is used like a function
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # gloo may have no memory either. Whether other ranks have got anything then is unknown.
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, BrokenExchangeError):
            raise BrokenExchangeError(f"an exchange between ranks failed: {error}") from error
