"""Packs weights on a thread of its own, while the model already serves from the rows of the checkpoint."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from threading import Event, Thread

from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.native.packed_file import PackedWeights

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0


class _StoppedError(Exception):
    """The model was closed before its weights were packed."""


def _end(may_begin: Event, is_stopped: Event, thread: Thread) -> None:
    is_stopped.set()
    may_begin.set()
    thread.join()


class BackgroundPacking:
    """One packing of a model's weights. Other processes may pack the same weights; then this one waits for theirs."""

    def __init__(
        self, pack: Callable[[Progress], PackedWeights | None], use: Callable[[PackedWeights | None], None]
    ) -> None:
        """Start soon: after the first step of the model, or after `_PATIENCE_S` without one.

        pack: calls its argument after each layer and while it waits; returns None if the weights cannot be shared in a
        file. use: gives the packed weights to the model that serves; without them it packs its own.
        """
        self._pack = pack
        self._use = use
        self._may_begin = Event()
        self._is_stopped = Event()
        self._is_done = Event()
        self._weights: PackedWeights | None = None
        self._thread = Thread(target=self._run, name="penstock-pack", daemon=True)
        # At the end of the process, this runs before the models that `pack` and `use` hold are freed.
        self._end = weakref.finalize(self, _end, self._may_begin, self._is_stopped, self._thread)
        self._thread.start()

    def begin(self) -> None:
        """Start to pack now. A model calls this after each step: its first token should not wait for a core."""
        self._may_begin.set()

    def use_if_done(self) -> bool:
        """Give the weights to the model if they are packed. Return whether they were. No step may be running."""
        if not self._is_done.is_set():
            return False
        self._use(self._weights)
        return True

    def close(self) -> None:
        """Stop packing, and wait until the thread has ended: at most for one matrix."""
        self._end()

    def _run(self) -> None:
        self._may_begin.wait(_PATIENCE_S)
        began_s = time.monotonic()
        try:
            self._check("load", 0.0)
            self._weights = self._pack(self._check)
            if self._weights is not None:
                _log.info("weights are packed", extra={"took_s": round(time.monotonic() - began_s, 3)})
        except _StoppedError:
            return
        except Exception:
            _log.exception("weights could not be packed in the background")
        self._is_done.set()

    def _check(self, stage: str, done: float) -> None:
        del stage, done
        if self._is_stopped.is_set():
            raise _StoppedError
