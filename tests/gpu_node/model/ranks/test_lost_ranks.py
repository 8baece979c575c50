"""Ranks that are killed, stopped or fail: the engine starts them again, and no token changes."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from fakes.engine_runs import check_idle, kill_a_rank_at
from fakes.waiting import Deadline, wait_until
from fixtures.plans import Track, plan_of
from fixtures.sampling import rows_of

from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.engine.records import EngineRequest, StepLostError
from penstock.gpu_node.model.native import load as native_load
from penstock.gpu_node.model.native import ranks as native_ranks
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import StepPlan
from penstock.gpu_node.model.ranks import group as ranks_group
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.processes import RankProcess
from penstock.kernels.cpu.structs import NativePlan, RankState

PROMPTS = [[5 + i, *range(10 * i + 3, 10 * i + 23 + i)] for i in range(4)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=3, n=2, logprobs=2)
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 2, "rank_stall_s": 0.6}
Answers = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def expected(make_engine: Callable[..., Engine]) -> Answers:
    """The answers of one rank."""
    return _answers(make_engine(), lambda engine, done: None)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """An engine of two ranks, of which one is a process that ends with the test."""
    engine = make_engine(**RANKS)
    runner = _runner(engine)
    yield engine
    check_idle(engine)
    runner.close()
    assert _children() == []


_of_other_tests: set[int] = set()
"""Guards that tests of other modules have started in this process, and still use."""


@pytest.fixture(autouse=True)
def _know_guards_of_other_tests() -> None:
    _of_other_tests.clear()
    _of_other_tests.update(_children())


def _children() -> list[int]:
    """The guards of ranks that this process has started in this test and not waited for."""
    files = [task / "children" for task in Path("/proc/self/task").iterdir()]
    pids = [int(pid) for file in files for pid in _read(file).split()]
    guards = [pid for pid in pids if b"process_guard" in _read(Path(f"/proc/{pid}/cmdline"))]
    return [pid for pid in guards if pid not in _of_other_tests]


def _read(file: Path) -> bytes:
    """What is in a file of /proc; nothing if its thread or process has just ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _runner(engine: Engine) -> NativeRunner:
    assert isinstance(engine._runner, NativeRunner)
    return engine._runner


def _answers(engine: Engine, disturb: Callable[[Engine, int], None]) -> Answers:
    """Run all prompts; `disturb` is called with the number of steps after each step."""
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), prompt, PARAMS, seed=i))
    outputs, num_steps = list[StepOutput](), 0
    while engine.has_work():
        try:
            outputs += engine.step()
        except (StepLostError, MemoryError):
            engine.check_integrity()
        num_steps += 1
        disturb(engine, num_steps)
    found: Answers = {}
    for output in outputs:
        key = output.request_id, output.choice
        found[key] = found.get(key, ()) + output.token_ids
    return found


def test_two_ranks_answer_as_one(engine: Engine, expected: Answers) -> None:
    assert _answers(engine, lambda engine, done: None) == expected
    runner = _runner(engine)
    assert runner.ranks.num_meetings > 100
    # The extra [cpu] has no torch.
    maps = Path(f"/proc/{runner.rank_pids[0]}/maps").read_text()
    assert "penstock-cpu-" in maps and "torch" not in maps
    # The parts of a matrix may meet inside a panel, which both ranks then have.
    whole, parts = runner.placement.weight_bytes, runner.ranks.weight_bytes
    assert len(parts) == 2 and max(parts) < 0.6 * whole <= 0.6 * sum(parts)


@pytest.mark.parametrize("at", [1, 12])
def test_a_killed_rank_costs_no_token(engine: Engine, expected: Answers, at: int) -> None:
    pids = []

    def kill(engine: Engine, done: int) -> None:
        if done == at:
            pids.extend(_runner(engine).rank_pids)
            os.kill(pids[0], signal.SIGKILL)

    began_s, num_descriptors = time.monotonic(), len(os.listdir("/proc/self/fd"))
    assert _answers(engine, kill) == expected
    assert time.monotonic() - began_s < 60
    assert _runner(engine).ranks.num_starts == 2
    assert _runner(engine).rank_pids != pids
    # Garbage of other tests may have been collected meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_rank_that_is_killed_between_two_steps_costs_no_step(engine: Engine, expected: Answers) -> None:
    os.kill(_runner(engine).rank_pids[0], signal.SIGKILL)
    wait_until(engine.has_work)
    assert engine.step() == []
    assert not engine.has_work()
    assert _answers(engine, lambda engine, done: None) == expected
    stats = engine.stats()
    assert (stats.num_failed_steps, stats.ranks.num_starts) == (0, 2)


