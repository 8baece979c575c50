"""Reads frames. A frame takes at most 5 + 64 × pools short Redis commands in five round trips, and no scan of keys.

Two are for the list of pools. A pool takes three for its record, and 24 for its queue, nodes and events. Each tenant
with queued jobs takes twelve more, eight tenants at most. Jobs that are scheduled, or wait for tokens, take more
(`src/penstock/queue/broker/queue_state.py`). `sets.py` adds two round trips for open batches, and one script call for
each tag that is asked for and pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.contract.errors import UnavailableError
from penstock.contract.pool import LiveNode, NodePressure, PoolActivity
from penstock.contract.priority import NUM_LEVELS, is_background, level_label
from penstock.queue.broker.pools import ActivityBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.protocol_version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from penstock.contract.job_counts import JobCounts
    from penstock.contract.pool import PoolEvent


NodeState = Literal["ok", "unhealthy", "draining", "silent", "dead"]
SortKey = Literal["node", "state", "running", "waiting", "kv", "out"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
STATES: tuple[NodeState, ...] = ("dead", "silent", "unhealthy", "draining", "ok")
_SUMMED = (
    *("num_jobs", "num_running", "num_waiting", "num_preemptions", "tokens_in_per_s", "tokens_out_per_s"),
    *("kv_blocks_used", "kv_blocks_cached", "kv_blocks_total"),
)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node. Rates are tokens per second; a dead node has only a name and a state."""

    node_id: str
    state: NodeState
    reason: str = ""
    """Why it is or was unhealthy, or how long it has been silent."""
    silent_ms: int = 0
    num_jobs: int = 0
    num_running: int = 0
    num_held_back: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    tokens_in_per_s: float = 0.0
    tokens_out_per_s: float = 0.0
    mean_batch: float = 0.0
    num_preemptions: int = 0
    step_ms_p50: float = 0.0
    step_ms_p99: float = 0.0
    page_utilization: float | None = None
    """Share of the held blocks' slots that store a token; the rest is fragmentation. None if no block is held."""
    process_bytes: int = 0
    weight_bytes: int = 0
    """Memory of the model's weights; 0 if it is not known."""
    arithmetic: str = ""
    num_ranks: int = 1
    """Processes that compute its model together."""
    num_rank_losses: int = 0
    """Times that one of them was lost, and all were started again."""
    stage_idle: tuple[float, ...] = ()
    """This and the next four are as in `NodePressure`."""
    rank_exchange_ms: float | None = None
    rank_wait_ms: float | None = None
    rank_weight_bytes: tuple[int, ...] = ()
    rank_kv_bytes: tuple[int, ...] = ()
    state_slots_total: int = 0
    """This and the next four are as in `NodePressure`."""
    state_slots_free: int = 0
    state_snapshots: int = 0
    state_hits: int = 0
    state_evictions: int = 0
    window_blocks_total: int = 0
    """This and the next three are as in `NodePressure`."""
    window_blocks_free: int = 0
    window_blocks_cached: int = 0
    window_evictions: int = 0
    prefix_hit_rate: float | None = None
    """Share of the prompt tokens of the last minute that the prefix cache had; None if no prompt began."""
    gpu_utilization: float | None = None
    """None on the CPU, or if the driver does not say."""
    gpu_memory_used_bytes: int = 0
    gpu_memory_total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A priority class of a pool, for one kind of work."""

    name: str
    num_waiting: int
    """Queued jobs."""
    num_scheduled: int
    num_awaiting_tokens: int
    num_awaiting_key: int
    oldest_ms: int
    """The longest wait, for whatever reason."""
    num_running: int
    num_expired: int
    engine_share: float | None
    """Share of the engines' time in the last minute; None if no engine ran a step."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant of a pool: its queued jobs, and those that nodes hold."""

    name: str
    num_waiting: int
    num_running: int


@dataclass(frozen=True, slots=True)
class PoolFrame:
    """A pool."""

    pool: str
    model: str
    nodes: tuple[NodeRow, ...]
    classes: tuple[ClassRow, ...]
    tenants: tuple[TenantRow, ...]
    events: tuple[PoolEvent, ...]
    """The newest events, oldest first."""
    counts: dict[str, int]
    backlog_s: tuple[float | None, float | None]
    """See `QueueState`: of foreground and of background work."""
    background_share: float | None
    """Share of background work in the engines' time in the last minute."""
    paused: tuple[str, ...] = ()
    """What is paused, in words."""

    @property
    def num_waiting(self) -> int:
        """Queued jobs of all classes."""
        return sum(row.num_waiting for row in self.classes)

    @property
    def num_alive(self) -> int:
        """Nodes that are not dead."""
        return sum(node.state != "dead" for node in self.nodes)

    def total(self, name: str) -> float:
        """Return the sum of a number over the nodes."""
        return sum(float(getattr(node, name)) for node in self.nodes)


