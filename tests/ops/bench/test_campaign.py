"""A campaign runs what is missing, repeats dirty runs, and resumes where it was aborted."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench import campaign, memory, peers
from bench.campaign import Campaign, RunError
from bench.child import EXIT_ABSENT, Spec, measure
from bench.contestants import CONTESTANTS, Contestant
from bench.engines import penstock
from bench.journal import Journal, Run
from bench.stopwatch import Stopwatch
from bench.workload import Workload

from penstock.runtime.cache_folders import cache_folder
from tests.source_tree import ROOT

RESULT = dict.fromkeys(("tokens_per_s", "ttft_p50_ms", "itl_mean_ms", "ready_s", "rss_peak_mib"), 1.0)
OURS = [Contestant(name, "penstock", "process", "ours", workloads=("mix", "single")) for name in ("a", "b")]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "runs.jsonl")


class Watched:
    """Replaces the processes: the result of each run, in order, and which contestants were run."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, foreign: tuple[float, ...] = (), fails: bool = False
    ) -> None:
        self.asked: list[str] = []
        self._foreign = list(foreign)
        self._fails = fails
        monkeypatch.setattr(campaign, "_watch", self._watch)

    def _watch(self, argv: list[str], env: dict[str, str]) -> tuple[dict[str, float], float]:
        self.asked.append(json.loads(argv[-1])["workload"])
        if self._fails:
            raise RunError("status 1: it broke")
        return dict(RESULT), self._foreign.pop(0) if self._foreign else 0.0


