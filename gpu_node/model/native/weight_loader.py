"""Load a model's weights: from the cache, packed now, or packed in the background while steps read the checkpoint."""

from __future__ import annotations

import copy
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TypeAlias

from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.native.packed_file import KEY_DIGITS, PackedWeights, PackedWriter
from penstock.gpu_node.model.native.packed_matrix import PackedMatrix, PrivateWriter, WeightWriter
from penstock.gpu_node.model.native.packing import NotLosslessError, Packer
from penstock.gpu_node.model.native.placement import NumaPlacement
from penstock.gpu_node.model.native.ranks import SharedWeights
from penstock.gpu_node.model.native.weight_cache import WeightCache
from penstock.kernels.cpu.library import NativeModel
from penstock.kernels.cpu.structs import Format, NativeShapes

log = logging.getLogger(__package__)


_PATIENCE_S = 1.0


class StoppedError(Exception):
    """The model was closed before its weights were packed."""


class PackingState:
    """The state that the packing thread shares with the thread that runs steps."""

    def __init__(self) -> None:
        self.may_begin = Event()
        self.is_stopped = Event()
        self.is_done = Event()
        """Set once packing has succeeded or failed."""
        self.matrices: deque[PackedMatrix] = deque()
        """The matrices that are packed and that the model does not use yet."""
        self.weights: PackedWeights | None = None
        """All weights, once `is_done`; None if `matrices` has all, or packing failed."""

    def check(self) -> None:
        """Raise StoppedError if the model was closed."""
        if self.is_stopped.is_set():
            raise StoppedError


Pack: TypeAlias = Callable[[PackingState], PackedWeights | None]
FaultIn: TypeAlias = Callable[[Callable[[], bool]], None]
"""Maps the pages of the rows, until the function that it is given returns true."""


class BackgroundPacking:
    """One packing of a model's weights. Other processes may pack the same weights; then this one waits for theirs."""

    def __init__(self, model: NativeModel, pack: Pack, fault_in: FaultIn) -> None:
        """Start soon: after the first step of the model, or after `_PATIENCE_S` without one.

        model: reads the rows. It keeps them if packing fails. fault_in: maps the pages of the rows before that, until
        packing may begin, because the first step needs them all. pack: adds packed matrices to the state, calls its
        `check` often, and returns all weights if a file holds them.
        """
        self._model = model
        self._state = state = PackingState()
        thread = Thread(target=_run, args=(state, pack, fault_in), name="penstock-pack", daemon=True)
        # At the end of the process, this runs before the models that `pack` and this object hold are freed.
        self._end = weakref.finalize(self, _end, state, thread)
        thread.start()

    def begin(self) -> None:
        """Start packing now. A model calls this after each step: its first token should not wait for a core."""
        self._state.may_begin.set()

    def give(self) -> bool:
        """Give the model what is packed. Return whether nothing will follow. No step may be running."""
        state = self._state
        # Read first: what is packed afterwards is given by the next call.
        is_done = state.is_done.is_set()
        if is_done and state.weights is not None:
            # One mapping of the whole file replaces one for each matrix.
            state.weights.give_to(self._model)
            return True
        while state.matrices:
            state.matrices[0].give_to(self._model)
            state.matrices.popleft()
        return is_done

    def wait(self) -> None:
        """Wait until `give` gives everything."""
        self.begin()
        self._state.is_done.wait()

    def close(self) -> None:
        """Stop packing, and wait until the thread has ended: at most for one part of a matrix."""
        self._end()


def _run(state: PackingState, pack: Pack, fault_in: FaultIn) -> None:
    try:
        fault_in(state.may_begin.is_set)
        state.may_begin.wait(_PATIENCE_S)
        began_s = time.monotonic()
        state.check()
        state.weights = pack(state)
        log.info("weights are packed", extra={"took_s": round(time.monotonic() - began_s, 3)})
    except StoppedError:
        return
    except Exception:
        log.exception("weights could not be packed: steps stay slow until the next start")
    state.is_done.set()


def _end(state: PackingState, thread: Thread) -> None:
    state.is_stopped.set()
    state.may_begin.set()
    thread.join()


_POLL_S = 0.02
_FAULT_IN_S = 0.2
"""Time to map the pages of packed weights: enough for gigabytes that are in the page cache."""


