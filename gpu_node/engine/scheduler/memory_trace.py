"""A trace of recent memory use, to explain after an out-of-memory error what led to it and which requests held most."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from penstock.gpu_node.engine.kv_cache.block_pool import BlockPool
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.runtime.process_memory import resident_bytes

log = logging.getLogger(__package__)


MAX_RECORDS = 256
NUM_HOLDERS = 3
_QUIET_S, _BUSY_S = 1.0, 0.1
"""Seconds between two records: while the counters do not change, and while they do."""
_LOG_EVERY_S = 60.0
_NUM_LOGGED = 32
"""Records in a log message, at most one message a minute: after one out-of-memory error every step may fail."""
_GROWTH = 1.1
"""Growth of the process by this factor is logged at once, since the kernel's OOM killer gives no time to log the
records."""


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Memory use at one moment. Blocks are held, cached (a prefix that no sequence holds) or blank."""

    at_s: float
    """Unix time."""
    event: str
    """The event since the previous record."""
    kv_blocks: tuple[int, int, int]
    """Device blocks: held, cached, blank."""
    swap_blocks: tuple[int, int, int]
    """Host blocks: held, cached, blank."""
    window_blocks: tuple[int, int, int]
    """Blocks of windows: held, cached, blank; all 0 where all layers have the same blocks."""
    num_running: int
    num_waiting: int
    num_swapped: int
    max_step_tokens: int
    """Below the configured limit after steps that ran out of memory."""
    resident_bytes: int
    """Memory of the process in bytes (RSS); 0 where the system does not report it."""
    holders: tuple[tuple[str, int], ...]
    """The requests that hold most blocks, with their numbers; shared blocks count for each choice that holds them."""

    def __str__(self) -> str:
        tiers = [("kv", self.kv_blocks), ("swap", self.swap_blocks)]
        tiers += [("windows", self.window_blocks)] if any(self.window_blocks) else []
        blocks = "  ".join(f"{name} {held} held {cached} cached {blank} blank" for name, (held, cached, blank) in tiers)
        holders = ", ".join(f"{name} {held}" for name, held in self.holders) or "none"
        return (
            f"{datetime.fromtimestamp(self.at_s):%H:%M:%S.%f}"[:-3] + f"  {blocks}  "
            f"{self.num_running} run {self.num_waiting} wait {self.num_swapped} swapped  "
            f"steps of {self.max_step_tokens}  {self.resident_bytes >> 20} MiB  most: {holders}  {self.event}"
        ).rstrip()


def _uses_of(pool: BlockPool) -> tuple[int, int, int]:
    """Return how many blocks are held, cached and blank."""
    return pool.num_total - pool.num_free, pool.num_cached, pool.num_free - pool.num_cached


class MemoryTrace:
    """The last records of a scheduler and its memory: one a second, more while sequences lose their blocks."""

    def __init__(
        self, scheduler: Scheduler, memory: KvCacheManager, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._now_s = now_s
        self._records: deque[MemoryRecord] = deque(maxlen=MAX_RECORDS)
        self._counted = 0, 0, 0
        self._num_refused = 0
        self._recorded_s = self._logged_s = -math.inf
        self._logged_bytes = 0

    def lines(self) -> list[str]:
        """Return the records as text, the oldest first."""
        return [str(record) for record in list(self._records)]

    def refused(self) -> None:
        """Count a request that was refused because it could never fit."""
        self._num_refused += 1

    def watch(self) -> None:
        """Add a record if one is due."""
        now_s = self._now_s()
        since_s = now_s - self._recorded_s
        if since_s < _BUSY_S:
            return
        scheduler = self._scheduler
        counted = scheduler.num_preemptions, scheduler.num_swaps, self._num_refused
        if since_s >= _QUIET_S or counted != self._counted:
            changes = zip(("preempted", "swapped", "refused"), counted, self._counted, strict=True)
            event = ", ".join(f"{name} {now - before}" for name, now, before in changes if now > before)
            self._counted = counted
            self._recorded_s = now_s
            self._record(event)

    def failed(self, error: Exception) -> None:
        """Record that a step failed; if it ran out of memory, log the latest records."""
        now_s = self._now_s()
        self._record(f"step failed: {error!r}")
        if isinstance(error, MemoryError) and now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.error("a step ran out of memory", extra={"reason": repr(error), "trail": self.lines()[-_NUM_LOGGED:]})

    def _record(self, event: str) -> None:
        scheduler, queues = self._scheduler, self._scheduler.queues
        held: Counter[str] = Counter()
        for seq in (*scheduler.running, *queues.swapped):
            held[seq.request_id] += len(seq.blocks)
        device, host, windows = self._memory.device, self._memory.host, self._memory.windows
        record = MemoryRecord(
            at_s=time.time(),
            event=event,
            kv_blocks=_uses_of(device),
            swap_blocks=_uses_of(host),
            window_blocks=(0, 0, 0) if windows is None else _uses_of(windows.pool),
            num_running=scheduler.num_running,
            num_waiting=queues.num_waiting,
            num_swapped=len(queues.swapped),
            max_step_tokens=scheduler.max_step_tokens,
            resident_bytes=resident_bytes(),
            holders=tuple(held.most_common(NUM_HOLDERS)),
        )
        self._records.append(record)
        if record.resident_bytes > _GROWTH * self._logged_bytes:
            self._logged_bytes = record.resident_bytes
            log.info("memory grew", extra={"record": str(record)})