def test_a_stopped_rank_costs_no_token(engine: Engine, expected: Answers) -> None:
    pids = []

    def stop(engine: Engine, done: int) -> None:
        if done == 5:
            pids.extend(_runner(engine).rank_pids)
            os.kill(pids[0], signal.SIGSTOP)

    assert _answers(engine, stop) == expected
    assert _runner(engine).ranks.num_starts == 2
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_rank_hangs_only_while_all_others_wait_at_a_later_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    states, now = [RankState() for _ in range(3)], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    words = SimpleNamespace(state_of=states.__getitem__)
    watch = ranks_group._StillRank(cast(Any, SimpleNamespace(exchange=words, size=3)))

    def after_10_s(*meetings: int) -> float:
        """Return for how long a rank has stood still; below 0: it has gone on by so many meetings."""
        for _ in range(40):
            now[0] += 0.25
            for state, number in zip(states, meetings, strict=True):
                state.meetings = max(state.meetings, number) if number >= 0 else state.meetings + 1
            watch.look()
        return watch.for_s

    states[0].is_waiting = 1
    assert after_10_s(5, 4, 4) == 0, "two are slow together"
    states[1].is_waiting = 1
    assert after_10_s(5, 5, -1) == 0, "one is slow, and counts on"
    states[0].meetings = states[1].meetings = states[2].meetings + 1
    assert after_10_s(0, 0, 0) > 9
    states[0].is_waiting = 0
    assert after_10_s(0, 0, 0) == 0, "rank 0 has something else to do"


