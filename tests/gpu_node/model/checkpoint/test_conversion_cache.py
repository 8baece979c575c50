"""The cache of converted models: its files are complete after a power failure, and errors name the right path."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint import gguf_conversion as gguf
from penstock.gpu_node.model.checkpoint.conversion_cache import built_once
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, GgufHeader
from penstock.gpu_node.model.checkpoint.source import resolve_model
from penstock.kernels.cpu import build


@pytest.fixture
def flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were flushed to disk, under the names that they had then; the cache is empty."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    found: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_a_converted_model_is_on_disk_before_it_has_its_name(flushed: list[Path]) -> None:
    def built(folder: Path) -> None:
        (folder / "sub").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "sub" / "vocab.txt").write_text("a")

    folder = built_once("name", built)
    assert {path.name for path in flushed} == {"model", "config.json", "sub", "vocab.txt"}
    assert all(folder not in (path, *path.parents) for path in flushed)


def test_compiled_kernels_are_on_disk_before_they_have_their_name(
    flushed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(command: list[str]) -> str:
        Path(command[-1]).write_bytes(b"code")
        return ""

    monkeypatch.setattr(build, "_run", compiled)
    path = tmp_path / "kernels.so"
    build._build("g++", (), [], path, lambda _fraction: None)
    assert path.read_bytes() == b"code"
    assert [each.name for each in flushed] == ["kernels.so"] and path not in flushed


def test_a_full_disk_is_not_blamed_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_header: object, folder: Path) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "tokenizer.json"))

    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(GgufFile, "header_with", lambda *_: GgufHeader({}, {}))
    monkeypatch.setattr(gguf, "describe", full)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"^cannot write to .*/cache/models/.*No space left"):
        resolve_model(str(model), lambda *_: None)


def test_model_with_a_long_name_can_be_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(_header: object, folder: Path) -> bool:
        folder.mkdir()
        (folder / "generation_config.json").write_text("{}")
        return True

    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(GgufFile, "header_with", lambda *_: GgufHeader({}, {}))
    monkeypatch.setattr(gguf, "describe", described)
    model = tmp_path / f"{'é' * 120}.gguf"
    model.write_bytes(b"GGUF")
    assert resolve_model(str(model), lambda *_: None).folder.is_dir()
