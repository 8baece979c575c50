"""Scale from zero: the scaler's query, and a replay of its arithmetic with the numbers of the ScaledObject.

The replay follows KEDA 2.20 (`pkg/scaling/executor`, `pkg/fallback`) and the HorizontalPodAutoscaler: KEDA polls, and
decides between none and one; the autoscaler decides among more.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ops.kubernetes_files import KUBECTL, resource
from tests.source_tree import ROOT

LOAD_S = 600
SYNC_S = 15
"""Seconds between two decisions of the autoscaler."""
TOLERANCE = 0.1
JOBS_OF_NODE = 16
PROMTOOL = shutil.which("promtool")
Reading = float | None
"""What the query returns: a number, or None for an error."""

pytestmark = [pytest.mark.process, pytest.mark.skipif(KUBECTL is None, reason="needs kubectl (kubectl kustomize)")]


@pytest.fixture(scope="module")
def scaled_object() -> dict[str, Any]:
    spec: dict[str, Any] = resource("gpu-from-zero", "ScaledObject", "qwen-node")["spec"]
    return spec


@dataclass
class Scaler:
    """KEDA and the autoscaler that it makes, for one pool."""

    spec: dict[str, Any]
    replicas: int = 0
    _failures: int = 0
    _active_s: float = -math.inf
    _wishes: list[tuple[float, int]] = field(default_factory=list)
    _removed_s: float = -math.inf

    @property
    def threshold(self) -> float:
        return float(self.spec["triggers"][0]["metadata"]["threshold"])

    def poll(self, now_s: float, reading: Reading) -> None:
        """KEDA's turn: start a first node, or stop the last one."""
        fallback = self.spec["fallback"]
        self._failures = self._failures + 1 if reading is None else 0
        is_fallback = self._failures > fallback["failureThreshold"]
        if is_fallback or (reading is not None and reading > 0):
            self._active_s = now_s
            self.replicas = max(self.replicas, 1)
        elif reading is None and fallback["replicas"] > 0:
            return
        elif self.replicas and now_s - self._active_s > self.spec["cooldownPeriod"]:
            self.replicas = self.spec["minReplicaCount"]

    def sync(self, now_s: float, reading: Reading) -> None:
        """The autoscaler's turn. It rests while there are no nodes."""
        if not self.replicas:
            self._wishes.clear()
            return
        if reading is None:
            if self._failures <= self.spec["fallback"]["failureThreshold"]:
                return
            assert self.spec["fallback"]["behavior"] == "currentReplicasIfHigher"
            reading = max(self.replicas, self.spec["fallback"]["replicas"]) * self.threshold
        ratio = reading / (self.threshold * self.replicas)
        wish = self.replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(reading / self.threshold)
        wish = min(max(wish, 1), self.spec["maxReplicaCount"])
        down = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        self._wishes.append((now_s, wish))
        self._wishes = [one for one in self._wishes if one[0] > now_s - down["stabilizationWindowSeconds"]]
        if wish >= self.replicas:
            self.replicas = wish
            return
        (policy,) = down["policies"]
        if now_s - self._removed_s >= policy["periodSeconds"]:
            lowest = max(count for _, count in self._wishes)
            if lowest < self.replicas:
                self.replicas, self._removed_s = max(lowest, self.replicas - policy["value"]), now_s


