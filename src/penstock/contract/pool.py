"""What a pool reports of itself: the load of its engines, its statistics and its latest events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from penstock.contract.chat_shapes import ChatShape
from penstock.contract.pauses import Pause
from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, PerLevel
from penstock.contract.tasks import GENERATE, Task
from penstock.contract.tool_formats import NO_CALLS, ToolFormat

# The part of an engine's statistics that its node reports with every heartbeat.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """KV blocks, sequences and steps of an engine. Counters grow from its start.

    Times cover the last few hundred steps. A step's time runs from its submission until its tokens are committed.
    """

    block_size: int = 16
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    """Device blocks that no sequence holds, cached prefixes included."""
    kv_blocks_cached: int = 0
    kv_tokens_used: int = 0
    """Tokens stored in held blocks; shared blocks count once. The difference to those blocks' size is fragmentation."""
    kv_evictions: int = 0
    """Cached prefix blocks that the device evicted. The host keeps a copy of each while it has free blocks."""
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    decode_tokens: int = 0
    """Tokens that were sampled, without rejected drafts."""
    num_running: int = 0
    num_held_back: int = 0
    """The running sequences of background work that the last step left out, because of chats."""
    num_waiting: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that swapped their blocks to host memory; after the others, the KV cache is recomputed."""
    num_swapped: int = 0
    """Preempted sequences with their blocks on the host."""
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    """Host blocks that no sequence holds, cached prefixes included."""
    swap_blocks_cached: int = 0
    swap_evictions: int = 0
    """Cached prefix blocks that the host evicted."""
    swapped_out_blocks: int = 0
    """Blocks copied from the device to the host: of preempted sequences and of evicted prefixes."""
    swapped_in_blocks: int = 0
    prefix_lookup_tokens: int = 0
    """Tokens of all sequences that were admitted without blocks of their own."""
    prefix_hit_tokens: int = 0
    """The tokens among `prefix_lookup_tokens` that were found in the prefix cache, on device and host."""
    swap_hit_tokens: int = 0
    """The tokens among `prefix_hit_tokens` that were found on the host."""
    state_slots_total: int = 0
    """Slots for the states of recurrent layers; 0 if the model has no such layers."""
    state_slots_free: int = 0
    """State slots that no sequence holds, snapshots included."""
    state_snapshots: int = 0
    """State slots with a snapshot, from which prompts with the same beginning start."""
    state_hits: int = 0
    """Sequences that started from a snapshot."""
    state_evictions: int = 0
    """Snapshots that gave way to other states."""
    state_missed_tokens: int = 0
    """Tokens with cached blocks that were computed again, because no snapshot stood at their end."""
    window_blocks_total: int = 0
    """KV blocks of layers with windows, where these have blocks of their own; `kv_blocks_total` then has the others."""
    window_blocks_free: int = 0
    """Those that no sequence holds, cached ones included."""
    window_blocks_cached: int = 0
    window_evictions: int = 0
    """Cached ones that gave way to other windows."""
    window_missed_tokens: int = 0
    """Tokens with cached blocks that were computed again, because no cached window stood at their end."""
    drafted_tokens: int = 0
    """Drafted tokens that were computed."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""
    step_ms_p50: float = 0.0
    step_ms_p99: float = 0.0
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    """Failed steps that ran out of memory."""
    max_step_tokens: int = 0
    """Largest number of tokens in a step; below the configured limit after a step ran out of memory."""
    process_bytes: int = 0
    """Physical memory of the engine's process."""
    weight_bytes: int = 0
    """Memory of the model's weights; 0 if the runner does not know it."""
    arithmetic: str = ""
    """The runner and the formats of weights and KV cache with which it computes."""
    num_ranks: int = 1
    """Processes that compute the model together."""
    num_rank_losses: int = 0
    """Times that one of them was lost, and they were started again."""

    @property
    def page_utilization(self) -> float | None:
        """Share of the held blocks' slots that store a token; the rest is fragmentation. None if no block is held."""
        held = (self.kv_blocks_total - self.kv_blocks_free) * self.block_size
        return self.kv_tokens_used / held if held else None


SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0, 3600.0)
"""Upper bounds of the histograms of whole jobs and of their parts."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds of the histograms of the time of a token."""
JOB_TIMES: Mapping[str, tuple[float, ...]] = {
    "queue_s": SECONDS,
    "first_token_s": SECONDS,
    "inter_token_s": TOKEN_SECONDS,
}
"""The times of jobs that a node reports for the last hour, with the bounds of their histograms. They are the time from
the submission until a node took the job, that until the first token, and that between two outputs of a choice."""

# The open jobs of a pool by state and level.

RANKS_PART = "ranks"
"""The part of a node that is unhealthy while its ranks are started again, and only then."""
SCRIPTS_PART = "scripts"
"""The part of a node that is unhealthy while Redis refuses its calls, because of damaged data or a bug."""
STOPPING_PARTS = frozenset((RANKS_PART, SCRIPTS_PART))
"""A node takes no jobs while one of these is unhealthy, and is not ready."""

WaitState = Literal["queued", "scheduled", "awaiting_tokens", "awaiting_key"]
"""Why a job waits: for a node, its time (`not_before`), its tenant's tokens and rates, or its concurrency key."""
WAIT_STATES: tuple[WaitState, ...] = get_args(WaitState)
NO_JOBS: PerLevel = (0,) * NUM_LEVELS


@dataclass(frozen=True, slots=True)
class WaitingJobs:
    """The jobs that wait for one reason, per level, most urgent first."""

    count: PerLevel = NO_JOBS
    oldest_ms: PerLevel = NO_JOBS
    """How long the job that has waited the longest has done so; 0 without jobs. The wait of a scheduled job begins when
    it is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """The open jobs of a pool at one moment. Tuples have one entry per level, most urgent first."""

    waiting: Mapping[WaitState, WaitingJobs] = field(default_factory=lambda: dict.fromkeys(WAIT_STATES, WaitingJobs()))
    running: PerLevel = NO_JOBS
    """Jobs that live nodes hold, as these last reported."""
    cost: PerLevel = NO_JOBS
    """Predicted KV tokens of the queued jobs."""
    expired: PerLevel = NO_JOBS
    """Jobs that passed their deadline, since the pool was created."""
    backlog_s: tuple[float | None, float | None] = (0.0, 0.0)
    """Seconds in which the nodes complete the queued jobs, at their present pace: of foreground and of background work.
    None if there are queued jobs and the pace is unknown, and of a paused pool. A paused class does not count."""
    engine_shares: tuple[float, ...] | None = None
    """Share of the engines' time in the last minute; None if no engine ran a step."""

    @property
    def queued(self) -> PerLevel:
        """Number of jobs that wait for a node."""
        return self.waiting["queued"].count

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait, for whatever reason."""
        return sum(sum(jobs.count) for jobs in self.waiting.values())

    @property
    def background_share(self) -> float | None:
        """Share of background work in the engines' time in the last minute."""
        return None if self.engine_shares is None else sum(self.engine_shares[NUM_PRIORITIES:])

    def is_used(self, level: int) -> bool:
        """Return whether a level has open jobs, or had them in the last minute."""
        counts = [*(jobs.count[level] for jobs in self.waiting.values()), self.running[level]]
        return any(counts) or (self.engine_shares is not None and self.engine_shares[level] > 0)

    @property
    def longest_wait_ms(self) -> PerLevel:
        """The longest wait, for whatever reason."""
        waits = zip(*(jobs.oldest_ms for jobs in self.waiting.values()), strict=True)
        return tuple(max(of_level) for of_level in waits)


# Statistics of a pool for operators: queue lengths and waits, event counts, and the nodes' pressure records.