SetKind = Literal["batch", "flow", "tag", "bulk"]


@dataclass(frozen=True, slots=True)
class SetRow:
    """A set of jobs and how far it is."""

    kind: SetKind
    counts: JobCounts

    @property
    def name(self) -> str:
        """The tag, or the id of the batch or bulk action."""
        return self.counts.tag or self.counts.batch_id or self.counts.bulk_id or ""

    def as_object(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {"kind": self.kind, **self.counts.as_object()}


@dataclass(frozen=True, slots=True)
class Frame:
    """All pools at one moment. `time_ms` is by the pools' clock; without a pool, by that of this machine."""

    time_ms: int
    pools: tuple[PoolFrame, ...]
    num_pools_left_out: int = 0
    away: tuple[str, ...] = ()
    """URLs of Redis that do not answer, of several."""
    folded: tuple[str, ...] = ()
    """Names of pools that are left out, because they had neither a node nor an open job for an hour."""
    sets: tuple[SetRow, ...] = ()
    """The tags that were asked for, and the open batches and flows with the most rows left."""
    num_batches_left_out: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the frame as a JSON object."""
        pools = [
            asdict(pool) | {"num_alive": pool.num_alive, "totals": {name: pool.total(name) for name in _SUMMED}}
            for pool in self.pools
        ]
        found: dict[str, Any] = {"time_ms": self.time_ms, "pools": pools}
        found |= {"num_pools_left_out": self.num_pools_left_out, "away": list(self.away)}
        found |= {"sets": [row.as_object() for row in self.sets], "num_batches_left_out": self.num_batches_left_out}
        return found | {"folded_pools": list(self.folded)}


def sorted_nodes(nodes: Sequence[NodeRow], key: SortKey) -> list[NodeRow]:
    """Return the nodes by name, or with the most urgent or busiest first."""
    values: dict[str, Callable[[NodeRow], float]] = {
        "node": lambda _: 0.0,
        "state": lambda node: STATES.index(node.state),
        "running": lambda node: -node.num_running,
        "waiting": lambda node: -node.num_waiting,
        "kv": lambda node: -node.kv_blocks_used / max(1, node.kv_blocks_total),
        "out": lambda node: -node.tokens_out_per_s,
    }
    return sorted(nodes, key=lambda node: (values[key](node), node.node_id))


MAX_POOLS = 16
MAX_TENANTS = 8
SILENT_MS = 5_000
"""A node sends a heartbeat every two seconds or more often."""
DEAD_SHOWN_S = 60.0
"""How long a dead node stays in view."""
_MIN_INTERVAL_S = 0.2
"""Least time between two heartbeats for a rate. A late read makes the interval look shorter and the rate too high."""
_QUIET_S = 4.0
"""A busy node without progress keeps its last rate for this time: its next heartbeat may be about to come."""


@dataclass(slots=True)
class _Seen:
    """A node's last row, when its heartbeat came, and the counters that it had."""

    row: NodeRow
    heartbeat_s: float
    tokens_in: int
    tokens_out: int
    gone_s: float | None = None

    def has_same_counters(self, pressure: NodePressure) -> bool:
        """Whether the node reports what it reported before."""
        counters = (pressure.prefill_tokens, pressure.decode_tokens)
        return self.gone_s is None and counters == (self.tokens_in, self.tokens_out)


class TopReader:
    """Reads frames. It remembers the nodes, because a rate needs two heartbeats, and dead nodes stay in view."""

    def __init__(
        self,
        activity: ActivityBroker,
        producer: ProducerBroker,
        *,
        shows: Callable[[str], bool] = lambda _: True,
        folds: bool = True,
    ) -> None:
        """`shows`: which pools are read. `folds`: whether those without nodes for an hour are left out."""
        self._folds = folds
        self._activity = activity
        self._producer = producer
        self._shows = shows
        # Of one user, or of our own code and files.
        self._seen: dict[tuple[str, str], _Seen] = {}

    async def read(self) -> Frame:
        """Return the next frame. Raises UnavailableError while Redis is unreachable."""
        served = await self._producer.pools()
        # The records of another protocol version cannot be read.
        usable = [name for name, record in served.items() if record.protocol_version == PROTOCOL_VERSION]
        names = [name for name in usable if self._shows(name)]
        shown = names[:MAX_POOLS]
        activities = await self._activity.of(shown)
        now_s = time.monotonic()
        folded = [
            name
            for activity in activities
            if self._folds and served[name := activity.pool].is_folded(activity.queue.num_waiting)
        ]
        pools = tuple(
            self._pool_of(served[activity.pool].model, activity, now_s)
            for activity in activities
            if activity.pool not in folded
        )
        time_ms = max((one.now_ms for one in activities), default=time.time_ns() // 1_000_000)
        return Frame(time_ms, pools, len(names) - len(shown), folded=tuple(folded))

    def _pool_of(self, model: str, activity: PoolActivity, now_s: float) -> PoolFrame:
        live = {node.pressure.node_id: node for node in activity.nodes}
        rows = [self._row_of(activity.pool, node, now_s) for node in live.values()]
        return PoolFrame(
            activity.pool,
            model,
            nodes=(*rows, *self._dead(activity, live, now_s)),
            classes=_classes(activity),
            tenants=_tenants(activity),
            events=activity.events,
            counts=dict(activity.counts),
            backlog_s=activity.queue.backlog_s,
            paused=tuple(pause.words for pause in activity.pauses),
            background_share=activity.queue.background_share,
        )

    def _row_of(self, pool: str, node: LiveNode, now_s: float) -> NodeRow:
        pressure, key = node.pressure, (pool, node.pressure.node_id)
        heartbeat_s, seen = now_s - node.silent_ms / 1000, self._seen.get(key)
        if seen is not None and seen.has_same_counters(pressure) and heartbeat_s - seen.heartbeat_s < _QUIET_S:
            is_idle = not pressure.num_running
            rates = (0.0, 0.0) if is_idle else (seen.row.tokens_in_per_s, seen.row.tokens_out_per_s)
            counters = (seen.heartbeat_s, seen.tokens_in, seen.tokens_out)
        else:
            rates = _rates(seen, node, heartbeat_s)
            counters = (heartbeat_s, pressure.prefill_tokens, pressure.decode_tokens)
        state, reason = _state_of(node)
        row = NodeRow(
            pressure.node_id,
            state,
            reason,
            silent_ms=node.silent_ms,
            num_jobs=pressure.num_jobs,
            num_running=pressure.num_running,
            num_held_back=pressure.num_held_back,
            num_waiting=pressure.num_waiting,
            kv_blocks_used=pressure.kv_blocks_total - pressure.kv_blocks_free,
            kv_blocks_cached=pressure.kv_blocks_cached,
            kv_blocks_total=pressure.kv_blocks_total,
            tokens_in_per_s=rates[0],
            tokens_out_per_s=rates[1],
            # A node reports the last speed that it had while it worked.
            mean_batch=pressure.mean_batch if pressure.num_running else 0.0,
            num_preemptions=pressure.num_preemptions,
            step_ms_p50=pressure.step_ms_p50,
            step_ms_p99=pressure.step_ms_p99,
            page_utilization=pressure.page_utilization,
            process_bytes=pressure.process_bytes,
            weight_bytes=pressure.weight_bytes,
            arithmetic=pressure.arithmetic,
            num_ranks=pressure.num_ranks,
            num_rank_losses=pressure.num_rank_losses,
            stage_idle=pressure.stage_idle,
            rank_exchange_ms=pressure.rank_exchange_ms,
            rank_wait_ms=pressure.rank_wait_ms,
            rank_weight_bytes=pressure.rank_weight_bytes,
            rank_kv_bytes=pressure.rank_kv_bytes,
            state_slots_total=pressure.state_slots_total,
            state_slots_free=pressure.state_slots_free,
            state_snapshots=pressure.state_snapshots,
            state_hits=pressure.state_hits,
            state_evictions=pressure.state_evictions,
            window_blocks_total=pressure.window_blocks_total,
            window_blocks_free=pressure.window_blocks_free,
            window_blocks_cached=pressure.window_blocks_cached,
            window_evictions=pressure.window_evictions,
            prefix_hit_rate=pressure.prefix_hit_rate,
            gpu_utilization=pressure.gpu_utilization,
            gpu_memory_used_bytes=pressure.gpu_memory_used_bytes,
            gpu_memory_total_bytes=pressure.gpu_memory_total_bytes,
        )
        self._seen[key] = _Seen(row, *counters)
        return row

    def _dead(self, activity: PoolActivity, live: Mapping[str, LiveNode], now_s: float) -> list[NodeRow]:
        """Return nodes that died lately: declared so by the pool, or seen alive before and silent for a lease."""
        last = {event.node_id: event for event in activity.events if event.kind in ("node_left", "node_lost")}
        found = {}
        for node_id, event in last.items():
            age_s = max(0.0, (activity.now_ms - event.at_ms) / 1000)
            if event.kind == "node_lost" and node_id not in live and age_s < DEAD_SHOWN_S:
                found[node_id] = NodeRow(node_id, "dead", f"declared dead {age_s:.0f} s ago")
        for (pool, node_id), seen in list(self._seen.items()):
            if pool != activity.pool or node_id in live:
                continue
            seen.gone_s = seen.gone_s or now_s
            has_left = node_id in last and last[node_id].kind == "node_left"
            if has_left or now_s - seen.gone_s > DEAD_SHOWN_S:
                del self._seen[pool, node_id]
            elif node_id not in found:
                found[node_id] = NodeRow(node_id, "dead", f"silent for {now_s - seen.heartbeat_s:.0f} s")
        return list(found.values())


class SplitReader:
    """Reads frames of the pools in several Redis."""

    def __init__(self, readers: Mapping[str, TopReader]) -> None:
        """`readers`: those of each Redis, by the URL that is shown for it."""
        self._readers = readers

    async def read(self) -> Frame:
        """Return the next frame of all. Raises UnavailableError while no Redis is reachable."""
        read = await asyncio.gather(*(one.read() for one in self._readers.values()), return_exceptions=True)
        frames = list[Frame]()
        away = dict[str, UnavailableError]()
        for url, found in zip(self._readers, read, strict=True):
            if isinstance(found, UnavailableError):
                away[url] = found
            elif isinstance(found, BaseException):
                raise found
            else:
                frames.append(found)
        if not frames:
            raise next(iter(away.values()))
        pools = tuple(pool for frame in frames for pool in frame.pools)
        folded = tuple(name for frame in frames for name in frame.folded)
        return Frame(frames[0].time_ms, pools, sum(frame.num_pools_left_out for frame in frames), tuple(away), folded)


def _rates(seen: _Seen | None, node: LiveNode, heartbeat_s: float) -> tuple[float, float]:
    """Return tokens per second, in and out: between two heartbeats, or as the node reports its speed."""
    pressure = node.pressure
    if seen is not None and seen.gone_s is None and pressure.decode_tokens >= seen.tokens_out:
        elapsed_s = max(_MIN_INTERVAL_S, heartbeat_s - seen.heartbeat_s)
        gained = pressure.prefill_tokens - seen.tokens_in, pressure.decode_tokens - seen.tokens_out
        return gained[0] / elapsed_s, gained[1] / elapsed_s
    if not pressure.num_running:
        return 0.0, 0.0
    return pressure.prefill_tokens_per_s, pressure.decode_tokens_per_s


def _state_of(node: LiveNode) -> tuple[NodeState, str]:
    pressure = node.pressure
    if node.silent_ms > SILENT_MS:
        return "silent", f"no heartbeat for {node.silent_ms / 1000:.0f} s"
    if pressure.troubles:
        return "unhealthy", "; ".join(f"{part}: {reason}" for part, reason in pressure.troubles.items())
    past = "; ".join(f"was unhealthy: {part}: {reason}" for part, reason in pressure.past_troubles.items())
    return ("draining", past) if pressure.draining else ("ok", past)


def _classes(activity: PoolActivity) -> tuple[ClassRow, ...]:
    queue = activity.queue
    return tuple(
        ClassRow(
            level_label(level),
            queue.queued[level],
            queue.waiting["scheduled"].count[level],
            queue.waiting["awaiting_tokens"].count[level],
            queue.waiting["awaiting_key"].count[level],
            queue.longest_wait_ms[level],
            queue.running[level],
            queue.expired[level],
            None if queue.engine_shares is None else queue.engine_shares[level],
        )
        for level in range(NUM_LEVELS)
        if not is_background(level) or queue.is_used(level)
    )


def _tenants(activity: PoolActivity) -> tuple[TenantRow, ...]:
    running, waiting = Counter[str](), Counter(activity.queued_of_tenants)
    for node in activity.nodes:
        running.update(node.pressure.jobs_by_tenant)
    busiest = [tenant for tenant, _ in (running + waiting).most_common(MAX_TENANTS)]
    return tuple(TenantRow(tenant, waiting[tenant], running[tenant]) for tenant in busiest)