@dataclass
class Pool:
    """A pool whose nodes load the model for LOAD_S, and then run JOBS_OF_NODE jobs each."""

    job_s: float
    arrivals: Sequence[float]
    ready_s: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)
    """When each running job ends."""
    ended: int = 0
    moved: int = 0
    """Running jobs that lost their node because it was removed."""

    def turn(self, now_s: float, replicas: int) -> None:
        arrived = len(self.queued) + len(self.running) + self.ended
        self.queued += [at_s for at_s in sorted(self.arrivals)[arrived:] if at_s <= now_s]
        self.ended += sum(end_s <= now_s for end_s in self.running)
        self.running = [end_s for end_s in self.running if end_s > now_s]
        self.ready_s += [now_s + LOAD_S] * (replicas - len(self.ready_s))
        # Kubernetes removes pods that are not ready first.
        self.ready_s = sorted(self.ready_s)[:replicas]
        room = JOBS_OF_NODE * sum(ready_s <= now_s for ready_s in self.ready_s)
        while len(self.running) > room:
            self.running.pop()
            self.queued.insert(0, now_s)
            self.moved += 1
        while self.queued and len(self.running) < room:
            self.queued.pop(0)
            self.running.append(now_s + self.job_s)

    @property
    def depth(self) -> float:
        return len(self.queued) + len(self.running)


Read = Callable[[float, Pool], Reading]


def everything(_now_s: float, pool: Pool) -> Reading:
    return pool.depth


def replay(spec: dict[str, Any], pool: Pool, *, hours: float, read: Read = everything) -> list[int]:
    """Return the number of nodes at each turn of 15 s."""
    scaler, counts = Scaler(spec), []
    for now_s in range(0, int(hours * 3600), SYNC_S):
        pool.turn(now_s, scaler.replicas)
        reading = read(now_s, pool)
        if now_s % spec["pollingInterval"] == 0:
            scaler.poll(now_s, reading)
        scaler.sync(now_s, reading)
        counts.append(scaler.replicas)
    return counts


def at(counts: Sequence[int], minutes: float) -> int:
    return counts[int(minutes * 60 / SYNC_S)]


def test_a_first_job_starts_a_node_that_stays_while_it_loads_and_leaves_after_the_work(
    scaled_object: dict[str, Any],
) -> None:
    pool = Pool(job_s=120, arrivals=[60])
    counts = replay(scaled_object, pool, hours=1)
    assert at(counts, 0.5) == 0 and at(counts, 1.5) == 1
    assert set(counts[6 : int(13.5 * 60 / SYNC_S)]) == {1}, "while it loads and runs"
    assert (pool.ended, pool.moved) == (1, 0)
    assert counts[-1] == 0
    last_s = max(turn for turn, count in enumerate(counts) if count) * SYNC_S
    assert last_s == pytest.approx(60 + LOAD_S + 120 + scaled_object["cooldownPeriod"], abs=120)


def test_the_cooldown_is_longer_than_the_load(scaled_object: dict[str, Any]) -> None:
    """Otherwise a gap between two jobs that is as short as a load would cost a load."""
    assert scaled_object["cooldownPeriod"] > LOAD_S


def test_many_jobs_start_several_nodes_and_none_is_removed_under_a_running_job(scaled_object: dict[str, Any]) -> None:
    pool = Pool(job_s=1800, arrivals=[0] * 60)
    counts = replay(scaled_object, pool, hours=3)
    assert at(counts, 5) == 4, "60 jobs, 16 for each node"
    assert (pool.ended, pool.moved) == (60, 0)
    assert counts[-1] == 0


def test_a_query_of_queued_jobs_alone_would_stop_a_node_that_streams(scaled_object: dict[str, Any]) -> None:
    def only_queued(_now_s: float, pool: Pool) -> Reading:
        return len(pool.queued)

    kept = Pool(job_s=7200, arrivals=[0] * 3)
    assert min(replay(scaled_object, kept, hours=2)[4:]) == 1
    lost = Pool(job_s=7200, arrivals=[0] * 3)
    replay(scaled_object, lost, hours=2, read=only_queued)
    assert kept.moved == 0 and lost.moved >= 3


def test_no_node_is_stopped_while_prometheus_is_away(scaled_object: dict[str, Any]) -> None:
    def away(now_s: float, pool: Pool) -> Reading:
        return None if 1500 <= now_s < 5100 else pool.depth

    pool = Pool(job_s=4000, arrivals=[0] * 40)
    counts = replay(scaled_object, pool, hours=2, read=away)
    assert set(counts[100:340]) == {3}
    assert pool.moved == 0


