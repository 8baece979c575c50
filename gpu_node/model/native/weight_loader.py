"""Give a model its weights: from the cache, from the rows of the checkpoint until they are packed, or packed now."""

from __future__ import annotations

import copy
import time
from pathlib import Path

from penstock.gpu_node.model.architecture.description import Description
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.native.background_packing import BackgroundPacking, PackingState
from penstock.gpu_node.model.native.packed_file import PackedWeights, PackedWriter
from penstock.gpu_node.model.native.packing import NotLosslessError, Packer
from penstock.gpu_node.model.native.weight_cache import WeightCache
from penstock.kernels.cpu.formats import Format
from penstock.kernels.cpu.library import NativeModel
from penstock.kernels.cpu.structs import NativeSpec

_POLL_S = 0.02


class WeightLoader:
    """Loads the weights of one model in one quantization."""

    def __init__(self, described: Description, library: Path, spec: NativeSpec, quantization: str) -> None:
        self._described = described
        self._library = library
        self._spec = spec
        self._quantization = quantization

    def load(
        self, model: NativeModel, cache: WeightCache | None, progress: Progress
    ) -> tuple[set[Format], BackgroundPacking | None]:
        """Return the formats of the matrices, and the packing that goes on in the background, if any.

        cache: the shared file; None if the model keeps weights of its own.
        """
        if cache is None:
            return self._pack(model, progress), None
        if (weights := cache.opened()) is None:
            try:
                formats = self._pack(model, progress, on_read=True)
            except NotLosslessError:
                weights = self._packed_once(model, cache, progress)
            else:
                return formats, self._pack_in_background(model, cache)
        if weights is None:
            return self._pack(model, progress), None
        weights.give_to(model)
        return weights.formats, None

    def _pack(
        self, model: NativeModel, progress: Progress, *, keep: PackedWriter | None = None, on_read: bool = False
    ) -> set[Format]:
        rotated = bool(self._spec.hadamard_rotation)
        packer = Packer(
            model, self._described, self._quantization, progress, rotated=rotated, keep=keep, on_read=on_read
        )
        return packer.pack()

    def _packed_once(self, model: NativeModel, cache: WeightCache, progress: Progress) -> PackedWeights | None:
        def wait() -> None:
            progress("load", 0.0)
            time.sleep(_POLL_S)

        return cache.packed_once(lambda keep: self._pack(model, progress, keep=keep), wait)

    def _pack_in_background(self, model: NativeModel, cache: WeightCache) -> BackgroundPacking:
        """Pack with one thread, by a model of its own without a KV cache."""
        spec = copy.copy(self._spec)
        spec.num_blocks = 1
        packer = NativeModel(self._library, spec, 1)

        def pack(state: PackingState) -> PackedWeights | None:
            def check(_stage: str, _done: float) -> None:
                state.check()

            def write(keep: PackedWriter) -> set[Format]:
                state.writer = keep
                return self._pack(packer, check, keep=keep)

            def wait() -> None:
                state.check()
                time.sleep(_POLL_S)

            return cache.packed_once(write, wait)

        return BackgroundPacking(model, pack, lambda model: self._pack(model, _ignore))


def _ignore(_stage: str, _done: float) -> None:
    pass
