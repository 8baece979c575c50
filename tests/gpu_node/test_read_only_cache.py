"""A cache folder that cannot be written costs time at each start, and a line in the log."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

import pytest
from fakes.processes.node_process import NodeProcess

from penstock.cli.demo_model import demo_model
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.conversion_cache import built_once
from penstock.gpu_node.model.native import load
from penstock.kernels.cpu import build
from penstock.kernels.cpu.probe import best_isa, cpu_flags
from penstock.producer.client import Client
from penstock.runtime.cache_folders import cache_folder

SAID = "the cache folder cannot be written"


@pytest.fixture(params=["/sys/penstock", "/dev/null", "read-only"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that the kernel refuses, a file in its place, and one without the right to write."""
    folder = Path(request.param)
    if not folder.is_absolute():
        if os.geteuid() == 0:
            pytest.skip("root may write there")
        folder = tmp_path / folder
        folder.mkdir(mode=0o500)
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))


def made(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@pytest.mark.usefixtures("unwritable")
def test_model_is_converted_for_this_process_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        folder = built_once("name", made)
    assert (folder / "config.json").read_text() == "{}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["folder"]) == (SAID, f"{cache_folder()}/models")


@pytest.mark.usefixtures("unwritable")
def test_kernels_are_compiled_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(_compiler: str, _flags: object, _sources: object, path: Path, _progress: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "SHARED", tmp_path / "built")
    monkeypatch.setattr(build, "_build", compiled)
    if best_isa(cpu_flags()) is None:
        pytest.skip("no kernels for this CPU")
    with caplog.at_level(logging.WARNING):
        _, library = load.kernels_for("auto", lambda _stage, _fraction: None)
    assert library.is_file()
    assert [record.getMessage() for record in caplog.records] == [SAID]


@pytest.mark.usefixtures("unwritable")
def test_error_without_any_writable_folder_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/sys/penstock")
    with pytest.raises(ConfigError, match=re.compile("^PENSTOCK_CACHE: .*/(sys|null).*; set it to a folder that can")):
        built_once("name", made)


def test_a_user_without_a_home_has_a_cache_that_is_closed_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setattr(Path, "expanduser", expanduser)
    folder = built_once(f"of-a-test-{os.getpid()}", made)
    assert folder.is_relative_to(f"/tmp/penstock-{os.getuid()}")
    assert built_once(folder.name, made) == folder, "the next process need not build it"
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_node_serves_from_a_read_only_cache(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "/sys/penstock")
    with NodeProcess(redis_url, model=demo_model()) as node, Client(redis_url) as client:
        assert client.submit("The gate", max_tokens=8, ignore_eos=True).result().usage.completion_tokens == 8
        log = node.log
    assert "Traceback" not in log
    warned = [line for line in log.splitlines() if '"WARNING"' in line]
    assert sum(SAID in line for line in warned) in (1, 2), "GGUF file, and kernels that are not beside the sources"
    assert sum("packed weights are not shared" in line for line in warned) == 1
