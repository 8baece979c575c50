"""The report of newer releases names each newer package, and a registry that does not answer is one line of it."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from clients.catalog import BY_NAME, CLIENTS
from clients.newer import Pin, RegistryError, lines_of, newest_release, pins_of


def test_every_client_but_plain_http_has_a_pinned_package() -> None:
    assert [client.name for client in CLIENTS if not pins_of([client])] == ["http"]
    assert pins_of([BY_NAME["codex"]])[0].package == "@openai/codex"
    pins = pins_of(CLIENTS)
    assert len({*pins}) == len(pins)


def test_newer_releases_are_named() -> None:
    def ask(pin: Pin) -> str:
        return {"openai": "99.10", "ai": "0.1"}.get(pin.package, pin.version)

    chosen = [BY_NAME[name] for name in ("openai", "openai-suite", "ai-sdk")]
    pins = [pin for pin in pins_of(chosen) if pin.package == "openai"]
    assert {pin.registry for pin in pins} == {"npm", "PyPI"}
    assert lines_of(chosen, ask) == [f"{pin.registry}: openai {pin.version} is pinned, 99.10 is out" for pin in pins]
    assert lines_of([BY_NAME["litellm"]], ask) == ["none: the 1 pinned packages are the newest"]


def test_a_registry_without_answers_is_one_line() -> None:
    def ask(pin: Pin) -> str:
        if pin.registry == "npm":
            raise RegistryError(f"no network for {pin.package}")
        return "99"

    chosen = [BY_NAME[name] for name in ("claude-code", "litellm")]
    packages = [pin.package for pin in pins_of(chosen) if pin.registry == "npm"]
    assert lines_of(chosen, ask)[1:] == [f"npm did not answer for {', '.join(packages)}: no network for {packages[0]}"]


@pytest.mark.parametrize(
    ("said", "found"),
    [("echo 'p (1.2)'; echo 'Available versions: 1.2'", "1.2"), ("echo 'ERROR: no network' >&2; exit 1", None)],
)
def test_pip_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: str | None) -> None:
    pip = tmp_path / "python-with-pip"
    pip.write_text(f"#!/bin/sh\n{said}\n")
    pip.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(pip))
    if found:
        assert newest_release(Pin("PyPI", "p", "1")) == found
    else:
        with pytest.raises(RegistryError, match="ERROR: no network"):
            newest_release(Pin("PyPI", "p", "1"))


@pytest.mark.parametrize(("said", "found"), [("echo 1.2", "1.2"), ("echo npm error code E404 >&2; exit 1", None)])
def test_npm_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, found: str | None) -> None:
    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\n{said}\n")
    npm.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    if found:
        assert newest_release(Pin("npm", "p", "1")) == found
    else:
        with pytest.raises(RegistryError, match="E404"):
            newest_release(Pin("npm", "p", "1"))
    npm.unlink()
    with pytest.raises(RegistryError, match="npm"):
        newest_release(Pin("npm", "p", "1"))
