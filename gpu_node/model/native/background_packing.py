"""Packs weights on a thread of its own, while the model already serves from the rows of the checkpoint."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import TypeAlias

from penstock.gpu_node.model.native.packed_file import PackedMatrix, PackedWeights
from penstock.kernels.cpu.library import NativeModel

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
