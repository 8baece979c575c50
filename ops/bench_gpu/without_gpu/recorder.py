"""Runs code for a GPU that is absent: records each launch, computes nothing, and returns memory without contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.runtime.jit import JITFunction

from penstock.gpu_node.model.gpu import linear
from penstock.gpu_node.model.gpu.device import Device
from penstock.kernels.triton import decode_attention, few_rows, launches, products

LIBRARY_PRODUCTS = {"mm", "addmm", "bmm", "_scaled_mm"}
_MAKES_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {"_unsafe_view", "_reshape_alias", "detach", "lift_fresh"}
"""Operations that return a view but whose schema does not say so."""


class TritonLaunch(NamedTuple):
    """One launch of a Triton kernel; its tensors are replaced by their dtypes."""

    function: Any
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's name without the underscore of private functions."""
        return str(self.function.fn.__name__).lstrip("_")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be launched on a GPU: Triton kernels, products of a library and other operations of torch.

    Tensors are on the CPU and keep no contents: an operation runs on `meta` tensors to find the result's shape.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        """Launches since the last `take`: `triton:NAME`, `library:NAME` or `torch:NAME`.

        A dependent launch of Triton is `dependent:NAME`, or `overlapped:NAME` behind another one: only then do its
        programs start before the kernel ahead has ended.
        """
        self._is_dependent_last = False
        self.triton_launches: set[TritonLaunch] = set()
        """All different launches so far. Grids are left out."""

    def take(self) -> Counter[str]:
        """Return the counts and reset them."""
        taken, self.counts, self._is_dependent_last = self.counts, Counter(), False
        return taken

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what an operation would return, without contents."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        with self:
            # First, because the schemas of `to`, `contiguous` and `reshape` promise a view which they may not return.
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if name in _MAKES_MEMORY or name in _VIEWS or func.is_view:
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            raise RuntimeError("a step reads a tensor on the host, which waits for the GPU")
        self._is_dependent_last = False
        self.counts[f"{'library' if name in LIBRARY_PRODUCTS else 'torch'}:{name}"] += 1
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("meta")}
        return tree_map(_unfilled, func(*tree_map(_shape_only, args), **tree_map(_shape_only, kwargs)))

    def launch(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stand in for `JITFunction.run`."""
        del grid, warmup
        given = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
        launch = TritonLaunch(function, given, tuple(sorted(options.items())))
        kind = "triton"
        if options.get("launch_pdl"):
            kind = "overlapped" if self._is_dependent_last else "dependent"
        self._is_dependent_last = kind != "triton"
        self.counts[f"{kind}:{launch.name}"] += 1
        self.triton_launches.add(launch)


def _shape_only(x: Any) -> Any:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _unfilled(x: Any) -> Any:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x


class RecordingDevice(Device):
    """Runs each captured step once and keeps what it launched. A replay launches nothing."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(torch.device("cpu"))
        self._recorder = recorder
        self.captured: list[Counter[str]] = []
        """The launches of each captured graph, in the order of `GraphShapes.all`."""

    def capture(self, work: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        """Count the launches of `work`."""
        self._recorder.take()
        work()
        self.captured.append(self._recorder.take())
        return _replay_nothing, pool


def _replay_nothing() -> None:
    pass


class Gpu(NamedTuple):
    """The GPU that launches are recorded for."""

    name: str
    capability: int
    multiprocessors: int


H100 = Gpu("H100", 90, 132)
A100 = Gpu("A100", 80, 108)


@contextmanager
def recording(gpu: Gpu) -> Iterator[Recorder]:
    """Record the launches of the enclosed code, which decides as it would on `gpu`."""
    recorder = Recorder()

    def run(function: Any, *args: Any, **options: Any) -> None:
        recorder.launch(function, *args, **options)

    def architecture(_device: torch.device) -> int:
        return gpu.capability

    def multiprocessors(_device: torch.device) -> int:
        return gpu.multiprocessors

    def library_multiplies(q: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
        # The tensors are on the CPU; the product's own rule asks for a GPU.
        return products.library_multiplies(_OnGpu(q), weight, dtype)  # type: ignore[arg-type]

    def is_for_few(x: Tensor, weight: Tensor) -> bool:
        return few_rows.is_for_few(_OnGpu(x), weight)  # type: ignore[arg-type]

    with (
        patch.object(JITFunction, "run", run),
        patch.object(launches, "architecture", architecture),
        patch.object(products, "architecture", architecture),
        patch.object(few_rows, "architecture", architecture),
        patch.object(linear, "is_for_few", is_for_few),
        patch.object(decode_attention, "num_multiprocessors", multiprocessors),
        patch.object(linear, "library_multiplies", library_multiplies),
        recorder,
    ):
        yield recorder


class _OnGpu:
    """A tensor's dtype and length, as if it were on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.device = torch.device("cuda", 0)
        self._length = len(tensor)

    def __len__(self) -> int:
        return self._length
