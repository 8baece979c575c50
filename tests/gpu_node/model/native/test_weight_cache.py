"""One packed copy for all processes of a machine: what it holds, which process makes it, and loading without it."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
import pytest
from fixtures.plans import logits_alone
from numpy.typing import NDArray

from penstock.gpu_node.model.native import packed_file, packed_matrix, weight_cache
from penstock.gpu_node.model.native.packed_file import flush_to_disk
from penstock.gpu_node.model.native.packing import Packer
from penstock.gpu_node.model.native.runner import NativeRunner

Load: TypeAlias = Callable[..., NativeRunner]
Make: TypeAlias = Callable[..., Path]
Logits: TypeAlias = NDArray[np.float32]
DAY_S = 24 * 60 * 60


def _logits(runner: NativeRunner) -> Logits:
    return logits_alone(runner, [5, 9, 60, 3, 17, 8])


@pytest.mark.parametrize("quantization", ["none", "int8", "int8_group", "int4"])
def test_mapped_weights_compute_bitwise_what_private_ones_do(
    llama: Make, load: Load, cache: Path, packings: list[Packer], quantization: str
) -> None:
    folder = llama(tie_word_embeddings=quantization == "none")
    want = _logits(load(folder, quantization=quantization, weight_cache=False))
    for _ in range(2):
        np.testing.assert_array_equal(_logits(load(folder, quantization=quantization)), want)
    assert len(packings) == 2
    (path,) = cache.iterdir()
    assert str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("quantization", ["none", "int8", "int8_group", "int4"])
def test_packing_depends_on_nothing_that_a_buffer_held_before(
    llama: Make, load: Load, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """All ones are NaN in every format, and the rows do not fill their panels."""
    folder = llama(vocab_size=101, intermediate_size=72)
    want = _logits(load(folder, quantization=quantization, weight_cache=False))
    pages = packed_matrix.pages

    def used_pages(num_bytes: int) -> NDArray[np.uint8]:
        (used := pages(num_bytes)).fill(255)
        return used

    monkeypatch.setattr(packed_matrix, "pages", used_pages)
    np.testing.assert_array_equal(_logits(load(folder, quantization=quantization)), want)


@pytest.mark.parametrize("is_tied", [True, False])
def test_size_of_the_weights_is_the_same_from_any_source(llama: Make, load: Load, cache: Path, is_tied: bool) -> None:
    folder = llama(tie_word_embeddings=is_tied)
    sizes = {load(folder, weight_cache=cached).placement.weight_bytes for cached in (False, True, True)}
    (path,) = cache.iterdir()
    assert 0.8 * path.stat().st_size < sizes.pop() <= path.stat().st_size
    assert not sizes


@pytest.mark.parametrize("name", ["llama", "qwen3", "falcon rw"])
def test_biases_norms_and_positions_come_back_too(family: Make, load: Load, name: str) -> None:
    folder = family(name)
    want = _logits(load(folder, quantization="int8", weight_cache=False))
    for _ in range(2):
        np.testing.assert_array_equal(_logits(load(folder, quantization="int8")), want)


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _of_others(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"some other file." + content[16:])


def _damaged_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)


def test_ranks_that_share_a_descriptor_do_not_move_each_others_position(llama: Make, load: Load, cache: Path) -> None:
    load(llama())
    (path,) = cache.iterdir()
    with path.open("rb", buffering=0) as file:
        _, key, *_ = packed_file._HEADER.unpack(file.read(packed_file._HEADER.size))
        at = file.seek(7)
        assert packed_file.PackedWeights.of_descriptor(file.fileno(), key.decode()).formats
        assert file.tell() == at


def _damaged_table(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-20] + bytes(20))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [_cut_short, _of_others, _damaged_header, _damaged_table, _empty])
def test_truncated_file_is_packed_again(
    llama: Make, load: Load, cache: Path, packings: list[Packer], harm: Callable[[Path], None]
) -> None:
    want = _logits(load(llama()))
    (path,) = cache.iterdir()
    # A process that maps a file keeps it as it was: the next one gets another.
    shutil.copy(path, copy := path.with_name("copy"))
    copy.rename(path)
    harm(path)
    np.testing.assert_array_equal(_logits(load(llama())), want)
    _logits(load(llama()))
    assert len(packings) == 2


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_after_a_restart_of_the_machine_only_a_file_that_was_on_disk_is_used(
    llama: Make, load: Load, packings: list[Packer], monkeypatch: pytest.MonkeyPatch, is_on_disk: bool
) -> None:
    flushed = Event()

    def flush(path: Path) -> None:
        if is_on_disk:
            flush_to_disk(path)
        flushed.set()

    monkeypatch.setattr(weight_cache, "flush_to_disk", flush)
    want = _logits(load(llama()))
    assert flushed.wait(60)
    load(llama())
    assert len(packings) == 1
    monkeypatch.setattr(packed_file, "boot_id", lambda: b"-" * 36)
    np.testing.assert_array_equal(_logits(load(llama())), want)
    assert len(packings) == (1 if is_on_disk else 2)


def test_file_of_other_weights_is_not_used(llama: Make, load: Load, cache: Path, packings: list[Packer]) -> None:
    load(llama())
    (path,) = cache.iterdir()
    other = llama(equal_logits=True)
    load(other)
    (its_path,) = set(cache.iterdir()) - {path}
    os.replace(path, its_path)
    want = _logits(load(other, weight_cache=False))
    np.testing.assert_array_equal(_logits(load(other)), want)
    assert len(packings) == 4


def test_changed_files_and_other_formats_have_files_of_their_own(
    llama: Make, load: Load, cache: Path, tmp_path: Path, packings: list[Packer]
) -> None:
    folder = Path(shutil.copytree(llama(), tmp_path / "copy"))
    load(folder)
    load(folder, quantization="int4")
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, ns=(0, 0))
    load(folder)
    assert len(packings) == len(list(cache.iterdir())) == 3


def _no_folder(cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")


def _full_disk(cache: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def _little_room(_cache: Path) -> None:
    shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 10)  # type: ignore[assignment, return-value]


@pytest.mark.parametrize(
    ("harm", "reason"), [(_no_folder, "Not a directory"), (_full_disk, "too large"), (_little_room, "0 MiB free")]
)
def test_without_a_writable_cache_weights_are_private_and_the_reason_is_logged(
    llama: Make,
    load: Load,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], None],
    reason: str,
) -> None:
    folder, limits = llama(), resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(shutil, "disk_usage", shutil.disk_usage)
    want = _logits(load(folder, weight_cache=False))
    harm(cache)
    try:
        runner = load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    np.testing.assert_array_equal(_logits(runner), want)
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "not shared with other processes" in said.getMessage() and re.search(reason, vars(said)["reason"])
    assert not cache.is_dir() or not list(cache.iterdir())


def _wait_until_flushed() -> None:
    """Wait until new files are on disk, because flushing changes their time."""
    for thread in threading.enumerate():
        if thread.name == "penstock-flush":
            thread.join(60)


def test_files_not_opened_for_long_are_deleted_when_another_is_written(llama: Make, load: Load, cache: Path) -> None:
    load(llama())
    _wait_until_flushed()
    (old,) = cache.iterdir()
    left_over = cache / "of-a-process-that-died.part"
    left_over.touch()
    for path in (old, left_over):
        os.utime(path, (time.time() - 8 * DAY_S,) * 2)
    load(llama(equal_logits=True))
    assert not old.exists() and not left_over.exists()
    (kept,) = cache.iterdir()
    os.utime(kept, (time.time() - 8 * DAY_S,) * 2)
    load(llama(equal_logits=True))
    load(llama())
    assert kept.exists()
