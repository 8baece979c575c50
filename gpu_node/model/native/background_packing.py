"""Packs weights on a thread of its own, while the model already serves from the rows of the checkpoint."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from threading import Event, Thread

from penstock.gpu_node.model.native.packed_file import PackedWeights, PackedWriter
from penstock.kernels.cpu.library import NativeModel

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0


class StoppedError(Exception):
    """The model was closed before its weights were packed."""


class PackingState:
    """What the thread that packs shares with the thread that steps."""

    def __init__(self) -> None:
        self.may_begin = Event()
        self.is_stopped = Event()
        self.is_done = Event()
        self.writer: PackedWriter | None = None
        """Writes the weights now, unless another process does."""
        self.weights: PackedWeights | None = None
        """The packed weights, once `is_done`; None if they cannot be shared in a file."""

    def check(self) -> None:
        """Raise StoppedError if the model was closed."""
        if self.is_stopped.is_set():
            raise StoppedError


class BackgroundPacking:
    """One packing of a model's weights. Other processes may pack the same weights; then this one waits for theirs."""

    def __init__(
        self,
        model: NativeModel,
        pack: Callable[[PackingState], PackedWeights | None],
        pack_own: Callable[[NativeModel], object],
    ) -> None:
        """Start soon: after the first step of the model, or after `_PATIENCE_S` without one.

        model: reads the weights. pack: returns the packed weights, or None if they cannot be shared in a file; it calls
        `check` of the state and sets its writer. pack_own: packs weights that only this model has.
        """
        self._model = model
        self._pack_own = pack_own
        self._state = state = PackingState()
        thread = Thread(target=_run, args=(state, pack), name="penstock-pack", daemon=True)
        # At the end of the process, this runs before the models that `pack` and this object hold are freed.
        self._end = weakref.finalize(self, _end, state, thread)
        thread.start()

    def begin(self) -> None:
        """Start to pack now. A model calls this after each step: its first token should not wait for a core."""
        self._state.may_begin.set()

    def give(self) -> bool:
        """Give the model what is packed. Return whether that is everything. No step may be running."""
        state = self._state
        if not state.is_done.is_set():
            if state.writer is not None:
                state.writer.give_written(self._model)
            return False
        if state.weights is None:
            self._pack_own(self._model)
        else:
            state.weights.give_to(self._model, 0 if state.writer is None else state.writer.num_given)
        return True

    def wait(self) -> None:
        """Wait until `give` gives everything."""
        self.begin()
        self._state.is_done.wait()

    def close(self) -> None:
        """Stop packing, and wait until the thread has ended: at most for one matrix."""
        self._end()


def _run(state: PackingState, pack: Callable[[PackingState], PackedWeights | None]) -> None:
    state.may_begin.wait(_PATIENCE_S)
    began_s = time.monotonic()
    try:
        state.check()
        state.weights = pack(state)
        if state.weights is not None:
            _log.info("weights are packed", extra={"took_s": round(time.monotonic() - began_s, 3)})
    except StoppedError:
        return
    except Exception:
        _log.exception("weights could not be packed in the background")
    state.is_done.set()


def _end(state: PackingState, thread: Thread) -> None:
    state.is_stopped.set()
    state.may_begin.set()
    thread.join()
