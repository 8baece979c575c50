"""The metrics that vLLM's production stack queries, in its Grafana dashboards and its KEDA triggers, have data.

The list was made from the 45 queries of github.com/vllm-project/production-stack: the two dashboards in
`helm/dashboards`, the one of the tutorial for EKS, and the triggers of the autoscaling tutorials. Labels that
Kubernetes adds to what it scrapes, such as `namespace` and `endpoint`, are left out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import free_port
from fixtures.tiny_model import make_tiny_model
from prometheus_client.parser import text_string_to_metric_families

MODEL = "demo"
OF_MODEL = {"model_name": MODEL}
HISTOGRAMS = ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_time_per_output_token_seconds")
SUMS = (
    *("request_decode_time_seconds", "request_prefill_time_seconds", "request_queue_time_seconds"),
    *("request_max_num_generation_tokens", "time_per_output_token_seconds"),
)
COUNTERS = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
GAUGES = ("num_requests_running", "num_requests_swapped", "num_requests_waiting", "kv_cache_usage_perc")
OF_NODE = [
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
    *(f"vllm:{name}_{part}" for name in SUMS for part in ("sum", "count")),
    *("vllm:request_generation_tokens_bucket", "vllm:request_prompt_tokens_bucket"),
    *(f"vllm:{name}" for name in (*COUNTERS, *GAUGES)),
    *("vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total"),
]
OF_GATEWAY = {
    "vllm:healthy_pods_total": {"server": MODEL},
    "vllm:num_incoming_requests_total": {"model": MODEL},
    "vllm:current_qps": {},
    "router_cpu_usage_percent": {},
    "router_disk_usage_percent": {},
    "router_memory_usage_percent": {},
}
CAN_BE_ZERO = {f"vllm:{name}" for name in (*GAUGES, "gpu_cache_usage_perc")}

Samples = list[tuple[str, dict[str, str], float]]


def scrape(url: str) -> Samples:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def values_of(samples: Samples, name: str, labels: dict[str, str]) -> list[float]:
    return [value for found, its, value in samples if found == name and labels.items() <= its.items()]


def scrape_until_counted(url: str, *, num_jobs: int) -> Samples:
    deadline_s = time.monotonic() + 10
    ended = OF_MODEL | {"finished_reason": "length"}
    while values_of(samples := scrape(url), "vllm:request_success_total", ended) != [num_jobs]:
        assert time.monotonic() < deadline_s, samples
        time.sleep(0.05)
    return samples


@pytest.mark.slow
def test_every_metric_that_dashboards_and_autoscalers_query_has_data(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    settings: dict[str, Any] = {
        "model": str(make_tiny_model(tmp_path / MODEL)),
        "pool": MODEL,
        "kv_cache_gib": 0.01,
        "metrics_port": port,
    }
    with NodeProcess(redis_url, **settings), GatewayProcess(redis_url) as gateway:
        body = {"model": MODEL, "prompt": "The gate opens. " * 20, "max_tokens": 8, "ignore_eos": True}
        for _ in range(2):
            httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).raise_for_status()
        of_gateway = scrape(gateway.url)
        # A node counts a job after the caller has its answer.
        node = scrape_until_counted(f"http://127.0.0.1:{port}", num_jobs=2)
    for name in OF_NODE:
        values = values_of(node, name, OF_MODEL)
        assert values and (max(values) > 0 or name in CAN_BE_ZERO), name
    for name, labels in OF_GATEWAY.items():
        assert values_of(of_gateway, name, labels), name
    assert values_of(of_gateway, "vllm:num_incoming_requests_total", {"model": MODEL}) == [2]
