"""Which runner a model gets, and the log message if it is not the native one."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.cover import pairwise
from fakes.native import ISAS, SANITIZE, built
from fakes.runners.runner_options import runner_options
from fakes.runners.stale_blocks import logits_over
from fakes.waiting import Deadline
from fixtures.plans import Track, logits_alone, plan_of, tokens_of_step
from fixtures.sampling import rows_of
from pydantic import ValidationError

from penstock.cli.machine import doctor
from penstock.cli.machine.doctor import check_machine
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native import load as native_load
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import LoadedModel
from penstock.kernels.cpu.library import Slot, Vector
from penstock.kernels.cpu.probe import REQUIRED_FLAGS, Isa
from penstock.kernels.cpu.structs import Format

Llama = Callable[..., Path]
SYS_SCHED_GETATTR = 315  # of x86-64, as the kernels
LONG_SLICE_NS = 100_000_000
_TAKE_CORE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(-20)
while True: pass
"""
OPTIONS = {"runner": "auto", "dtype": "bfloat16", "num_threads": 1}


def _linux() -> tuple[int, ...]:
    return tuple(map(int, platform.release().split("-")[0].split(".")[:2]))


def _load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), runner_options(**OPTIONS | options), lambda stage, fraction: None)


@pytest.fixture
def this_isa(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> Isa:
    monkeypatch.setattr(native_load, "best_isa", lambda *_: isa)
    monkeypatch.setattr(native_load, "library_path", lambda isa, *_: built(isa))
    return isa


@pytest.mark.parametrize(
    ("options", "arithmetic"),
    [
        ({}, "ISA-bf16-kv-bf16"),
        ({"quantization": "none", "kv_cache_dtype": "bfloat16"}, "ISA-bf16-kv-bf16"),
        ({"kv_cache_dtype": "float16"}, "ISA-bf16-kv-f16"),
        # No product of bf16, so the bits are those of every instruction set.
        ({"quantization": "int8", "kv_cache_dtype": "int8"}, "int8-rotated-kv-int8-rotated"),
        ({"quantization": "int8_group"}, "ISA-int8_group-kv-bf16"),
        ({"quantization": "int4", "block_size": 32}, "ISA-int4_group-kv-bf16"),
    ],
)
def test_the_arithmetic_is_named_and_logged(
    llama: Llama, this_isa: Isa, options: dict[str, Any], arithmetic: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = _load(llama(), **options)
    assert model.arithmetic == f"native-{arithmetic.replace('ISA', this_isa)}"
    assert isinstance(model.runner, NativeRunner)
    assert model.runner.cache_sizes.num_blocks == 9
    (said,) = [vars(record) for record in caplog.records if record.getMessage() == "native runner"]
    assert (said["arithmetic"], said["num_kv_blocks"], said["num_threads"]) == (model.arithmetic, 8, 1)
    model.runner.close()


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_a_kv_cache_of_fp8_is_int8_on_a_cpu_and_the_log_says_so_once(
    llama: Llama, this_isa: Isa, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All nodes with either setting compute alike, so they share a pool and continue each other's jobs."""
    model, other = (_load(llama(), kv_cache_dtype=one) for one in (name, "int8"))
    assert (model.arithmetic, model.revision) == (other.arithmetic, other.revision)
    (said,) = [record for record in caplog.records if "KV cache is int8" in record.getMessage()]
    assert said.levelno == logging.WARNING
    for one in (model, other):
        assert isinstance(one.runner, NativeRunner)
        one.runner.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16, not float32"),
        ({"kv_cache_dtype": "float32"}, r"float16, bfloat16 or int8 \(also for fp8\), not float32"),
        ({"block_size": 8}, "need 16 or 32, because a page has 16 tokens; remedy: --block-size 16"),
        ({"quantization": "fp8"}, "none, int8, int8_group and int4, not fp8"),
    ],
)
def test_options_that_the_kernels_do_not_support_are_named(
    llama: Llama, this_isa: Isa, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"runner native: .*{reason}"):
        _load(llama(), runner="native", **options)


@pytest.mark.parametrize("runner", ["auto", "native"])
def test_an_instruction_set_that_the_cpu_lacks_is_refused_with_those_it_has(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    monkeypatch.setattr(native_load, "cpu_flags", lambda: REQUIRED_FLAGS["avx512_vnni"])
    reason = "cpu_isa avx512: this CPU has no avx512_bf16; it may be auto or avx512_vnni, avx2"
    with pytest.raises(ConfigError, match=reason):
        _load(llama(), runner=runner, cpu_isa="avx512")
    with pytest.raises(ValidationError, match="cpu_isa avx2: runner torch does not use the native kernels"):
        runner_options(runner="torch", cpu_isa="avx2")


def test_a_block_size_of_8_warns_that_torch_computes_and_names_the_remedy(
    llama: Llama, this_isa: Isa, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _load(llama(), block_size=8).arithmetic == "torch-bfloat16"
    (said,) = [vars(record) for record in caplog.records if "torch computes" in record.getMessage()]
    assert said["reason"] == "block_size 8: the native kernels need 16 or 32, because a page has 16 tokens"
    assert said["remedy"] == "--block-size 16"


@pytest.mark.parametrize("head_dim", [8, 24, 528])
def test_heads_that_the_kernels_do_not_support_are_named(llama: Llama, this_isa: Isa, head_dim: int) -> None:
    folder = llama(head_dim=head_dim)
    with pytest.raises(ConfigError, match=f"head_dim {head_dim}"):
        _load(folder, runner="native")
    assert _load(folder).arithmetic == "torch-bfloat16"


def _no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("penstock.kernels.cpu.build.PREBUILT", tmp_path)
    monkeypatch.setattr("penstock.kernels.cpu.build.SHARED", tmp_path / "built")
    return re.escape("no C++ compiler: looked for no-such-compiler")


def _other_cpu(monkeypatch: pytest.MonkeyPatch, _tmp_path: Path) -> str:
    for user in (native_load, doctor):
        monkeypatch.setattr(user, "cpu_flags", frozenset)
    return "the CPU has neither AVX2 nor AVX-512 with VNNI"


@pytest.mark.parametrize("break_it", [_no_compiler, _other_cpu])
def test_without_kernels_torch_computes_and_one_warning_says_why_and_what_to_do(
    llama: Llama,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    break_it: Callable[[pytest.MonkeyPatch, Path], str],
) -> None:
    folder, reason = llama(), break_it(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert _load(folder).arithmetic == "torch-bfloat16"
    (said,) = [vars(record) for record in caplog.records if "torch computes" in record.getMessage()]
    assert re.search(reason, said["reason"]) and said["remedy"]
    # `penstock doctor` says the same of this machine.
    warnings = [check for check in check_machine() if "torch computes" in check.finding]
    assert [check.advice for check in warnings] == [said["remedy"]]
    assert re.search(reason, warnings[0].finding)
    with pytest.raises(ConfigError, match=f"runner native: {reason}"):
        _load(folder, runner="native")
    with pytest.raises(ConfigError, match=r"quantization int8 is not supported: .* the native runner has int8"):
        _load(folder, quantization="int8")


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("quantization", ["none", "int8", "int8_group", "int4"])
def test_a_poisoned_row_fails_alone_and_its_blocks_can_be_used_again(
    llama: Llama, load_native: Callable[..., NativeRunner], quantization: str, odd: float
) -> None:
    poisoned, healthy = 77, [5, 9, 60, 3]
    for kept in ("bfloat16", "float16", "int8"):
        runner = load_native(
            llama(poison=((poisoned, odd),)), quantization=quantization, kv_cache_dtype=kept, num_threads=2
        )
        want = logits_alone(runner, healthy)
        prompts = [healthy, [4, poisoned, 8], [8, 5, poisoned], [9] * 20]
        tracks = [Track(ids, [10 + 2 * i, 11 + 2 * i]) for i, ids in enumerate(prompts)]
        alone = [int(logits_alone(runner, ids)[-1].argmax()) for ids in (healthy, [9] * 20)]
        rows = rows_of(4, temperature=[0.0, 0.0, 1.0, 0.0])
        tokens = tokens_of_step(runner, [(track, track.left) for track in tracks], rows)
        assert tokens.tolist() == [alone[0], -1, -1, alone[1]]
        again = Track(healthy, [14])
        tokens = tokens_of_step(runner, [(again, 4)], rows_of(1, temperature=0.0))
        assert tokens.tolist() == [alone[0]]
        np.testing.assert_array_equal(logits_alone(runner, healthy), want)


@pytest.mark.parametrize(
    ("isa", "kept", "length", "block_size", "odd"),
    pairwise(ISAS, ["bfloat16", "float16", "int8"], [1, 2, 15, 16, 17, 32, 40, 75], [16, 32], [np.nan, np.inf]),
    indirect=["isa"],
    scope="session",
)
def test_nonfinite_values_in_stale_blocks_reach_no_other_sequence(
    llama: Llama, load_native: Callable[..., NativeRunner], kept: str, length: int, block_size: int, odd: float
) -> None:
    poisoned = 77
    options = {"kv_cache_dtype": kept, "block_size": block_size, "num_threads": 2}
    runner = load_native(llama(poison=((poisoned, odd),)), **options)

    def leave(token: int, blocks: Sequence[int]) -> None:
        """As a prompt that was aborted before it came to sample."""
        num_tokens = len(blocks) * block_size
        tokens_of_step(runner, [(Track([token] * num_tokens, blocks), num_tokens)], rows_of(1))

    for chunk in (1, 3, length):
        given = {"block_size": block_size, "length": min(length, 5 * block_size // 2), "chunk": chunk}
        want = logits_over(runner, partial(leave, 5), **given)
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(logits_over(runner, partial(leave, poisoned), **given), want)


def _cores() -> dict[int, str]:
    """Where each of this process's compute threads may run."""
    cores = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # another test's thread, at its end
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if lines["Name"] == "penstock-cpu":
                cores[int(task.name)] = lines["Cpus_allowed_list"].strip()
    return cores


def _slice_ns(task: int) -> int:
    """How long the scheduler lets a thread run before it looks for another; 0 is the calling one."""
    attributes = struct.Struct("IIQiIQQQ")
    buffer = ctypes.create_string_buffer(attributes.size)
    assert ctypes.CDLL(None).syscall(SYS_SCHED_GETATTR, task, buffer, attributes.size, 0) == 0
    return int(attributes.unpack(buffer.raw)[5])


def test_threads_that_are_as_many_as_the_cores_have_one_each(llama: Llama, this_isa: Isa) -> None:
    before, allowed = _cores(), sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one core")
    loaded = _load(llama(), runner="native", num_threads=len(allowed))
    ours = [core for task, core in _cores().items() if task not in before]
    assert sorted(ours) == sorted(str(core) for core in allowed[1:])
    with ThreadPoolExecutor(1) as stepping:
        stepping.submit(loaded.runner.bind_thread).result()
        assert stepping.submit(os.sched_getaffinity, 0).result() == {allowed[0]}
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_threads_that_are_not_as_many_as_the_cores_run_anywhere(llama: Llama, this_isa: Isa) -> None:
    allowed = os.sched_getaffinity(0)
    loaded = _load(llama(), runner="native", num_threads=len(allowed) + 1)
    with ThreadPoolExecutor(1) as stepping:
        stepping.submit(loaded.runner.bind_thread).result()
        assert stepping.submit(os.sched_getaffinity, 0).result() == allowed


@pytest.mark.skipif(_linux() < (6, 12), reason="time slices have one length")
@pytest.mark.skipif("os.sched_getscheduler(0) != os.SCHED_OTHER", reason="only the usual policy takes a length")
def test_threads_that_compute_ask_for_long_time_slices(llama: Llama, this_isa: Isa) -> None:
    before = _cores().keys()
    loaded = _load(llama(), runner="native", num_threads=2)
    with ThreadPoolExecutor(1) as stepping:
        stepping.submit(loaded.runner.bind_thread).result()
        assert stepping.submit(_slice_ns, 0).result() == LONG_SLICE_NS
    assert [_slice_ns(task) for task in _cores() if task not in before] == [LONG_SLICE_NS]
    assert 0 < _slice_ns(0) < LONG_SLICE_NS


def test_cores_can_be_reserved_for_other_processes(
    llama: Llama, this_isa: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_load, "usable_cores", lambda: 4)
    for reserved, num_threads in ((0, 4), (1, 3), (4, 1), (9, 1)):
        before = _cores().keys()
        loaded = _load(llama(), runner="native", num_threads=None, reserved_cores=reserved)
        assert len(_cores().keys() - before) == num_threads - 1
        assert isinstance(loaded.runner, NativeRunner)
        loaded.runner.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take a core away")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_thread_whose_core_is_taken_is_left_out_until_it_is_free_again(
    llama: Llama, this_isa: Isa, caplog: pytest.LogCaptureFixture
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    runner = _load(llama(), runner="native", num_threads=len(cores)).runner
    assert isinstance(runner, NativeRunner)
    token_ids = list(range(64, 128))
    want = logits_alone(runner, token_ids)

    def step_until_it_uses(num_threads: int) -> None:
        deadline = Deadline()
        while runner.num_threads_in_use != num_threads:
            deadline.check()
            assert np.array_equal(logits_alone(runner, token_ids), want)

    taken = subprocess.Popen([sys.executable, "-c", _TAKE_CORE, str(cores[-1])])
    try:
        step_until_it_uses(len(cores) - 1)
    finally:
        taken.kill()
        taken.wait()
    step_until_it_uses(len(cores))
    assert caplog.text.count("other processes use the cores") == 1


@pytest.mark.parametrize("closes", [False, True])
def test_model_can_be_closed_with_a_step_in_flight(llama: Llama, this_isa: Isa, closes: bool) -> None:
    before = _cores().keys()
    runner = _load(llama(), runner="native", num_threads=3).runner
    assert isinstance(runner, NativeRunner)
    plan = plan_of([(Track([3, 4, 5], [1]), 3)], rows_of(1, temperature=0.0))
    flight = runner.submit(plan)
    if closes:
        runner.close()
    del runner, plan, flight
    assert _cores().keys() <= before


@pytest.mark.skipif(SANITIZE in os.environ, reason="a sanitizer ends the process instead")
@pytest.mark.parametrize("runner", ["native", "torch"])
def test_kv_cache_larger_than_memory_is_refused_by_name(llama: Llama, this_isa: Isa, runner: str) -> None:
    # More than the processor has addresses for: where a system promises any memory, that is what it cannot promise.
    folder, many = llama(num_key_value_heads=4, head_dim=256), 2_000_000_000
    with pytest.raises(ConfigError, match=f"no memory for the model with 8 KV blocks and num_swap_blocks {many}"):
        _load(folder, runner=runner, num_swap_blocks=many)


@pytest.mark.skipif(SANITIZE in os.environ, reason="a sanitizer ends the process instead")
def test_out_of_memory_is_recognized(llama: Llama, this_isa: Isa) -> None:
    runner = _load(llama()).runner
    assert isinstance(runner, NativeRunner)
    with pytest.raises(MemoryError):
        runner._model.allocate(Slot.HEAD, 0, [(Format.BF16, 1 << 30)], 1 << 20)


@contextmanager
def _room_left(mib: int) -> Iterator[None]:
    """The process gets no more than so much memory."""
    was = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mib << 20), was[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, was)


@pytest.mark.skipif(SANITIZE in os.environ, reason="a sanitizer's shadow is larger")
def test_too_many_threads_are_refused_and_those_that_started_end(llama: Llama, this_isa: Isa) -> None:
    before = _cores().keys()
    with _room_left(600), pytest.raises(ConfigError, match=r"num_threads 1000 cannot be started: .+"):
        _load(llama(), runner="native", num_threads=1000)
    assert _cores().keys() <= before


@pytest.mark.skipif(SANITIZE in os.environ, reason="a sanitizer's shadow is larger")
def test_out_of_memory_for_a_table_is_recognized(llama: Llama, this_isa: Isa) -> None:
    runner, table = _load(llama()).runner, np.zeros(100 << 20, np.float32)
    assert isinstance(runner, NativeRunner)
    with _room_left(200), pytest.raises(MemoryError):
        runner._model.set_vector(Vector.POSITION_BIASES, 0, table)
    runner.close()
