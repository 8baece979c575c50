"""The thread that renews a worker's task leases continues after any error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.producer.batch import task_leases


class Channel:
    """A kombu channel whose worker holds one task; the first look at it fails."""

    unacked_index_key = "unacked_index"

    def __init__(self) -> None:
        self.qos = self
        self.num_looks = 0
        self.renewed = threading.Event()

    @property
    def _delivered(self) -> dict[str, Any]:
        self.num_looks += 1
        if self.num_looks == 1:
            raise RuntimeError("OrderedDict mutated during iteration")
        return {"tag": None}

    @contextmanager
    def conn_or_acquire(self) -> Iterator[Channel]:
        yield self

    def zadd(self, key: str, held: dict[str, float], *, xx: bool) -> None:
        assert (key, list(held), xx) == (self.unacked_index_key, ["tag"], True)
        self.renewed.set()

    def zrange(self, *_: Any, **__: Any) -> list[Any]:
        return []


def test_leases_are_renewed_after_an_unforeseen_error(caplog: pytest.LogCaptureFixture) -> None:
    channel, stopped = Channel(), threading.Event()

    @contextmanager
    def connection() -> Iterator[Any]:
        yield SimpleNamespace(default_channel=channel, collect=lambda: None)

    app = SimpleNamespace(connection_for_read=connection)
    consumer = SimpleNamespace(app=app, task_consumer=SimpleNamespace(channel=channel))
    times = SimpleNamespace(look=lambda client: None, now_s=time.time)
    thread = threading.Thread(target=task_leases.keep_leases, args=(consumer, stopped, 0.05, None, times))
    with caplog.at_level(logging.ERROR):
        thread.start()
        assert channel.renewed.wait(20)
        stopped.set()
        thread.join()
    (record,) = caplog.records
    assert record.message == "task leases were not renewed" and record.exc_info is not None
