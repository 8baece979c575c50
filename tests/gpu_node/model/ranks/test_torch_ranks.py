"""Ranks of the torch runner: they follow messages, and their node goes on when one is lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes.engine_runs import TORCH, check_idle
from fakes.runners.thread_ranks import torch_group_as_threads
from fakes.waiting import wait_until
from fixtures.plans import Track, plan_of
from fixtures.random_adapters import make_adapter
from fixtures.sampling import rows_of
from transformers import AutoModelForCausalLM

from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.records import StepLostError
from penstock.gpu_node.model.loading import rank_host
from penstock.gpu_node.model.protocol import RanksLostError, SamplingRows, TokenMasks
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.memory import SharedMemory
from penstock.gpu_node.model.ranks.messages import copied, read_masks, read_step, write_masks, write_step
from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange, StoppedRank
from penstock.gpu_node.model.torch_common.ranked_runner import RankedRunner
from penstock.gpu_node.model.torch_common.ranks import BrokenExchangeError, HostRanks

PROMPTS: list[Any] = ["the gate opens by pressure", "a turbine", [5, 6, 7] * 9]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True, seed=3)
PROCESSES: dict[str, Any] = {**TORCH, "tensor_parallel_size": 2, "num_threads": 2, "rank_stall_s": 1.0}
MakeEngine = Callable[..., Engine]
Tokens = list[tuple[int, ...]]


def _tokens(engine: Engine, params: SamplingParams = SAMPLED, **given: Any) -> Tokens:
    return [one.choices[0].token_ids for one in engine.generate(PROMPTS, params, **given)]


def _runner(engine: Engine) -> RankedRunner:
    assert isinstance(engine._runner, RankedRunner)
    return engine._runner


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> Tokens:
    """The tokens of one rank."""
    return _tokens(make_engine(**TORCH))


@pytest.fixture
def threads(make_engine: MakeEngine) -> Iterator[MakeEngine]:
    """Makes engines whose further ranks are threads."""
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        with torch_group_as_threads():
            made.append(make_engine(**settings))
        return made[-1]

    yield make
    for engine in made:
        _runner(engine).close()


def test_ranks_that_follow_messages_answer_as_one(threads: MakeEngine, expected: Tokens) -> None:
    engine = threads(**TORCH, tensor_parallel_size=2, pipeline_parallel_size=2, num_threads=4)
    assert _tokens(engine) == expected
    stats = engine.stats().ranks
    assert (stats.num_ranks, stats.num_starts, len(stats.waited_s)) == (4, 1, 4)
    assert stats.num_meetings > 20
    # A stage waits while the other one computes, and a rank of each stage never for the other rank.
    assert all(0.0 < share < 1.0 for share in stats.stage_idle), stats
    assert stats.stage_idle[0] + stats.stage_idle[1] > 0.3
    assert stats.num_steps == engine.stats().steps
    assert stats.exchanged_s[0] == stats.exchanged_s[1] != stats.exchanged_s[2]
    # 256 tokens of 64 channels are float32 in both stages; a layer has 16 + 24 + 64 rows and more of these.
    assert [size > 4 * 64 * 300 for size in stats.weight_bytes] == [True] * 4
    assert stats.kv_bytes == (engine._runner.cache_sizes.num_blocks * engine._runner.cache_sizes.block_bytes // 4,) * 4
    check_idle(engine)


def test_an_adapter_that_one_rank_does_not_find_fails_alone(
    threads: MakeEngine, tiny_model: Path, tmp_path: Path, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for name in "ab":
        make_adapter(tmp_path / name, base, seed=ord(name))
    engine = threads(**TORCH, tensor_parallel_size=2, num_threads=2, lora_dir=tmp_path, max_loras=2)
    runner = _runner(engine)
    with_a = _tokens(engine, adapters="a")
    assert with_a != expected
    adapter = engine._served.model.adapters.find(_named("b"))
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(Exception, match="adapter 'b' cannot be loaded by all ranks"):
        runner.set_adapter(1, adapter)
    assert _tokens(engine, adapters="a") == with_a
    assert _tokens(engine) == expected


def _named(name: str) -> Any:
    from penstock.contract.adapters import AdapterRef

    return AdapterRef(name=name)


# --- processes


@pytest.fixture
def processes(make_engine: MakeEngine) -> Iterator[Engine]:
    """An engine of two ranks, of which one is a process that ends with the test."""
    engine = make_engine(**PROCESSES)
    yield engine
    check_idle(engine)
    pids = _runner(engine).rank_pids
    _runner(engine).close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_ranks_that_are_killed_and_stopped_cost_no_token(processes: Engine, expected: Tokens) -> None:
    runner = _runner(processes)
    assert _tokens(processes) == expected
    num_descriptors = len(os.listdir("/proc/self/fd"))
    for number, kind in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        (pid,) = runner.rank_pids
        assert _tokens_with(processes, partial(os.kill, pid, kind)) == expected
        assert runner.ranks.num_starts == number
        assert not Path(f"/proc/{pid}").exists()
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors


def _tokens_with(engine: Engine, disturb: Callable[[], None]) -> Tokens:
    """Run the prompts; disturb them after the third step."""
    ids = [engine.add_request(prompt, SAMPLED) for prompt in PROMPTS]
    found: dict[str, tuple[int, ...]] = dict.fromkeys(ids, ())
    num_steps = 0
    while engine.has_work():
        num_steps += 1
        if num_steps == 4:
            disturb()
        try:
            for output in engine.step():
                found[output.request_id] += output.token_ids
        except StepLostError:
            engine.check_integrity()
    return [found[request_id] for request_id in ids]


@pytest.mark.slow
def test_ranks_that_lack_memory_cost_no_token(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, params = {"max_num_batched_tokens": 1536}, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts: list[Any] = [[first + i % 90 for i in range(480)] for first in (3, 4, 5)]
    want = [one.choices[0].token_ids for one in make_engine(**TORCH | settings).generate(prompts, params)]
    engine = make_engine(**PROCESSES | settings)
    runner = _runner(engine)
    engine.generate([[1]], params)
    # Rank 1 gets no more memory than it has. It may have too little for an exchange, too: then the ranks are lost.
    (pid,) = runner.rank_pids
    limits, status = resource.prlimit(pid, resource.RLIMIT_DATA), Path(f"/proc/{pid}/status").read_text()
    own_kib = int(status.partition("VmData:")[2].split()[0])
    resource.prlimit(pid, resource.RLIMIT_DATA, (own_kib << 10, limits[1]))
    began_s = time.monotonic()
    assert _failures(engine, prompts, params, want)
    assert time.monotonic() - began_s < 60
    decoder, num_starts = cast(Any, runner._own)._decoder, runner.ranks.num_starts
    monkeypatch.setattr(decoder, "_gated", partial(_lacking, decoder._gated))
    assert _failures(engine, [prompt[1:] for prompt in prompts], params) == {"too many rows"}
    assert runner.ranks.num_starts == num_starts
    check_idle(engine)
    runner.close()


def _failures(engine: Engine, prompts: list[Any], params: SamplingParams, want: Tokens | None = None) -> set[str]:
    """Run prompts whose steps fail for memory. Return what the errors say."""
    found: dict[str, tuple[int, ...]] = {engine.add_request(prompt, params): () for prompt in prompts}
    errors = set[str]()
    while engine.has_work():
        try:
            for output in engine.step():
                found[output.request_id] += output.token_ids
        except (MemoryError, StepLostError) as error:
            errors.add(str(error))
    assert want in (None, [*found.values()])
    return errors


def _lacking(gated: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    if len(x) > 100:
        raise MemoryError("too many rows")
    return gated(x, *rest)


def test_a_rank_that_ends_at_its_start_is_named(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_host, "RANK_MODULE", "penstock.no_such_module")
    with pytest.raises(ConfigError, match="rank 1 ended"):
        make_engine(**PROCESSES)


# --- words and messages


class Unlucky:
    """A group of gloo without memory for an exchange."""

    def rank(self) -> int:
        return 0

    size = rank

    def allreduce(self, given: Any) -> Any:
        raise MemoryError("std::bad_alloc")


def test_an_exchange_without_memory_is_a_loss_because_other_ranks_may_have_made_it() -> None:
    ranks = HostRanks(Unlucky(), nullcontext())
    with pytest.raises(BrokenExchangeError, match="an exchange between ranks failed: std::bad_alloc"):
        ranks.sum(torch.zeros(2))


def _group(size: int) -> Any:
    memory = GroupMemory.create()
    words = PlainExchange(memory, 0, readers=range(1, size))
    return type("Group", (), {"exchange": words, "size": size, "memory": memory})


def test_a_rank_hangs_only_while_all_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    group, now = _group(3), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch, memory, words = StoppedRank(group), group.memory, group.exchange
    others = [PlainExchange(memory, rank) for rank in (1, 2)]

    def after(seconds: float, *running: int) -> int | None:
        found = None
        for _ in range(int(4 * seconds)):
            now[0] += 0.25
            for rank in running:
                memory.pulses[rank] += 1
            found = watch.look()
        return found

    words.hand_out(1)
    assert after(5, 1, 2) is None  # Both compute, and so does rank 0.
    with words.waiting:
        assert after(5, 1, 2) is None  # Both are slow together.
        others[0].note_done(1)
        assert after(5, 1, 2) == 2
        assert watch.for_s >= 5
        others[1].note_done(1)
        assert after(5, 1, 2) is None
        assert after(5, 2) == 1  # It waits for a message, but its process is stopped.


def test_a_rank_that_is_stopped_after_the_last_exchange_of_a_step_hangs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits until it has done the message, and at no exchange."""
    group, now = _group(2), [0.0]
    words = group.exchange
    words.hand_out(1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(words.await_done)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        watch, found = StoppedRank(group), list[int | None]()
        wait_until(lambda: words.is_idle(0))
        for _ in range(24):
            now[0] += 0.25
            found.append(watch.look())
        assert (found[-1], watch.for_s >= 5) == (1, True)
        words.abort()
        with pytest.raises(RanksLostError):
            waiting.result()
    assert not words.is_idle(0)


def test_a_message_is_not_written_over_before_it_is_read() -> None:
    group = _group(2)
    words, reader = group.exchange, PlainExchange(group.memory, 1)
    words.hand_out(1)
    reader.note_done(1)
    words.await_done()
    words.hand_out(2)
    assert reader.next_message(1, 1.0) == 2
    words.abort()
    assert reader.is_aborted
    with pytest.raises(RanksLostError):
        words.await_done()


def test_a_step_with_what_its_rows_sample_by_is_read_as_it_was_written() -> None:
    masks = TokenMasks(np.array([True, False, True]), 70)
    given = rows_of(3, temperature=[0.0, 0.5, 1.0], seed=[1, 2**63, 3], top_k=[0, 4, 0])
    rows = SamplingRows(
        **{name: getattr(given, name) for name in SamplingRows.__slots__ if name not in ("seen", "banned", "masks")}
        | {"seen": ([1, 2], [], [3]), "banned": ([], [9], []), "masks": masks}
        | {"biased": ([4], [], [5, 6]), "biases": ([0.5], [], [1.0, -1.0])}
    )
    plan = plan_of([(Track([5, 6], [1]), 2), (Track([7], [2]), 1), (Track([8], [3]), 1)], _as_arrays(rows))
    memory = SharedMemory.create("test", 64)
    write_step(memory, plan, returns_logits=False, all_sample=True)
    step = copied(read_step(memory))
    num_reserved = memory.num_bytes
    masks.words[:] = np.arange(masks.words.size, dtype=np.uint32).reshape(masks.words.shape)
    write_masks(memory, masks)
    assert memory.num_bytes == num_reserved
    assert step.sampling is not None and step.sampling.masks is not None
    read_masks(memory, step.sampling.masks)
    for name in SamplingRows.__slots__:
        ours, theirs = getattr(step.sampling, name), getattr(plan.sampling, name)
        if name == "masks":
            np.testing.assert_array_equal(ours.words, theirs.words)
            np.testing.assert_array_equal(ours.rows, theirs.rows)
            assert ours.written[0]
        elif isinstance(theirs, tuple):
            assert [one.tolist() for one in ours] == [one.tolist() for one in theirs]
        elif name != "num_logprobs":  # Only rank 0 reports them.
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(step.token_ids, plan.token_ids)


def _as_arrays(rows: SamplingRows) -> SamplingRows:
    """Return rows whose ragged columns are arrays."""
    kinds = {"seen": np.int32, "banned": np.int32, "biased": np.int32, "biases": np.float32}
    lists = {name: tuple(np.array(one, kind) for one in getattr(rows, name)) for name, kind in kinds.items()}
    return SamplingRows(**{name: getattr(rows, name) for name in SamplingRows.__slots__} | lists)