def test_an_empty_answer_that_counted_as_0_would_stop_them(scaled_object: dict[str, Any]) -> None:
    def null_is_0(now_s: float, pool: Pool) -> Reading:
        return 0 if 1500 <= now_s < 5100 else pool.depth

    assert scaled_object["triggers"][0]["metadata"]["ignoreNullValues"] == "false"
    pool = Pool(job_s=4000, arrivals=[0] * 40)
    replay(scaled_object, pool, hours=2, read=null_is_0)
    assert pool.moved > 0


def test_jobs_that_wait_while_prometheus_is_away_get_one_node(scaled_object: dict[str, Any]) -> None:
    pool = Pool(job_s=60, arrivals=[600] * 20)
    counts = replay(scaled_object, pool, hours=1, read=lambda now_s, pool: None)
    polls = scaled_object["fallback"]["failureThreshold"] + 1
    assert at(counts, polls * scaled_object["pollingInterval"] / 60 + 1) == 1
    assert max(counts) == 1
    assert pool.ended == 20


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: prometheus)")
def test_the_query_counts_what_needs_a_node_and_each_gateway_reports_the_same(
    scaled_object: dict[str, Any], tmp_path: Path
) -> None:
    """Of two gateways one ends after 5 minutes, the other after 10; then there is no value, which is an error."""
    query = scaled_object["triggers"][0]["metadata"]["query"]
    cases = {
        "3 queued, 4 running, 9 scheduled": (16, 9, 0, 0, 7),
        "only jobs that are not due": (9, 9, 0, 0, 0),
        "a scheduled job is due": (9, 9, 0, 30, 1),
        "jobs wait for their tenant's tokens": (2, 0, 2, 5, 1),
        "a job of a node that died": (1, 0, 0, 0, 1),
        "nothing": (0, 0, 0, 0, 0),
    }
    tests = []
    for name, (open_jobs, scheduled, awaiting, age_s, expected) in cases.items():
        series = []
        for gateway, minutes in (("a", 5), ("b", 10)):
            level = f'priority="standard",background="false",instance="{gateway}"'
            values = {
                f'penstock_open_jobs{{pool="qwen",instance="{gateway}"}}': open_jobs,
                f'penstock_open_jobs{{pool="other",instance="{gateway}"}}': 50,
                f'penstock_queue_depth{{pool="qwen",state="scheduled",{level}}}': scheduled,
                f'penstock_queue_depth{{pool="qwen",state="awaiting_tokens",{level}}}': awaiting,
                f'penstock_queue_age_seconds{{pool="qwen",state="scheduled",{level}}}': age_s,
                f'penstock_queue_age_seconds{{pool="qwen",state="queued",{level}}}': 70,
            }
            series += [{"series": of, "values": f"{value}x{minutes} stale"} for of, value in values.items()]
        found: tuple[tuple[str, list[int]], ...] = (("3m", [expected]), ("8m", [expected]), ("12m", []))
        asked = [
            {"expr": query, "eval_time": when, "exp_samples": [{"labels": "{}", "value": value} for value in values]}
            for when, values in found
        ]
        tests.append({"name": name, "interval": "1m", "input_series": series, "promql_expr_test": asked})
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": tests}))
    assert PROMTOOL is not None
    run = subprocess.run([PROMTOOL, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_page_of_metrics_has_the_query_of_the_scaler(scaled_object: dict[str, Any]) -> None:
    (block,) = re.findall(r"```yaml\n(triggers:.*?)```", (ROOT / "ops/METRICS.md").read_text(), re.DOTALL)
    (trigger,) = yaml.safe_load(block)["triggers"]
    of_scaler = scaled_object["triggers"][0]["metadata"]
    assert trigger["metadata"]["query"].replace('"POOL"', '"qwen"') == of_scaler["query"]
    assert trigger["metadata"]["threshold"] == of_scaler["threshold"]
    assert trigger["metadata"]["ignoreNullValues"] == of_scaler["ignoreNullValues"]
