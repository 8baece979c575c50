"""A GPU on the CPU that runs work as late as possible, so that a missing wait causes a wrong result or a race.

Operations on device memory, Triton's kernels (interpreted) and copies from and to pinned memory are queued per stream.
They run when the host waits for a later event. A replay queues a captured graph again, in memory that all graphs
share. Until a copy to pinned memory has run, its target contains poison. Pinned memory must not change before the
copy from it has run.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from fakes.runners.deferred_work import (
    Event,
    EventPoint,
    Hold,
    Item,
    RaceError,
    Site,
    Work,
    bytes_of,
    like,
    on_meta,
    poison,
    shape_only,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.interpreter import InterpretedFunction

from penstock.gpu_node.model.gpu import inputs, kv_pool, runner
from penstock.kernels.triton import copies

_MAKES_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_VIEWS = {"_unsafe_view", "_reshape_alias", "detach", "lift_fresh"}
"""Operations that return a view but whose schema does not say so."""
_MAIN = 0


class DeferredGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The queues of a GPU's streams. Tensors on the CPU are device memory, except pinned memory and arrays of numpy."""

    def __init__(self, *, side_is_early: bool = False) -> None:
        """side_is_early: side streams run as soon as their holds allow; otherwise as late as they may."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._side_is_early = side_is_early
        self._streams: list[deque[Item]] = [deque()]
        self._current = _MAIN
        self._captured: list[tuple[int, Item]] | None = None
        self._graph_memory: list[Tensor] = []
        self._host: dict[int, Tensor] = {}
        """Memory of the host by address; kept, so that no device memory gets the same address."""
        self._is_mapped: set[int] = set()
        """Host memory that kernels use as if it were the device's."""
        self._is_running = False
        self.omitted: Site | None = None
        """Where events are neither waited for nor held: an error to be found."""
        self.num_deferred = 0
        """Pieces of work that were queued so far."""

    def omits(self, caller: FrameType) -> bool:
        """Return whether the caller is the line whose synchronization the test omits."""
        return self.omitted == (caller.f_code.co_filename, caller.f_lineno)

    def unless_omitted(self, method: Callable[..., None]) -> Callable[..., None]:
        """Return a method that does nothing if its caller is the line whose synchronization the test omits."""

        def call(*args: Any) -> None:
            if not self.omits(sys._getframe(1)):
                method(*args)

        return call

    def new_stream(self) -> int:
        """Return a further stream."""
        self._streams.append(deque())
        return len(self._streams) - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Queue the block's work in a stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Defer the work of the block. At its end, all work has run."""
        run, from_numpy, to_cpu, gpu = InterpretedFunction.run, torch.from_numpy, Tensor.cpu, self

        def launch(function: Any, *args: Any, **options: Any) -> object:
            if gpu._is_running:
                return run(function, *args, **options)
            gpu.defer(f"kernel {function.__name__}", lambda: run(function, *args, **options), args)
            return None

        def to_device_async(array: Any, _device: torch.device) -> Tensor:
            # torch copies from pinned memory of its own, which it does not reuse before the device has read it.
            return torch.empty_like(private := from_numpy(array.copy())).copy_(private, non_blocking=True)

        def host_array(array: Any) -> Tensor:
            return gpu.note_host(from_numpy(array))

        def cpu(tensor: Tensor) -> Tensor:
            if not gpu.is_host(tensor):
                gpu.synchronize()
            return to_cpu(tensor)

        with ExitStack() as stack:
            stack.enter_context(patch.object(Tensor, "cpu", cpu))
            stack.enter_context(patch.object(InterpretedFunction, "run", launch))
            stack.enter_context(patch.object(torch, "from_numpy", host_array))
            for module in (runner, kv_pool, inputs, copies):
                stack.enter_context(patch.object(module, "to_device_async", to_device_async))
            stack.enter_context(self)
            yield
            self.synchronize()

    def note_host(self, memory: Tensor, *, is_mapped: bool = False) -> Tensor:
        """Treat a tensor's memory as the host's."""
        address = memory.untyped_storage().data_ptr()
        self._host[address] = memory
        if is_mapped:
            self._is_mapped.add(address)
        return memory

    def is_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the host's memory."""
        return tensor.untyped_storage().data_ptr() in self._host

    def record(self) -> Event:
        """Return an event after the current stream's work."""
        event = Event(self, self._current)
        self.enqueue(EventPoint(event))
        return event

    def enqueue(self, item: Item) -> None:
        """Append to the current stream, or to the graph that is captured."""
        if self._captured is not None:
            self._captured.append((self._current, item))
            return
        self._streams[self._current].append(item)
        self._run_early()

    def defer(self, name: str, run: Callable[[], object], args: Any, *, written: Tensor | None = None) -> None:
        """Queue work. `written`: an argument that it only writes."""
        self.num_deferred += 1
        tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor) and x is not written]
        pinned = [x for x in tensors if self._is_pinned(x)]
        self.enqueue(Work(name, run, [(x, x.clone()) for x in pinned]))

    def run_until(self, event: Event) -> None:
        """Run the work before an event, and nothing else that may still wait."""
        with _disable_current_modes(), torch.inference_mode():
            while not event.is_reached:
                self._run_next(event.stream)
                self._run_early()

    def synchronize(self) -> None:
        """Run all work."""
        with _disable_current_modes(), torch.inference_mode():
            while any(self._streams):
                for stream, queue in enumerate(self._streams):
                    while queue:
                        self._run_next(stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that queues the captured work again."""
        with self.activated():
            captured: list[tuple[int, Item]] = []
            self._captured = captured
            work()
            self._captured = None
        return lambda: self._replay(captured)

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Queue an operation of torch, and return tensors for its results."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        with self:
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        is_on_host = bool(tensors) and all(map(self.is_host, tensors))
        if name in _VIEWS or func.is_view:
            return func(*args, **kwargs)
        if is_on_host:
            return tree_map(lambda x: self.note_host(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))
        if name in _MAKES_MEMORY:
            return self._new(func(*args, **kwargs))
        if name == "_local_scalar_dense":
            raise RaceError("a step reads device memory on the host")
        return self._deferred(func, name, args, kwargs)

    def _deferred(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:
            target = kwargs.get("out", args[0])
            if name == "copy_" and self._is_blocking_copy(*args, **kwargs):
                self.synchronize()
                return func(*args, **kwargs)
            is_copy = name == "copy_"
            self.defer(name, lambda: func(*args, **kwargs), (args, kwargs), written=target if is_copy else None)
            if is_copy and self._is_pinned(target):
                poison(target)
            return target
        shapes = func(*tree_map(shape_only, args), **tree_map(shape_only, on_meta(kwargs)))
        results = tree_map(lambda x: self._new(like(x)) if isinstance(x, Tensor) else x, shapes)

        def run() -> None:
            for result, got in zip(tree_flatten(results)[0], tree_flatten(func(*args, **kwargs))[0], strict=True):
                if isinstance(result, Tensor):
                    result.copy_(got)

        self.defer(name, run, (args, kwargs))
        return results

    def _is_blocking_copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
        return not non_blocking and self.is_host(target) != self.is_host(source)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return self.is_host(tensor) and tensor.untyped_storage().data_ptr() not in self._is_mapped

    def _new(self, memory: Tensor) -> Tensor:
        """Return new device memory, with poison in it."""
        if self._captured is not None:
            self._graph_memory.append(memory)
        return poison(memory)

    def _replay(self, captured: list[tuple[int, Item]]) -> None:
        self.enqueue(Work("other graphs", lambda: [poison(memory) for memory in self._graph_memory]))
        events: dict[Event, Event] = {}
        for stream, item in captured:
            with self.on(stream):
                if isinstance(item, EventPoint):
                    events[item.event] = self.record()
                else:
                    self.enqueue(Hold(events[item.event]) if isinstance(item, Hold) else item)

    def _run_early(self) -> None:
        if not self._side_is_early or self._is_running or self._captured is not None:
            return
        with _disable_current_modes(), torch.inference_mode():
            for stream, queue in list(enumerate(self._streams))[1:]:
                while queue and not (isinstance(queue[0], Hold) and not queue[0].event.is_reached):
                    self._run_next(stream)

    def _run_next(self, stream: int) -> None:
        queue = self._streams[stream]
        if isinstance(hold := queue[0], Hold) and not hold.event.is_reached:
            self.run_until(hold.event)  # Until then it stays, so that nothing behind it runs early.
            return
        item = queue.popleft()
        if isinstance(item, EventPoint):
            item.event.is_reached = True
        elif isinstance(item, Work):
            self._run(item)

    def _run(self, work: Work) -> None:
        for memory, was in work.reads:
            if memory.numel() and not torch.equal(bytes_of(memory), bytes_of(was)):
                raise RaceError(f"pinned memory changed before {work.name} had read it")
        self._is_running = True
        try:
            work.run()
        finally:
            self._is_running = False
