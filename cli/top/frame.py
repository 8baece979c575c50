"""The state that `penstock top` shows at one moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
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
    """Why it is unhealthy, or how long it has been silent."""
    silent_ms: int = 0
    num_jobs: int = 0
    num_running: int = 0
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
    process_bytes: int = 0
    arithmetic: str = ""


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A priority class of a pool."""

    name: str
    num_waiting: int
    oldest_ms: int
    num_running: int


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


@dataclass(frozen=True, slots=True)
class Frame:
    """All pools at one moment. `time_ms` is by the clock of this machine."""

    time_ms: int
    pools: tuple[PoolFrame, ...]
    num_pools_left_out: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the frame as JSON object."""
        pools = [
            asdict(pool) | {"num_alive": pool.num_alive, "totals": {name: pool.total(name) for name in _SUMMED}}
            for pool in self.pools
        ]
        return {"time_ms": self.time_ms, "pools": pools, "num_pools_left_out": self.num_pools_left_out}


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
