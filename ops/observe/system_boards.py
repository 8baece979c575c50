"""The dashboards of the fleet and of one node.

Metrics that every gateway reads from Redis are aggregated with max, those that a process counts itself with sum.
`ops/METRICS.md` says which is which.
"""

from __future__ import annotations

from observe.records import OF_POOL, POOL, Board, Panel, Row, Variable, event, graph, number, quantiles

_NODE = Variable("node", "Node", "label_values(penstock_node_info, instance)")
_OF_NODE = '{instance=~"$node"}'


def _per_pool(metric: str) -> str:
    return f"max by (pool) ({metric}{OF_POOL})"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{_OF_NODE}[$__rate_interval]))"


def _per_node(title: str, metric: str, description: str) -> Panel:
    return graph(title, "ops", description, (_rate(metric, "instance"), "{{instance}}"))


FLEET = Board(
    "penstock-fleet",
    "penstock: fleet",
    "Callers, pools and Redis. Start here when something is wrong.",
    (
        Row(
            "Now",
            (
                number(
                    "Live nodes",
                    "none",
                    "Nodes with a heartbeat within their lease.",
                    _per_pool("penstock_nodes"),
                    "{{pool}}",
                ),
                number("Open jobs", "none", "Jobs that wait or run.", _per_pool("penstock_open_jobs"), "{{pool}}"),
                number("Open streams", "none", "Streams of all gateways.", "sum(penstock_http_open_streams)"),
                number("Redis answers", "none", "1: every gateway reaches Redis.", "min(penstock_redis_up)"),
            ),
        ),
        Row(
            "Callers",
            (
                graph(
                    "Requests by status",
                    "reqps",
                    "Answered HTTP requests. A stream that fails after its first byte counts under its code as well.",
                    ("sum by (status) (rate(penstock_http_requests_total[$__rate_interval]))", "{{status}}"),
                ),
                graph(
                    "Errors by code",
                    "reqps",
                    "The runbook's first table explains each code.",
                    ("sum by (code) (rate(penstock_http_refusals_total[$__rate_interval]))", "{{code}}"),
                ),
                graph(
                    "Streams that fail",
                    "reqps",
                    "Streams that ended with an error of the server after their status 200, by code.",
                    ("sum by (code) (rate(penstock_http_failed_streams_total[$__rate_interval]))", "{{code}}"),
                    needs="a stream that failed",
                ),
                graph(
                    "Admission",
                    "reqps",
                    "What gateways decided of submitted jobs.",
                    ("sum by (decision) (rate(penstock_admission_decisions_total[$__rate_interval]))", "{{decision}}"),
                ),
                graph(
                    "Time to first token",
                    "s",
                    "From a request's body to the first token, as callers see it.",
                    *quantiles("penstock_time_to_first_token_seconds"),
                ),
                graph(
                    "Time per output token",
                    "s",
                    "Mean of a stream after its first token.",
                    *quantiles("penstock_time_per_output_token_seconds"),
                ),
                graph(
                    "Event loop held",
                    "s",
                    "Longest time for which a gateway's event loop ran one piece of work. Above 0.05 s is a bug.",
                    ('max by (instance) (penstock_gateway_loop_hold_seconds{clock="cpu"})', "{{instance}}"),
                ),
            ),
        ),
        Row(
            "Pools",
            (
                graph(
                    "Tokens",
                    "ops",
                    "Tokens that all nodes computed per second.",
                    ("sum(rate(penstock_engine_prefill_tokens_total[$__rate_interval]))", "prompt"),
                    ("sum(rate(penstock_engine_decode_tokens_total[$__rate_interval]))", "output"),
                ),
                graph(
                    "KV cache in use",
                    "percentunit",
                    "Share of the blocks of a pool's live nodes that sequences hold.",
                    (f"1 - {_per_pool('penstock_kv_blocks_free')} / {_per_pool('penstock_kv_blocks')}", "{{pool}}"),
                ),
                graph(
                    "Live nodes",
                    "none",
                    "Steps down are deaths or scale-in.",
                    (_per_pool("penstock_nodes"), "{{pool}}"),
                ),
                graph(
                    "Ends of jobs",
                    "ops",
                    "Ended jobs per second by how they ended.",
                    *map(event, ("ended_succeeded", "ended_failed", "ended_cancelled", "ended_expired", "ended_dead")),
                ),
                graph(
                    "Moves of jobs",
                    "ops",
                    "Jobs that changed their node, and lost nodes, per second.",
                    *map(event, ("nodes_lost", "losses", "takeovers", "given_back_drain", "given_back_pressure")),
                ),
                graph(
                    "Dead letters",
                    "none",
                    "Jobs that lost too many nodes without progress, since the pool was made.",
                    (_per_pool("penstock_pool_dead_letters_total"), "{{pool}}"),
                ),
            ),
        ),
        Row(
            "Redis",
            (
                graph(
                    "Memory",
                    "bytes",
                    "Background jobs are refused at 60 % of the limit, batch jobs at 80 %, all jobs at 90 %.",
                    ("max(penstock_redis_used_bytes)", "used"),
                    ("max(penstock_redis_max_bytes)", "limit"),
                ),
                graph(
                    "Problem",
                    "none",
                    "1: Redis is in that state. The runbook has a row for each.",
                    ("max by (redis, state) (penstock_redis_problem) > 0", "{{redis}}: {{state}}"),
                    needs="a problem of Redis",
                ),
                graph(
                    "Append-only file",
                    "bytes",
                    "By default Redis rewrites it at twice its size after the last rewrite.",
                    ("max(penstock_redis_aof_bytes)", "now"),
                    ("max(penstock_redis_aof_base_bytes)", "after the last rewrite"),
                ),
                graph(
                    "Clocks",
                    "s",
                    "By how much Redis's clock is ahead of that of each gateway and node.",
                    ("max by (instance) (penstock_gateway_clock_offset_seconds)", "{{instance}}"),
                    ("max by (instance) (penstock_node_clock_offset_seconds)", "{{instance}}"),
                ),
                graph(
                    "Files on disk",
                    "none",
                    "0: the last write to the append-only file, or the last snapshot, failed.",
                    ("min by (kind) (penstock_redis_persistence_ok)", "{{kind}}"),
                ),
                graph(
                    "Delayed fsyncs, changes",
                    "ops",
                    "Writes that waited for a slow disk, and restarts or fail-overs of Redis.",
                    ("max(rate(penstock_redis_delayed_fsyncs_total[$__rate_interval]))", "delayed fsyncs"),
                    ("max(rate(penstock_redis_changes_total[$__rate_interval]))", "changes"),
                ),
                graph(
                    "Replicas",
                    "none",
                    "Replicas that are connected to the Redis that answers.",
                    ("max(penstock_redis_replicas)", "replicas"),
                ),
                graph(
                    "Replication lag",
                    "s",
                    "Seconds since the slowest replica acknowledged anything.",
                    ("max(penstock_redis_replica_lag_seconds)", "lag"),
                    needs="a replica of Redis",
                ),
            ),
        ),
    ),
    (POOL,),
)

