"""The dashboards of queues and tenants, and of batches.

Every gateway reports the same values of the queue, so they are aggregated with max before anything is summed.
"""

from __future__ import annotations

from observe.records import OF_POOL, POOL, Board, Row, event, graph, number, quantiles

_FOREGROUND = 'state="queued",background="false",pool=~"$pool"'


def _of_level(series: str) -> str:
    return f"max by (pool, priority, background) ({series})"


_OF_STATE = 'max by (pool, priority, background, state) (penstock_queue_depth{pool=~"$pool"})'
_QUEUED = 'max by (pool, priority, background) (penstock_queue_depth{state="queued",pool=~"$pool"})'

_EXPIRED = _of_level(f"rate(penstock_queue_expired_total{OF_POOL}[$__rate_interval])")

QUEUES = Board(
    "penstock-queue",
    "penstock: queues and tenants",
    "What waits, for how long, and whose it is. docs/QUEUE.md explains the states.",
    (
        Row(
            "Queue",
            (
                graph(
                    "Open jobs by state", "none", "Of all chosen pools.", (f"sum by (state) ({_OF_STATE})", "{{state}}")
                ),
                graph(
                    "Queued jobs by class",
                    "none",
                    "Jobs that wait for a node.",
                    (f"sum by (priority, background) ({_QUEUED})", "{{priority}}, background {{background}}"),
                ),
                graph(
                    "Longest wait",
                    "s",
                    "Of the queued foreground jobs, by class.",
                    (f"max by (priority) (penstock_queue_age_seconds{{{_FOREGROUND}}})", "{{priority}}"),
                ),
                graph(
                    "Backlog",
                    "s",
                    "Seconds in which the nodes complete what is queued. No line while the pace is unknown.",
                    (
                        'max by (pool, background) (penstock_queue_backlog_seconds{pool=~"$pool"})',
                        "{{pool}}, background {{background}}",
                    ),
                ),
                graph(
                    "Queued KV tokens",
                    "none",
                    "By class.",
                    (f"sum by (priority) ({_of_level('penstock_queue_cost_tokens' + OF_POOL)})", "{{priority}}"),
                ),
                graph(
                    "Share of the engines' time",
                    "percentunit",
                    "In the last minute, by class and kind. No line while the engines rest.",
                    (
                        _of_level(f"penstock_queue_engine_share_ratio{OF_POOL}"),
                        "{{pool}} {{priority}}, background {{background}}",
                    ),
                ),
                graph(
                    "Expired jobs",
                    "ops",
                    "Jobs that passed their deadline, per second.",
                    (f"sum by (priority) ({_EXPIRED})", "{{priority}}"),
                ),
                graph(
                    "Accepted and refused",
                    "ops",
                    "Submissions per second, as the queue decided.",
                    *map(
                        event,
                        (
                            "submitted",
                            "refused_busy",
                            "refused_memory",
                            "refused_tenant_limit",
                            "refused_tenant_memory",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Tenants",
            (
                graph(
                    "Memory in Redis",
                    "bytes",
                    "Jobs and results of the ten tenants with the most.",
                    (
                        'topk(10, max by (pool, tenant) (penstock_tenant_kept_bytes{pool=~"$pool"}))',
                        "{{tenant}} ({{pool}})",
                    ),
                ),
                graph(
                    "Refused for a tenant's limit",
                    "ops",
                    "Per second.",
                    event("refused_tenant_limit"),
                    event("refused_tenant_memory"),
                ),
                graph(
                    "Webhooks",
                    "ops",
                    "Ended attempts to deliver, per second.",
                    ("max(rate(penstock_webhooks_delivered_total[$__rate_interval]))", "delivered"),
                    ("max(rate(penstock_webhooks_retried_total[$__rate_interval]))", "retried"),
                    ("max(rate(penstock_webhooks_dead_total[$__rate_interval]))", "given up"),
                ),
                graph(
                    "Webhooks that wait",
                    "none",
                    "Deliveries that wait for their next attempt, by tenant.",
                    ("topk(10, max by (tenant) (penstock_webhooks_pending))", "{{tenant}}"),
                    needs="a webhook that waits",
                ),
            ),
        ),
    ),
    (POOL,),
)

BATCHES = Board(
    "penstock-batches",
    "penstock: batches",
    "Stored batches, batch files and Celery tasks, and the streams of completions.",
    (
        Row(
            "Batches",
            (
                number(
                    "Rows left",
                    "none",
                    "Of open stored batches, as the gateways know them.",
                    'max(penstock_batch_rows_left{job="penstock-gateway"})',
                ),
                number(
                    "Rows left in files",
                    "none",
                    "Of the batch files that workers run.",
                    'sum(penstock_batch_rows_left{job="penstock-worker"})',
                ),
                number(
                    "Tasks that wait",
                    "none",
                    "Celery tasks that no worker has taken.",
                    "max(penstock_batch_tasks_waiting)",
                ),
                graph(
                    "Rows",
                    "ops",
                    "Finished rows per second, by result.",
                    ("sum by (result) (rate(penstock_batch_rows_total[$__rate_interval]))", "{{result}}"),
                ),
                graph(
                    "Rows left",
                    "none",
                    "Of open stored batches.",
                    ('max(penstock_batch_rows_left{job="penstock-gateway"})', "rows"),
                ),
                graph(
                    "Tokens",
                    "ops",
                    "Of answered rows, per second.",
                    ("sum by (kind) (rate(penstock_batch_tokens_total[$__rate_interval]))", "{{kind}}"),
                ),
                graph(
                    "Submitted and refused",
                    "ops",
                    "A refused row is submitted again later; the queue was full or away.",
                    ("sum(rate(penstock_batch_jobs_submitted_total[$__rate_interval]))", "submitted"),
                    ("sum(rate(penstock_batch_refusals_total[$__rate_interval]))", "refused"),
                ),
            ),
        ),
        Row(
            "Celery tasks",
            (
                graph(
                    "Ends",
                    "ops",
                    "Runs of tasks per second, by state.",
                    ("sum by (task, state) (rate(penstock_batch_tasks_total[$__rate_interval]))", "{{task}} {{state}}"),
                ),
                graph("Time of a task", "s", "By task.", *quantiles("penstock_batch_task_seconds", "task")),
                graph(
                    "Running",
                    "none",
                    "Tasks that run now.",
                    ("sum by (task) (penstock_batch_tasks_running)", "{{task}}"),
                ),
            ),
        ),
        Row(
            "Completions",
            (
                graph(
                    "Readers", "none", "Open streams of /v1/jobs/events.", ("sum(penstock_completion_feeds)", "streams")
                ),
                graph(
                    "Lag",
                    "s",
                    "Age of the oldest completion that a reader has not taken.",
                    ("max(penstock_completion_feed_lag_seconds)", "lag"),
                ),
            ),
        ),
    ),
)
