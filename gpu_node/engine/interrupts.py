"""Delay Ctrl-C to the end of a step, because an interrupted step would leave queues and blocks half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back. Yield a function that delivers an interrupt that arrived; leaving the context does so too.

    A second interrupt is delivered at once, for a step that never ends. Python handles signals on the main thread only:
    on other threads, or without a handler in this process, nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    act, came = handler, list[tuple[int, FrameType | None]]()

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            let_through()

    def let_through() -> None:
        if came:
            last = came[-1]
            came.clear()
            act(*last)

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, handler)
        let_through()