def test_a_request_that_ends_the_ranks_each_time_fails_alone(
    engine: Engine, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, poison = _runner(engine), 6
    kill_a_rank_at(poison, runner, monkeypatch)
    engine.add(EngineRequest("poison", [poison, 1, 2], SamplingParams(max_tokens=8), seed=0))
    ends = dict[str, str | None]()
    while engine.has_work():
        try:
            for output in engine.step():
                ends[output.request_id] = output.finish_reason
        except StepLostError as error:
            assert error.requests == {"poison"}
    assert ends == {"poison": "error"}
    assert runner.ranks.num_starts == 4
    monkeypatch.undo()
    assert _answers(engine, lambda engine, done: None) == expected


def test_memory_that_a_rank_lacks_fails_the_step_everywhere(engine: Engine) -> None:
    runner, pid = _runner(engine), _runner(engine).rank_pids[0]
    blocks = list(range(1, 33))
    assert runner.submit(_plan(blocks, 1)).result().tokens.shape == (1,)
    limits, own = resource.prlimit(pid, resource.RLIMIT_AS), Path(f"/proc/{pid}/statm").read_text().split()
    resource.prlimit(pid, resource.RLIMIT_AS, (int(own[0]) * resource.getpagesize(), limits[1]))
    with pytest.raises(MemoryError, match="a rank ran out of memory"):
        runner.submit(_plan(blocks, 500)).result()
    assert runner.submit(_plan(blocks, 1)).result().tokens.shape == (1,)
    resource.prlimit(pid, resource.RLIMIT_AS, limits)
    tokens = runner.submit(_plan(blocks, 500)).result().tokens
    assert (tokens == runner.submit(_plan(blocks, 500)).result().tokens).all()
    assert runner.ranks.num_starts == 1


def test_a_step_that_rank_0_has_no_memory_for_costs_no_token_though_the_others_hear_of_it_late(
    engine: Engine, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stopped when the vote ends, and goes on later. Rank 0 must not begin the next step before."""
    runner = _runner(engine)
    model, ranks, (pid,) = runner._model, runner._ranks, runner.rank_pids
    assert ranks is not None
    memory, exchange = ranks._group.memory, ranks._group.exchange
    assert memory is not None
    start, numbers, state = model.start, count(), exchange.state_of(1)

    def lacking(native: NativePlan) -> None:
        if (number := next(numbers)) in (0, 6, 7, 15):
            wait_until(lambda: state.is_waiting == 1)
            os.kill(pid, signal.SIGSTOP)
            Timer(0.1, os.kill, (pid, signal.SIGCONT)).start()
            model.use_shared(exchange.address, memory.rows.address, 64 * (number % 2))
        start(native)

    monkeypatch.setattr(model, "start", lacking)
    assert _answers(engine, lambda engine, done: None) == expected
    stats = engine.stats()
    assert (stats.num_failed_steps, stats.num_memory_failures, stats.ranks.num_starts) == (4, 4, 1)


def test_an_engine_with_a_rank_that_lacks_memory_makes_smaller_steps(
    engine: Engine, make_engine: Callable[..., Engine]
) -> None:
    (pid,), params = _runner(engine).rank_pids, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt: list[Any] = [[3 + i % 90 for i in range(480)]]
    (want,) = make_engine().generate(prompt, params)
    engine.generate([[1]], params)
    limits, own = resource.prlimit(pid, resource.RLIMIT_AS), Path(f"/proc/{pid}/statm").read_text().split()
    resource.prlimit(pid, resource.RLIMIT_AS, (int(own[0]) * resource.getpagesize(), limits[1]))
    request, tokens, num_failures = engine.add_request(prompt[0], params), list[int](), 0
    while engine.has_work():
        try:
            tokens += [token for output in engine.step() for token in output.token_ids]
        except MemoryError as error:
            assert "a rank ran out of memory" in str(error)
            num_failures += 1
    assert (num_failures > 0, tuple(tokens)) == (True, want.choices[0].token_ids), request
    assert _runner(engine).ranks.num_starts == 1


def _plan(blocks: list[int], length: int) -> StepPlan:
    return plan_of([(Track([3 + i % 90 for i in range(length)], blocks), length)], rows_of(1, temperature=0.0))


def test_a_rank_that_does_not_arrive_is_named(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_group, "START_PATIENCE_S", 0.01)
    with pytest.raises(ConfigError, match="rank 1 has not started within 0"):
        make_engine(**RANKS)
    assert _children() == []


def test_a_rank_that_is_stopped_at_its_start_is_named(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = list[int]()

    def start(*args: Any) -> RankProcess:
        started = RankProcess(*args)
        guard = started._guard.pid
        children = wait_until(lambda: _read(Path(f"/proc/{guard}/task/{guard}/children")).split())
        stopped.append(int(children[0]))
        os.kill(stopped[0], signal.SIGSTOP)
        return started

    monkeypatch.setattr(native_ranks, "RankProcess", start)
    with pytest.raises(ConfigError, match="rank 1 cannot start: a signal has stopped it for 0"):
        make_engine(**RANKS)
    assert _children() == []
    # The rank is gone, or ended and not yet reaped: some containers never do that. Either has no command line.
    wait_until(lambda: not _read(Path(f"/proc/{stopped[0]}/cmdline")))


def test_an_engine_says_why_it_waits_for_its_ranks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    compare = ranks_group._compare

    def comparing(*facts: Any) -> None:
        seen.append(engine.ranks.lost)
        compare(*facts)

    monkeypatch.setattr(ranks_group, "_compare", comparing)
    assert engine.ranks.lost == ""
    os.kill(_runner(engine).rank_pids[0], signal.SIGKILL)
    wait_until(engine.has_work)
    assert engine.ranks.lost == "rank 1 ended"
    assert engine.step() == []
    assert (seen, engine.ranks.lost) == (["rank 1 ended"], "")


def test_a_rank_that_ends_at_its_start_is_named(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_ranks, "RANK_MODULE", "penstock.no_such_module")
    with pytest.raises(ConfigError, match="rank 1 ended"):
        make_engine(**RANKS)
    assert _children() == []


def test_a_rank_with_another_model_is_refused(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_load, "facts_of", lambda library, spec: {"kernel library": "another one"})
    with pytest.raises(ConfigError, match="rank 1 has another kernel library"):
        make_engine(**RANKS)
    assert _children() == []


def test_ranks_end_without_a_sign_of_life_of_rank_0(make_engine: Callable[..., Engine]) -> None:
    """As when rank 0 is stopped: nothing shows the other ranks that it lives. They sleep meanwhile."""
    engine = make_engine(**RANKS | {"lease_ms": 600})
    runner = _runner(engine)
    (pid,) = runner.rank_pids
    with mock.patch.object(GroupMemory, "show_life"):
        time.sleep(0.1)  # What it does at its start is over.
        before_s = used_s = _cpu_s(pid)
        deadline = Deadline(10)
        while now_s := _cpu_s(pid):
            deadline.check()
            used_s = now_s
            time.sleep(0.02)
    assert used_s - before_s < 0.15
    runner.close()
    assert _children() == []


def _cpu_s(pid: int) -> float:
    """The seconds that a process has computed; 0 if it has ended."""
    stat = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") if stat else 0.0
