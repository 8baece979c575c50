"""CPU time of single methods, by the thread that calls them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any


class CpuParts:
    """CPU microseconds of methods since they were first watched, without those of watched methods that they call."""

    def __init__(self) -> None:
        self.spent_us: defaultdict[str, float] = defaultdict(float)
        self._inner_ns: dict[int, int] = {}

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Count the calls of a class's method as `part`."""
        setattr(owner, method, self._timed(getattr(owner, method), part))

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            outer_ns, self._inner_ns[thread] = self._inner_ns.get(thread, 0), 0
            began_ns = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took_ns = time.thread_time_ns() - began_ns
                self.spent_us[part] += (took_ns - self._inner_ns[thread]) / 1e3
                self._inner_ns[thread] = outer_ns + took_ns

        return timed