EVENTS = {
    "submitted": "jobs that were accepted",
    "refused_busy": "submissions that a limit of the pool refused",
    "refused_memory": "submissions that the limit of Redis's memory refused",
    "refused_tenant_limit": "submissions that a limit of their tenant refused",
    "refused_tenant_memory": "submissions that the limit of their tenant's memory refused",
    "ended_succeeded": "jobs that completed",
    "ended_failed": "jobs that failed",
    "ended_cancelled": "jobs that were canceled, or had no reader left",
    "ended_expired": "jobs that passed their deadline",
    "ended_dead": "jobs that became dead letters",
    "dead_letters": "jobs that lost their nodes too often without progress",
    "nodes_lost": "nodes that ended without leaving: silent for a lease, or declared dead by their successor",
    "mended_records": "damaged records of jobs that were mended",
    "damaged_keys": "keys of another type than the queue writes, which were deleted",
    "unknown_sums": "numbers that were lost with damaged data and count in a sum: run `penstock audit --repair`",
    "losses": "losses of running jobs: one for each job that a lost node ran, and none for a node without jobs",
    "takeovers": "jobs that a node took after another node had started or lost them",
    "fenced": "writes of a node for a job that another node holds",
    "given_back_drain": "jobs that a node gave back because it was draining",
    "given_back_pressure": "jobs that a node gave back because another node had capacity for them",
    "given_back_lacking": "jobs that a node gave back because it lacks their adapter, or does not know a field of them",
    "given_back_lost": "jobs that a node gave back because one of its ranks ended during their step",
    "given_back_failed": "jobs that a node gave back for another attempt, after an error of its own",
    "output_rejected": "jobs whose output their check refused, and that another job took the place of",
    "given_back_unlisted": "jobs assigned to a node that did not know of them",
    "webhooks_dropped": "ends of jobs that no webhook tells of, because their tenant had 100,000 of them in the pool",
    "clock_jumps": "jumps of Redis's clock, such as after a fail-over to another machine",
    "sweep_resets": "sweeps after half a lease without one: Redis was unreachable, or no process was running",
}
"""Counters in P:counts, with their help texts."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment."""

    pool: str
    queue: QueueState
    num_open: int
    counts: Mapping[str, int]
    """Number of occurrences of each of `EVENTS` since the pool was created."""
    nodes: tuple[NodePressure, ...]
    """Pressure records of the live nodes."""
    kept: Mapping[str, int] = field(default_factory=dict)
    """Tenant → bytes of Redis memory, of its jobs as stored, and what its running jobs may still write."""
    paused_ms: Mapping[str, int] = field(default_factory=dict)
    """What is paused, `pool`, `class` or `tenant` → how long the oldest such pause has lasted."""
    pauses: tuple[Pause, ...] = ()


AWAY, NO_RIGHTS = "away", "no_rights"
REDIS_STATES: Mapping[str, str] = {
    AWAY: "it does not answer",
    "loading": "it loads its data from disk",
    "read_only": "this server is a replica",
    "disk_full": "it cannot write to its disk",
    "no_replicas": "too few replicas are connected to it",
    NO_RIGHTS: "it refuses this user, its password or a command",
    "full": "its memory is full",
    "slow": "it is busy, or answers late",
}
"""The problems that Redis may have, with what they mean. Each has this one name in logs, `/ready`, metrics, alerts and
ops/RUNBOOK.md."""


@dataclass(frozen=True, slots=True)
class RedisState:
    """Redis at one moment, as it reports itself."""

    used_bytes: int
    max_bytes: int
    """0: no limit."""
    run_id: str = ""
    """Differs between two processes of Redis; another one answers after a restart or a fail-over."""
    is_aof_on: bool = False
    is_aof_ok: bool = True
    """Whether the last write to the append-only file succeeded."""
    is_snapshot_ok: bool = True
    """Whether the last snapshot succeeded; true without one."""
    delayed_fsyncs: int = 0
    """Writes to the append-only file that waited for a slow disk, since Redis started."""
    num_replicas: int = 0
    replica_lag_s: float | None = None
    """Seconds since the replica that is furthest behind acknowledged anything; None without replicas."""
    replica_lag_bytes: int | None = None
    """Bytes of the replication stream that it has not acknowledged; None without replicas."""
    is_loading: bool = False
    """Whether it still loads its data from disk."""
    is_replica: bool = False
    num_good_replicas: int | None = None
    """Replicas that are near enough for `min-replicas-to-write`; None if that is not set."""
    aof_bytes: int = 0
    """Size of the append-only file; 0 without one."""
    aof_base_bytes: int = 0
    """Its size after the last rewrite. Redis rewrites it once it has grown by `auto-aof-rewrite-percentage` of that."""