def test_each_run_says_the_read_bandwidth_around_it(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    Watched(monkeypatch)
    rates = iter([30.0, 50.0, 40.0, 20.0])
    Campaign(journal, "model", OURS, read_rate=lambda: next(rates)).run(["single"], 1)
    found = [(run.result["read_gb_per_s"], run.result["readable_mb_per_token"]) for run in journal.runs]
    assert found == [(50, 50 * RESULT["itl_mean_ms"]), (40, 40 * RESULT["itl_mean_ms"])]


def test_engines_take_turns_within_each_repeat(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    Watched(monkeypatch)
    Campaign(journal, "model", OURS).run(["mix", "single"], 2)
    assert [(run.repeat, run.workload, run.contestant) for run in journal.runs] == [
        (repeat, workload, name) for repeat in (0, 1) for workload in ("mix", "single") for name in ("a", "b")
    ]


def test_a_second_start_runs_only_what_is_missing(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    Campaign(journal, "model", OURS[:1]).run(["mix"], 1)
    again = Journal(journal._path)
    Campaign(again, "model", OURS).run(["mix"], 2)
    assert len(watched.asked) == 4
    assert [(run.contestant, run.repeat) for run in again.runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert Journal(journal._path).runs == again.runs


@pytest.mark.parametrize(("foreign", "num_runs"), [((0.04,), 1), ((0.3, 0.0), 2), ((0.3, 0.3, 0.3, 0.0), 3)])
def test_a_dirty_run_is_done_again_but_not_for_ever(
    foreign: tuple[float, ...], num_runs: int, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    Watched(monkeypatch, foreign=foreign)
    Campaign(journal, "model", OURS[:1]).run(["mix"], 1)
    assert len(journal.runs) == num_runs


def test_a_failure_is_kept_with_its_reason_and_tried_by_the_next_start(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, fails=True)
    Campaign(journal, "model", OURS[:1]).run(["mix"], 3)
    assert [run.error for run in journal.runs] == ["status 1: it broke"]
    Campaign(journal, "model", OURS[:1]).run(["mix"], 3)
    assert len(watched.asked) == 2


def test_redone_engines_are_forgotten(journal: Journal) -> None:
    for name, workload in (("a", "mix"), ("a", "single"), ("b", "mix")):
        journal.add(Run(name, workload, 0, "abc", "command", RESULT))
    journal.forget({"a"}, {"mix"})
    left = [(run.contestant, run.workload) for run in Journal(journal._path).runs]
    assert left == [("a", "single"), ("b", "mix")]


def test_a_peer_that_is_not_installed_is_skipped_by_name(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    watched = Watched(monkeypatch)
    chosen = [one for one in CONTESTANTS.values() if one.peer]
    runs = Campaign(journal, "model.gguf", chosen)
    runs.run(["mix", "single"], 1)
    assert watched.asked == []
    assert runs.missing().keys() == {one.name for one in chosen}
    assert all(f"{one.peer} is not installed" in runs.missing()[one.name] for one in chosen)


def test_recorded_commands_name_no_folder_of_this_machine() -> None:
    assert campaign.anywhere(f"{ROOT}/.venv/bin/python -m x {ROOT}/build/y") == ".venv/bin/python -m x build/y"


@pytest.mark.parametrize("module", sorted({one.module for one in CONTESTANTS.values()}))
def test_every_engines_module_loads_without_its_engine(module: str) -> None:
    assert callable(importlib.import_module(f"bench.engines.{module}").open_session)


@pytest.mark.parametrize("module", ["vllm", "openvino", "llamacpp"])
def test_a_run_without_its_package_says_so(module: str) -> None:
    one = next(one for one in CONTESTANTS.values() if one.module == module)
    spec = json.dumps(asdict(Spec("mix", "nowhere", one.options)))
    # -S: no package is installed.
    done = subprocess.run(
        [sys.executable, "-S", "-m", f"bench.engines.{module}", spec],
        env=os.environ | {"PYTHONPATH": str(ROOT / "ops")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_ABSENT, done.stderr
    assert "is not installed in this environment" in done.stderr


def test_pins_are_exact() -> None:
    for peer in peers.PEERS:
        lines = (peers.REQUIREMENTS / f"{peer}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if line and not line.startswith(("#", "--")))
        assert peers.versions(peer)


def test_memory_counts_children_and_no_other_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in memory.descendants(os.getpid())
        assert os.getpid() not in memory.descendants(os.getpid())
        assert 0 < memory.resident_mib(with_own=False) < memory.resident_mib(with_own=True)
        assert memory.peak_mib(with_own=True) >= memory.resident_mib(with_own=True) * 0.9
    finally:
        child.communicate()


def test_a_spec_cuts_a_workload() -> None:
    spec = Spec("mix", "weights", max_requests=6)
    assert len(spec.requests_of().requests) == 6
    assert len(replace(spec, max_requests=None).requests_of().requests) == 64
    assert list(Spec("larger-1b", "weights", parts=["batch"]).requests_of().parts) == ["batch"]


class Answering:
    """A session that answers at once, and counts the requests of each workload."""

    in_own_process = True

    def __init__(self) -> None:
        self.nums_requests: list[int] = []

    def run(self, workload: Workload, watch: Stopwatch) -> None:
        self.nums_requests.append(len(workload.requests))
        for i, request in enumerate(workload.requests):
            watch.asked(i)
            watch.saw(i, 1)
            watch.told(i, request.num_output - 1)

    def extra(self) -> dict[str, float]:
        return {}


def test_one_process_measures_all_parts_of_a_workload() -> None:
    session = Answering()
    found = measure(session, Spec("larger-1b", "weights"))
    assert session.nums_requests == [2, 2, 2, 16]
    assert (found["output_tokens"], found["prompt_output_tokens"], found["batch_output_tokens"]) == (128, 2, 768)
    assert found["tokens_per_event"] == 64


def test_a_first_load_finds_no_cached_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / penstock.KERNELS).mkdir()
    (tmp_path / penstock.KERNELS / "kernels.so").touch()
    monkeypatch.setattr(peers, "BUILD", tmp_path / "build")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    with penstock.empty_cache():
        assert [path.name for path in cache_folder().iterdir()] == [penstock.KERNELS]
        assert (cache_folder() / penstock.KERNELS / "kernels.so").exists()
