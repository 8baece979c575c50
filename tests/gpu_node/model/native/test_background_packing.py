"""Serving from the checkpoint's rows while the weights are packed: alone, beside other processes, without a cache."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest
from fakes.waiting import WAIT_S, Deadline, wait_until
from fixtures.plans import logits_alone
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.native import packed_matrix, weight_cache
from penstock.gpu_node.model.native.packing import Packer
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.kernels.cpu.library import NativeModel

Load: TypeAlias = Callable[..., NativeRunner]
Make: TypeAlias = Callable[..., Path]


def _logits(runner: NativeRunner) -> NDArray[np.float32]:
    return logits_alone(runner, [5, 9, 60, 3, 17, 8])


def _num_on_rows(runner: NativeRunner) -> int:
    """How many matrices are still read from the checkpoint's rows."""
    return len(runner._model._rows)


def _step_until_packed(runner: NativeRunner, want: NDArray[np.float32]) -> None:
    """Step as an engine does, which never waits for the packing."""
    deadline = Deadline()
    while runner._packing is not None:
        deadline.check()
        np.testing.assert_array_equal(_logits(runner), want)
    np.testing.assert_array_equal(_logits(runner), want)


@pytest.fixture
def cache_with_kernels(cache: Path, best_library: Path) -> Path:
    """The folder of packed weights, beside compiled kernels. Processes with this cache would compile them anew."""
    native = cache.parent / "native"
    native.mkdir(parents=True)
    shutil.copyfile(best_library, native / best_library.name)
    return cache