# The state of a pool at one moment, for the dashboard: its queue, its nodes and its newest events.


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An entry of P:events. Names that an event does not have are empty."""

    at_ms: int
    kind: str
    """`node_joined`, `node_left`, `node_lost`, `takeover` or `dead_letter`."""
    node_id: str
    """The node that joined, left, was lost, or took over the job."""
    job_id: str
    source: str
    """The node from which the job moved."""
    reason: str
    """Why the job moved; see `PastLease`."""


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A node that sent a heartbeat within a lease."""

    pressure: NodePressure
    silent_ms: int
    """Milliseconds since its last heartbeat."""


@dataclass(frozen=True, slots=True)
class PoolActivity:
    """A pool at one moment."""

    pool: str
    queue: QueueState
    queued_of_tenants: Mapping[str, int]
    """Queued jobs of the tenants that wait for the most KV tokens."""
    counts: Mapping[str, int]
    """Number of occurrences of each of `EVENTS` since the pool was created."""
    nodes: tuple[LiveNode, ...]
    events: tuple[PoolEvent, ...]
    """The newest events, oldest first."""
    now_ms: int
    """The pool's time when all this was read."""
    pauses: tuple[Pause, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A served model as clients see it; stored in P:record.

    `max_token_bytes` is the length of the longest token's text, 0 if unknown. The format, the parser and
    `thinking_switches` say how to read the model's texts (`reasoning_parser_for`). `adapters` maps names to digests:
    those of the announcing node, or of all nodes in `ProducerBroker.pools`. `kinds` are the kinds of jobs that the
    announcing node knows.
    """

    pool: str
    model: str
    aliases: tuple[str, ...] = ()
    max_model_len: int = 0
    created_s: int = 0
    revision: str = ""
    max_token_bytes: int = 0
    tool_format: ToolFormat = NO_CALLS
    reasoning_parser: str = "none"
    # Of one request.
    adapters: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = (GENERATE,)
    thinking_switches: tuple[str, ...] = ()
    # Of one request.
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    """The sampling of requests that do not set it, by the names of `SamplingParams`."""
    capabilities: tuple[str, ...] = ()
    """What the model's files say it is good for: `chat`, `completion`, `tools`, `embed`, `score`, `classify`. Empty:
    not known."""
    takes_effort: bool = False
    """Whether the chat template has the variable of a reasoning effort."""
    moved_messages: tuple[ChatShape, ...] = ()
    """The shapes of chats whose messages a node merges or moves, because the model's chat template refuses them."""
    tool_format_reason: str = ""
    """Why the node chose this format of calls."""
    texts_per_job: int = 1
    """Most texts of one job; above 1 for an encoder."""
    dimensions: int = 0
    """Numbers of an embedding; 0: not known."""
    similarity: str = "cosine"
    """How two embeddings are compared: `cosine`, `dot`, `euclidean` or `manhattan`."""


def notice_of(record: PoolRecord | None, task: Task | None) -> str:
    """Return a notice if the model's files do not claim this use of the model; empty otherwise."""
    use = "completion" if task is None else task.kind
    if record is None or not record.capabilities or use in (*record.capabilities, "tokenize", "detokenize"):
        return ""
    return f"the model's files say that it is for {', '.join(record.capabilities)}, not for {use}"


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool's entry in penstock:pools: the names, beside its own, that its record may claim; None: all of them."""

    pool: str
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodePressure(EngineLoad):
    """A node's pressure record: the load of its engine, its jobs and its speed. Admission and metrics read it."""

    node_id: str
    num_jobs: int = 0
    jobs_by_level: PerLevel = ()
    # Of one request.
    jobs_by_tenant: dict[str, int] = field(default_factory=dict)
    """Number of held jobs of the tenants with the most. `jobs_by_level` counts all jobs, most urgent level first."""
    max_num_seqs: int = 0
    kv_tokens_available: int = 0
    """KV tokens that taken jobs neither use now nor are expected to need later."""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    sequences_available: int | None = None
    """Sequences that it can still take; None from a node of an earlier release."""
    drain_cost_per_s: float = 0.0
    """The pace: predicted KV tokens of queued foreground jobs that it completes per second while these wait."""
    background_cost_per_s: float = 0.0
    """The same of background jobs while no foreground jobs wait; 0 from a node of an earlier release."""
    pace_spreads: tuple[float, ...] = ()
    """Standard errors of the logarithms of both paces."""
    preemptions_per_s: float = 0.0
    prefix_hit_rate: float | None = None
    """Share of the prompt tokens of the last minute that the prefix cache had; None if no prompt began."""
    gpu_utilization: float | None = None
    """Share of the driver's last sample period in which a kernel ran on the GPU; None: unknown, or no GPU."""
    gpu_memory_used_bytes: int = 0
    """Memory of the GPU that is in use, by any process."""
    gpu_memory_total_bytes: int = 0
    recent_engine_ms: tuple[float, ...] = ()
    """Milliseconds of the engine's steps in the last minute, per level of the jobs; empty if it is not known."""
    stage_idle: tuple[float, ...] = ()
    """By stage of several ranks: the share of the time of steps in which its ranks waited, on average in the last
    minute. Empty if no step ran, or if it is not known."""
    rank_exchange_ms: float | None = None
    """Milliseconds of a step that ranks spent at exchanges, on average in the last minute, without waiting for a slower
    rank. None if no step ran, or if it is not known."""
    rank_wait_ms: float | None = None
    """Milliseconds of a step that ranks waited for a slower rank or for another stage; else as above."""
    rank_weight_bytes: tuple[int, ...] = ()
    """By rank: bytes of its part of the weights; empty if it is not known."""
    rank_kv_bytes: tuple[int, ...] = ()
    """By rank: bytes of its part of the KV blocks; empty if it is not known."""
    num_steps: int = 0
    mean_batch: float = 0.0
    """Sequences per step, over the steps since the last record."""
    max_model_len: int = 0
    revision: str = ""
    draining: bool = False
    predicted_outputs: tuple[tuple[int, int, int], ...] = ()
    """(bit length of prompt tokens, bit length of max_tokens, output tokens that 9 of 10 such choices stay within)."""
    # Of one request.
    times_of_hour: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """How many times of the last hour were in each bucket of a histogram, by the names and bounds of `JOB_TIMES`."""
    # Of one request.
    troubles: dict[str, str] = field(default_factory=dict)
    """Parts of the node that are unhealthy → the reason."""
    # Of one request.
    past_troubles: dict[str, str] = field(default_factory=dict)
    """Parts that were unhealthy in the last 30 s and are not now → the reason."""

    @property
    def takes_jobs(self) -> bool:
        """Whether it would compute a job now: it is not draining, all its ranks live, and Redis answers its calls."""
        return not self.draining and STOPPING_PARTS.isdisjoint(self.troubles)


@dataclass(frozen=True, slots=True)
class PoolPressure:
    """Input of admission: live nodes' pressure records, and queued jobs and their cost per level."""

    nodes: tuple[NodePressure, ...] = ()
    backlog_cost: PerLevel = (0,) * NUM_LEVELS
    num_queued: PerLevel = (0,) * NUM_LEVELS