class WeightLoader:
    """Loads the weights of one model in one quantization."""

    def __init__(
        self, described: Description, library: Path, shapes: NativeShapes, quantization: str, placement: NumaPlacement
    ) -> None:
        self._described = described
        self._library = library
        self._shapes = shapes
        self._quantization = quantization
        self._placement = placement

    def load(
        self, model: NativeModel, cache: WeightCache | None, progress: Progress
    ) -> tuple[set[Format], BackgroundPacking | None]:
        """Return the formats of the matrices, and the packing that goes on in the background, if any.

        cache: the shared file; None if the model keeps weights of its own.
        """
        weights = None if cache is None else cache.opened()
        if weights is None:
            described = self._described
            # Opened once, so that all of the packing reads these files, even if others take their paths meanwhile.
            tensors = DecoderTensors(described.open_checkpoint(), described.spec)
            if cache is None or not cache.is_current():
                return self._pack(model, tensors, progress, tensors.release), None
            try:
                # The first step reads all pages again, so they are not released.
                formats = self._pack(model, tensors, progress, _nothing, on_read=True)
            except NotLosslessError:
                weights = self._packed_once(model, tensors, cache, progress)
            else:
                return formats, self._pack_in_background(model, tensors, cache)
            if weights is None:
                return self._pack(model, tensors, progress, tensors.release), None
        weights.read_ahead()
        weights.place(self._placement)
        weights.give_to(model)
        ends_s = time.monotonic() + _FAULT_IN_S
        weights.fault_in(lambda: time.monotonic() > ends_s)
        return weights.formats, None

    def load_shared(
        self, model: NativeModel, cache: WeightCache | None, progress: Progress
    ) -> tuple[set[Format], SharedWeights, int]:
        """Load packed weights that the ranks of a group share; they are packed first if they are not yet.

        Return their formats, what the other ranks need, and how many bytes of them are rank 0's.
        Without a usable cache they are in memory that only these ranks map.
        """
        shared = None if cache is None else self._cached(model, cache, progress)
        if shared is None:
            shared = self._packed_in_memory(model, progress)
        weights = PackedWeights.of_descriptor(*shared)
        weights.read_ahead(model.rank_panels)
        weights.place(self._placement, model.rank_panels)
        weights.give_to(model)
        return weights.formats, shared, weights.rank_bytes(model.rank_panels)

    def _cached(self, model: NativeModel, cache: WeightCache, progress: Progress) -> SharedWeights | None:
        if cache.opened() is None:
            tensors = DecoderTensors(self._described.open_checkpoint(), self._described.spec)
            if not cache.is_current() or self._packed_once(model, tensors, cache, progress) is None:
                return None
        descriptor = cache.descriptor()
        return None if descriptor is None else SharedWeights(descriptor, cache.key)

    def _packed_in_memory(self, model: NativeModel, progress: Progress) -> SharedWeights:
        descriptor, key = os.memfd_create("penstock-weights", os.MFD_CLOEXEC), "0" * KEY_DIGITS
        tensors = DecoderTensors(self._described.open_checkpoint(), self._described.spec)
        try:
            with os.fdopen(os.dup(descriptor), "r+b") as file, PackedWriter(file, key) as writer:
                writer.finish(self._pack(model, tensors, progress, tensors.release, keep=writer))
        except BaseException:
            os.close(descriptor)
            raise
        return SharedWeights(descriptor, key)

    def _pack(
        self,
        model: NativeModel,
        tensors: DecoderTensors,
        progress: Progress,
        after_part: Callable[[], None],
        *,
        keep: WeightWriter | None = None,
        on_read: bool = False,
    ) -> set[Format]:
        packer = Packer(
            model,
            tensors,
            self._described.spec,
            self._quantization,
            progress,
            rotated=bool(self._shapes.spec.hadamard_rotation),
            after_part=after_part,
            keep=keep,
            on_read=on_read,
        )
        return packer.pack()

    def _packed_once(
        self, model: NativeModel, tensors: DecoderTensors, cache: WeightCache, progress: Progress
    ) -> PackedWeights | None:
        def wait() -> None:
            progress("load", 0.0)
            time.sleep(_POLL_S)

        return cache.packed_once(lambda keep: self._pack(model, tensors, progress, tensors.release, keep=keep), wait)

    def _pack_in_background(self, model: NativeModel, tensors: DecoderTensors, cache: WeightCache) -> BackgroundPacking:
        """Pack with one thread, by a model of its own without a KV cache.

        The steps read the same pages of the checkpoint, so they are not released after each part.
        """
        spec = copy.copy(self._shapes.spec)
        spec.num_blocks = 1
        packer = NativeModel(self._library, self._shapes._replace(spec=spec), 1)

        def pack(state: PackingState) -> PackedWeights | None:
            def write(keep: WeightWriter) -> set[Format]:
                return self._pack(packer, tensors, _ignore, state.check, keep=keep)

            def wait() -> None:
                state.check()
                time.sleep(_POLL_S)

            def add(matrix: PackedMatrix) -> None:
                placed = self._placement.placed(matrix.runs, matrix.columns, matrix.packed)
                state.matrices.append(replace(matrix, packed=placed))

            weights = cache.packed_once(write, wait, add)
            if weights is None:
                write(PrivateWriter(add))
            else:
                weights.place(self._placement)
            return weights

        return BackgroundPacking(model, pack, tensors.fault_in)


def _ignore(_stage: str, _done: float) -> None:
    pass


def _nothing() -> None:
    pass