@pytest.fixture
def let_pack(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Keeps every process from packing until it is called, as one that packs the same weights does."""
    may_pack, is_locked = Event(), weight_cache._is_locked
    monkeypatch.setattr(weight_cache, "_is_locked", lambda file: may_pack.is_set() and is_locked(file))
    yield may_pack.set
    may_pack.set()


class Gate:
    """Stops a method of packers, but not of one that only names rows, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.opened = Semaphore(0), Semaphore(0)
        self.num_calls = 0
        method = getattr(Packer, name)

        def gated(packer: Packer, *args: Any, **options: Any) -> Any:
            if not packer._on_read:
                self.num_calls += 1
                self.reached.release()
                assert threading.current_thread().name == "penstock-pack", "a step or a loading packs"
                assert self.opened.acquire(timeout=WAIT_S)
            return method(packer, *args, **options)

        monkeypatch.setattr(Packer, name, gated)

    def open(self) -> None:
        """Let all through."""
        self.opened.release(1000)


_CHILD = """
import sys, time
from fakes.runners.runner_options import runner_options
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native.packing import Packer
from fixtures.plans import logits_alone
pack, pack_layer = Packer.pack, Packer._pack_layer
def told(packer):
    if not packer._on_read:
        print("packs", flush=True)
        if "dies" in sys.argv: sys.stdin.read()
    return pack(packer)
def after_a_step(packer, layer):
    # The model maps a written matrix while others are written.
    while not packer._on_read and layer == 1 and len(runner._model._rows) == num_rows:
        time.sleep(0.001)
    return pack_layer(packer, layer)
Packer.pack, Packer._pack_layer = told, after_a_step
options = runner_options(runner="native", dtype="bfloat16", num_threads=1, weight_cache=True)
runner = load_model(sys.argv[1], options, lambda stage, fraction: None).runner
num_rows = len(runner._model._rows)
while runner._packing is not None:
    logits_alone(runner, [5, 9, 60, 3])
    time.sleep(0.001)
print("ready", logits_alone(runner, [5, 9, 60, 3]).tobytes().hex(), flush=True)
sys.stdin.read()
"""


def _start(folder: Path, cache: Path, *, dies: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, str(folder), *(["dies"] if dies else [])]
    tests = Path(__file__).parents[3]
    env = os.environ | {"PYTHONPATH": f"{tests}:{tests.parent / 'ops'}", "PENSTOCK_CACHE": str(cache.parent)}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _wait_until_it_opens_the_part(process: subprocess.Popen[str]) -> None:
    def is_open() -> bool:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # The process has closed it meanwhile.
                if str(link.readlink()).endswith(".part"):
                    return True
        return False

    wait_until(is_open)


def _lines_until_ready(process: subprocess.Popen[str]) -> list[str]:
    """What it prints, which ends with how it computes once it uses the packed weights."""
    lines: list[str] = []
    killer = threading.Timer(WAIT_S, process.kill)
    killer.start()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready"):
            break
    killer.cancel()
    return lines


def test_processes_that_start_together_pack_once_also_when_the_first_dies(
    llama: Make, cache_with_kernels: Path
) -> None:
    """The one that packs steps meanwhile. The other one uses the file while the one that packed it still runs."""
    folder = llama()
    first = _start(folder, cache_with_kernels, dies=True)
    assert first.stdout is not None and first.stdout.readline() == "packs\n"
    others = [_start(folder, cache_with_kernels) for _ in range(2)]
    try:
        for process in others:
            _wait_until_it_opens_the_part(process)
        first.kill()
        first.communicate()
        said = [_lines_until_ready(process) for process in others]
    finally:
        first.kill()
        for process in others:
            process.communicate(timeout=WAIT_S)
    assert sorted(len(lines) for lines in said) == [1, 2]
    assert said[0][-1] == said[1][-1]
    (path,) = cache_with_kernels.iterdir()
    assert path.suffix == ".weights"


def test_a_waiting_model_uses_the_file_while_the_one_that_packed_it_lives(
    llama: Make, load: Load, packings: list[Packer], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = _logits(load(llama(), weight_cache=False))
    packings.clear()
    gate = Gate(monkeypatch, "_pack_mlps")
    runners = [load(llama(), waits=False) for _ in range(2)]
    for runner in runners:
        _logits(runner)
    assert gate.reached.acquire(timeout=WAIT_S)
    deadline = Deadline()
    while all(_num_on_rows(runner) == 10 for runner in runners):
        deadline.check()
        for runner in runners:
            np.testing.assert_array_equal(_logits(runner), want)
    gate.open()
    for runner in runners:
        _step_until_packed(runner, want)
        assert _num_on_rows(runner) == 0
    assert len(packings) == 1


@pytest.mark.parametrize("name", ["llama", "qwen3", "falcon rw", "qwen3 moe", "gemma2"])
def test_a_model_computes_the_same_before_its_weights_are_packed(
    family: Make, load: Load, let_pack: Callable[[], None], packings: list[Packer], name: str
) -> None:
    folder = family(name)
    want = _logits(load(folder, weight_cache=False))
    packings.clear()
    runner = load(folder, waits=False)
    np.testing.assert_array_equal(_logits(runner), want)
    assert not packings
    let_pack()
    runner.wait_until_packed()
    np.testing.assert_array_equal(_logits(runner), want)
    assert len(packings) == 1


@pytest.mark.parametrize("num_tokens", [1, 150])
def test_matrices_are_used_one_by_one_as_they_are_packed(
    family: Make, load: Load, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """A layer is packed after the model computed with the one before. 150 tokens are more than one pass reads."""
    folder, prompt = family("qwen2", num_hidden_layers=3), [7 * i % 90 for i in range(num_tokens)]
    want = logits_alone(load(folder, weight_cache=False, num_kv_blocks=16), prompt)
    gate = Gate(monkeypatch, "_pack_layer")
    runner = load(folder, waits=False, num_kv_blocks=16)
    num_matrices = _num_on_rows(runner)
    for num_packed in range(3):
        for _ in range(2):
            np.testing.assert_array_equal(logits_alone(runner, prompt), want)
        while _num_on_rows(runner) > num_matrices - num_packed * 4:
            logits_alone(runner, prompt)
        assert _num_on_rows(runner) == num_matrices - num_packed * 4
        gate.opened.release()
    runner.wait_until_packed()
    np.testing.assert_array_equal(logits_alone(runner, prompt), want)
    assert _num_on_rows(runner) == 0


def _no_folder(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")


@pytest.mark.parametrize("name", ["qwen2", "falcon rw", "qwen3 moe"])
def test_a_step_does_not_wait_for_packing_where_nothing_can_be_cached(
    family: Make, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = family(name)
    want = _logits(load(folder, weight_cache=False))
    _no_folder(cache)
    gate = Gate(monkeypatch, "_pack_layer")
    runner = load(folder, waits=False)
    num_matrices = _num_on_rows(runner)
    while not gate.reached.acquire(timeout=0.01):
        np.testing.assert_array_equal(_logits(runner), want)
    np.testing.assert_array_equal(_logits(runner), want)
    assert _num_on_rows(runner) == num_matrices > 0
    gate.open()
    _step_until_packed(runner, want)
    assert _num_on_rows(runner) == 0


def test_a_disk_that_is_full_in_the_middle_harms_no_step(
    family: Make, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One write fails, and the next one succeeds: another program has freed space."""
    folder = family("qwen2")
    want = _logits(load(folder, weight_cache=False))
    left = iter([False, False, False, False, True])
    write_at = packed_matrix.write_at

    def write(file: int, content: memoryview, start: int) -> None:
        if next(left, False):
            raise OSError("No space left on device")
        write_at(file, content, start)

    monkeypatch.setattr(packed_matrix, "write_at", write)
    gate = Gate(monkeypatch, "_pack_mlps")
    runner = load(folder, waits=False)
    _logits(runner)
    for _ in range(2):
        assert gate.reached.acquire(timeout=WAIT_S)
        for _ in range(20):
            np.testing.assert_array_equal(_logits(runner), want)
            time.sleep(0.002)
        gate.opened.release()
    gate.open()
    _step_until_packed(runner, want)
    assert _num_on_rows(runner) == 0
    assert "No space left" in str([vars(record).get("reason") for record in caplog.records])
    assert not list(cache.iterdir())


def test_a_checkpoint_that_is_removed_while_it_serves_is_packed_nevertheless(
    llama: Make, load: Load, cache: Path, tmp_path: Path, let_pack: Callable[[], None]
) -> None:
    folder = Path(shutil.copytree(llama(), tmp_path / "copy"))
    want = _logits(load(folder, weight_cache=False))
    runner = load(folder, waits=False)
    np.testing.assert_array_equal(_logits(runner), want)
    shutil.rmtree(folder)
    let_pack()
    _step_until_packed(runner, want)
    assert _num_on_rows(runner) == 0


def test_a_model_keeps_the_weights_that_it_was_loaded_with_when_another_takes_their_path(
    llama: Make, load: Load, cache: Path, tmp_path: Path, let_pack: Callable[[], None]
) -> None:
    folder = Path(shutil.copytree(llama(), tmp_path / "copy"))
    want = _logits(load(folder, weight_cache=False))
    runner = load(folder, waits=False)
    (weights,) = folder.glob("*.safetensors")
    (other,) = llama(equal_logits=True).glob("*.safetensors")
    os.replace(shutil.copy(other, tmp_path / "other"), weights)
    let_pack()
    _step_until_packed(runner, want)
    assert not np.array_equal(_logits(load(folder)), want)
    assert len(list(cache.glob("*.weights"))) == 2


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_does_not_spoil_the_cache(
    llama: Make, load: Load, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced after the cached file got its name and before the weights are mapped."""
    folder = Path(shutil.copytree(llama(), tmp_path / "copy"))
    (weights,) = folder.glob("*.safetensors")
    (other,) = llama(equal_logits=True).glob("*.safetensors")
    opened = weight_cache.WeightCache.opened

    def replaced(cached: weight_cache.WeightCache) -> Any:
        found = opened(cached)
        os.replace(shutil.copy(other, tmp_path / "other"), weights)
        return found

    with (
        mock.patch.object(weight_cache.WeightCache, "opened", replaced),
        pytest.raises(ConfigError, match="replaced while they were loaded"),
    ):
        load(folder)
    assert not list(cache.glob("*"))


def test_a_model_serves_from_rows_when_it_cannot_be_packed(
    llama: Make, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = _logits(load(llama(), weight_cache=False))
    pack_rows = Packer._pack_rows

    def without_memory(packer: Packer, *args: Any) -> None:
        if not packer._on_read:
            raise MemoryError("the native kernels ran out of memory")
        pack_rows(packer, *args)

    monkeypatch.setattr(Packer, "_pack_rows", without_memory)
    runner = load(llama(), waits=False)
    _step_until_packed(runner, want)
    assert _num_on_rows(runner) == 10
    assert caplog.text.count("weights could not be packed") == 1
    runner.close()


def test_partial_file_of_a_killed_process_is_removed_before_space_is_checked(
    llama: Make, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(llama())
    (path,) = cache.iterdir()
    left = path.rename(path.with_suffix(".part"))
    needed = 2 * sum(file.stat().st_size for file in llama().glob("*.safetensors"))
    os.utime(left, (0, 0))

    def usage(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=needed + 1000 - sum(file.stat().st_size for file in cache.iterdir()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    load(llama())
    assert list(cache.iterdir()) == [path]


def test_the_cache_may_be_deleted_while_weights_are_packed(
    llama: Make, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process then packs too. Neither takes the file of the other."""
    want = _logits(load(llama(), weight_cache=False))
    gate = Gate(monkeypatch, "_pack_mlps")
    runners = []
    for _ in range(2):
        runners.append(load(llama(), waits=False))
        _logits(runners[-1])
        assert gate.reached.acquire(timeout=WAIT_S)
        if len(runners) == 1:
            shutil.rmtree(cache)
    threads = [thread for thread in threading.enumerate() if thread.name == "penstock-pack"]
    assert len(threads) == 2
    gate.opened.release(1)
    gate.open()
    for runner in runners:
        _step_until_packed(runner, want)
        assert _num_on_rows(runner) == 0
    (path,) = cache.iterdir()
    assert path.suffix == ".weights"


def test_closing_a_model_ends_its_packing(llama: Make, load: Load, cache: Path, let_pack: Callable[[], None]) -> None:
    del let_pack
    runner = load(llama(), waits=False)
    _logits(runner)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "penstock-pack"]
    runner.close()
    assert not thread.is_alive()
    assert not list(cache.glob("*.weights"))


def test_closing_a_model_waits_for_one_part_of_a_matrix(
    llama: Make, load: Load, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "_pack_rows")
    runner = load(llama(), waits=False)
    assert runner._packing is not None
    is_stopped = runner._packing._state.is_stopped
    _logits(runner)
    assert gate.reached.acquire(timeout=WAIT_S)
    closing = threading.Thread(target=runner.close)
    closing.start()
    assert is_stopped.wait(WAIT_S)
    gate.open()
    closing.join(WAIT_S)
    assert gate.num_calls == 1
    assert not list(cache.iterdir())


_SCRIPT = """
import logging, sys, time
from penstock import Engine, SamplingParams
from penstock.gpu_node.model.native.packing import Packer
logging.basicConfig()
pack_rows, packs = Packer._pack_rows, []
def slowly(packer, *args):
    if not packer._on_read:
        packs.append(0)
        time.sleep(0.05)
    return pack_rows(packer, *args)
Packer._pack_rows = slowly
engine = Engine(sys.argv[1], runner="native", num_threads=1, num_kv_blocks=16)
engine.generate([[5, 9]], SamplingParams(max_tokens=2))
while len(packs) < 2:
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_script_that_ends_while_its_weights_are_packed_prints_nothing(
    demo_gguf: Path, cache_with_kernels: Path
) -> None:
    env = os.environ | {"PENSTOCK_CACHE": str(cache_with_kernels.parent)}
    command = [sys.executable, "-c", _SCRIPT, str(demo_gguf)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not list(cache_with_kernels.iterdir())


def test_cores_that_packing_takes_are_not_those_of_other_processes(
    llama: Make, load: Load, let_pack: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """After packing, the model gets its threads back one by one. Then the warning is for other processes."""
    monkeypatch.setattr("penstock.gpu_node.model.native.runner._RECOVERY_S", 0.2)
    wait = NativeModel.wait
    monkeypatch.setattr(NativeModel, "wait", lambda model: min(wait(model), 1))
    runner = load(llama(), waits=False, num_threads=2)
    for _ in range(3):
        _logits(runner)
    let_pack()
    runner.wait_until_packed()
    _logits(runner)
    warning = "other processes use the cores"
    assert warning not in caplog.text
    deadline = Deadline()
    while warning not in caplog.text:
        deadline.check()
        _logits(runner)
    _logits(runner)
    assert caplog.text.count(warning) == 1
    assert [record.levelno for record in caplog.records if warning in record.getMessage()] == [logging.WARNING]


def test_a_checkpoint_that_is_quantized_at_loading_is_packed_before_it_serves(
    llama: Make, load: Load, packings: list[Packer]
) -> None:
    load(llama(), quantization="int8_group", waits=False)
    assert len(packings) == 1
