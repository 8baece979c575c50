"""A program is known only by the hash that Triton would give it, and only to the module that has read its facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.triton import known_programs
from tests.kernels.triton.known_programs import KnownProgram, KnownPrograms

PROGRAM = KnownProgram("abc", {"is_ptx": True})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file has one program. The source of a program stands for its hash here."""
    known = KnownPrograms(90, reads=False, folder=tmp_path)
    assert known.facts_of(PROGRAM) == {"is_ptx": True, "hash": "abc"}
    known.record()
    monkeypatch.setattr(known_programs, "_hash_of", lambda src, *_: src)
    monkeypatch.setattr(known_programs.triton, "compile", lambda *_, **__: "compiled")
    return tmp_path


def test_a_known_program_is_not_compiled_and_is_recorded_again(folder: Path) -> None:
    known = KnownPrograms(90, reads=True, folder=folder)
    before = known.path.read_text()
    assert known.facts_of(known.compile("abc", None, {})) == {"is_ptx": True, "hash": "abc"}
    known.record()
    assert known.path.read_text() == before


@pytest.mark.parametrize(
    ("source", "capability", "reads"), [("changed", 90, True), ("abc", 80, True), ("abc", 90, False)]
)
def test_what_is_not_known_is_compiled(folder: Path, source: str, capability: int, reads: bool) -> None:
    assert KnownPrograms(capability, reads=reads, folder=folder).compile(source, None, {}) == "compiled"


def test_facts_that_another_reader_has_read_are_not_known(folder: Path) -> None:
    known = KnownPrograms(90, reads=True, folder=folder)
    known.path.write_text(known.path.read_text().replace('"reader": "', '"reader": "another'))
    assert KnownPrograms(90, reads=True, folder=folder).compile("abc", None, {}) == "compiled"