NODES = Board(
    "penstock-node",
    "penstock: node",
    "The engine, the jobs and the process of the chosen nodes.",
    (
        Row(
            "Engine",
            (
                _per_node("Steps", "penstock_engine_steps_total", "Steps of the engine per second."),
                graph(
                    "Time of a step",
                    "s",
                    "Of all chosen nodes.",
                    *quantiles("penstock_engine_step_seconds", of=_OF_NODE),
                ),
                graph(
                    "Sequences in a step",
                    "none",
                    "Mean size of the batch.",
                    (
                        f"{_rate('penstock_engine_batch_sequences_sum', 'instance')}"
                        f" / {_rate('penstock_engine_batch_sequences_count', 'instance')}",
                        "{{instance}}",
                    ),
                ),
                _per_node(
                    "Prompt tokens", "penstock_engine_prefill_tokens_total", "Computed prompt tokens per second."
                ),
                _per_node("Output tokens", "penstock_engine_decode_tokens_total", "Sampled tokens per second."),
                graph(
                    "Where a step's time goes",
                    "percentunit",
                    "Seconds per second in each part of a step.",
                    (_rate("penstock_engine_step_part_seconds_total", "part"), "{{part}}"),
                ),
                graph(
                    "Foreground and background",
                    "percentunit",
                    "Seconds per second of steps by the kind of their work.",
                    (_rate("penstock_engine_step_kind_seconds_total", "kind"), "{{kind}}"),
                ),
                graph(
                    "Drafted and accepted tokens",
                    "ops",
                    "Speculative decoding; 0 without it.",
                    (_rate("penstock_engine_drafted_tokens_total", "instance"), "drafted {{instance}}"),
                    (_rate("penstock_engine_accepted_tokens_total", "instance"), "accepted {{instance}}"),
                ),
                graph(
                    "Ranks wait",
                    "percentunit",
                    "Share of the time that a rank waits for the slowest one, which never waits itself.",
                    (
                        f"rate(penstock_engine_rank_waited_seconds{_OF_NODE}[$__rate_interval])",
                        "{{instance}} rank {{rank}}",
                    ),
                    needs="a node with --tensor-parallel-size",
                ),
                graph(
                    "Stages are idle",
                    "percentunit",
                    "Share of the time of steps that the ranks of a stage wait, on average.",
                    (
                        f"avg by (instance, stage) "
                        f"(rate(penstock_engine_rank_waited_seconds{_OF_NODE}[$__rate_interval]))"
                        f" / on (instance) group_left "
                        f"rate(penstock_engine_rank_step_seconds{_OF_NODE}[$__rate_interval])",
                        "{{instance}} stage {{stage}}",
                    ),
                    needs="a node with --tensor-parallel-size or --pipeline-parallel-size",
                ),
                graph(
                    "Exchanges of a step",
                    "s",
                    "Mean time of a step that ranks spend at exchanges, and that they wait for others.",
                    *(
                        (
                            f"avg by (instance) (rate({series}{_OF_NODE}[$__rate_interval]))"
                            f" / on (instance) rate(penstock_engine_rank_steps{_OF_NODE}[$__rate_interval])",
                            f"{{{{instance}}}} {name}",
                        )
                        for name, series in (
                            ("exchanges", "penstock_engine_rank_exchanged_seconds"),
                            ("waits", "penstock_engine_rank_waited_seconds"),
                        )
                    ),
                    needs="a node with --tensor-parallel-size or --pipeline-parallel-size",
                ),
                graph(
                    "Memory of ranks",
                    "bytes",
                    "What each rank holds of the weights and of the KV blocks.",
                    (f"penstock_engine_rank_weight_bytes{_OF_NODE}", "{{instance}} rank {{rank}} weights"),
                    (f"penstock_engine_rank_kv_bytes{_OF_NODE}", "{{instance}} rank {{rank}} KV blocks"),
                    needs="a node with --tensor-parallel-size or --pipeline-parallel-size",
                ),
            ),
        ),
        Row(
            "KV cache",
            (
                graph(
                    "In use",
                    "percentunit",
                    "Share of the blocks.",
                    (f"penstock_engine_kv_usage_ratio{_OF_NODE}", "{{instance}}"),
                ),
                graph(
                    "Utilization and fragmentation of held blocks",
                    "percentunit",
                    "Share of their slots that store a token, and the share behind the last token of each sequence.",
                    (f"penstock_engine_page_utilization_ratio{_OF_NODE}", "utilization {{instance}}"),
                    (f"1 - penstock_engine_page_utilization_ratio{_OF_NODE}", "fragmentation {{instance}}"),
                ),
                graph(
                    "Memory of the model and of the KV cache",
                    "bytes",
                    "The model's weights, and the blocks of the KV cache on the device and on the host.",
                    (f"penstock_engine_model_bytes{_OF_NODE}", "model {{instance}}"),
                    (f"penstock_engine_kv_cache_bytes{_OF_NODE}", "KV cache {{instance}} {{tier}}"),
                ),
                graph(
                    "Prefix cache",
                    "ops",
                    "Tokens that were looked up and found, per second.",
                    (_rate("penstock_engine_prefix_lookup_tokens_total", "instance"), "looked up {{instance}}"),
                    (_rate("penstock_engine_prefix_hit_tokens_total", "instance"), "found {{instance}}"),
                ),
                graph(
                    "Preemptions and evictions",
                    "ops",
                    "Sequences that made way for others, and cached blocks that were dropped, per second.",
                    (_rate("penstock_engine_preemptions_total", "instance"), "preemptions {{instance}}"),
                    (_rate("penstock_engine_kv_evictions_total", "instance"), "evictions {{instance}}"),
                ),
            ),
        ),
        Row(
            "Jobs",
            (
                graph(
                    "Wait in the queue",
                    "s",
                    "Until the first node took the job.",
                    *quantiles("penstock_job_queue_seconds", "priority", _OF_NODE),
                ),
                graph(
                    "Prefill",
                    "s",
                    "From then until the first token.",
                    *quantiles("penstock_job_prefill_seconds", of=_OF_NODE),
                ),
                graph(
                    "Between tokens",
                    "s",
                    "Between two outputs of a choice.",
                    *quantiles("penstock_job_inter_token_seconds", of=_OF_NODE),
                ),
                graph(
                    "Ends",
                    "ops",
                    "Ended jobs per second by reason.",
                    (_rate("penstock_job_ends_total", "reason"), "{{reason}}"),
                ),
                graph(
                    "Held jobs", "none", "Jobs that the node runs.", (f"penstock_node_jobs{_OF_NODE}", "{{instance}}")
                ),
                graph(
                    "Calls to Redis",
                    "s",
                    "Time of the calls that send tokens.",
                    *quantiles("penstock_node_emit_seconds", of=_OF_NODE),
                ),
            ),
        ),
        Row(
            "Process",
            (
                graph(
                    "CPU",
                    "percentunit",
                    "Cores in use.",
                    (f"rate(process_cpu_seconds_total{_OF_NODE}[$__rate_interval])", "{{instance}}"),
                ),
                graph(
                    "Memory", "bytes", "Resident memory.", (f"process_resident_memory_bytes{_OF_NODE}", "{{instance}}")
                ),
                graph(
                    "Event loop held",
                    "s",
                    "Longest time for which the event loop ran one piece of work.",
                    (
                        'max by (instance) (penstock_node_loop_hold_seconds{clock="cpu",instance=~"$node"})',
                        "{{instance}}",
                    ),
                ),
                graph(
                    "Unsent bytes",
                    "bytes",
                    "Chunks that Redis has not taken yet.",
                    (f"penstock_node_unsent_bytes{_OF_NODE}", "{{instance}}"),
                ),
                graph(
                    "GPU",
                    "percentunit",
                    "Share of the time in which a kernel ran.",
                    (f"penstock_gpu_utilization_ratio{_OF_NODE}", "{{instance}}"),
                    needs="a GPU",
                ),
                graph(
                    "Memory of the GPU",
                    "bytes",
                    "In use, by any process.",
                    (f"penstock_gpu_memory_used_bytes{_OF_NODE}", "used {{instance}}"),
                    (f"penstock_gpu_memory_total_bytes{_OF_NODE}", "all {{instance}}"),
                    needs="a GPU",
                ),
            ),
        ),
    ),
    (_NODE,),
)
