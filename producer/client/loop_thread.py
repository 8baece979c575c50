"""An event loop on a private thread, for synchronous callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.contract.errors import InvariantError, PenstockError, UnavailableError

_STOP_TIMEOUT_S = 10.0

T = TypeVar("T")


class LoopThread:
    """Run coroutines for any number of threads of one process.

    The thread is a daemon, so that the interpreter exits even if the caller forgets to stop it.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector or a signal handler may call again in the middle of a call.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stopped = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-client", daemon=True)
        self._thread.start()
        self._started.wait()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupted wait cancels it.

        Raises UnavailableError if the loop was stopped, or belongs to another process.
        """
        future = self.post(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise UnavailableError("the client was closed", code="client_closed") from None
        except InvariantError:
            raise
        except PenstockError as error:
            # The message suffices; the frames of the other thread would only lengthen the caller's traceback.
            raise error.with_traceback(None) from None
        except BaseException:
            future.cancel()
            raise

    def post(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine without waiting for it."""
        if not self._is_ours:
            coroutine.close()
            message = "the client belongs to the process that created it: create another client after a fork"
            raise UnavailableError(message, code="client_closed")
        with self._lock:
            if self._stopped:
                coroutine.close()
                raise UnavailableError("the client is closed", code="client_closed")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, cancel all other coroutines, and end the thread. Only the first call has an effect."""
        if not self._is_ours:
            last.close()
            return
        with self._lock:
            if self._stopped:
                last.close()
                return
            self._stopped = True
            self._last = last
            self._loop.call_soon_threadsafe(self._stopping.set)
        # The garbage collector may call this on the loop's own thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT_S)

    @property
    def _is_ours(self) -> bool:
        """Whether this process has the thread: a fork copies everything but threads."""
        return os.getpid() == self._pid

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._started.set()
        await self._stopping.wait()
        await self._last
