"""The progress of a loading model: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import io
import logging
import re

import pytest
from fakes.waiting import until

from penstock.cli.loading_progress import LoadingProgress
from penstock.runtime import logging as runtime_logging

LOG = logging.getLogger("penstock.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_a_terminal_gets_a_bar_that_survives_odd_events(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    progress = LoadingProgress(LOG, "some-model")
    progress.update({"event": "progress", "stage": "load", "fraction": 0.1})
    async with progress.shown():
        for fraction in (0.2, 1, 7.0, None, "x"):
            progress.update({"event": "progress", "stage": "compile", "fraction": fraction})
        progress.update({"event": "progress"})
    assert "Loading some-model" in screen.getvalue()
    assert "compiling the kernels, once per machine" in screen.getvalue()


async def test_a_log_gets_a_line_at_a_slow_pace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr(runtime_logging, "FIRST_PROGRESS_S", 0.01)
    monkeypatch.setattr(runtime_logging, "PROGRESS_INTERVAL_S", 0.02)
    progress = LoadingProgress(LOG, "some-model")
    with caplog.at_level(logging.INFO):
        async with progress.shown():
            for done in range(1000):
                progress.update({"event": "progress", "stage": "download", "fraction": done / 1000})
            await until(lambda: len(caplog.records) >= 2)
    said = [vars(record) for record in caplog.records]
    assert {(one["message"], one["model"], one["stage"]) for one in said} == {
        ("downloading the model from the hub", "some-model", "download")
    }
    assert [one["percent"] for one in said] == [0, *[100] * (len(said) - 1)]
    assert len(said) < 10


async def test_a_log_says_at_once_that_the_kernels_are_compiled_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    progress = LoadingProgress(LOG, "some-model")
    with caplog.at_level(logging.INFO):
        async with progress.shown():
            progress.update({"event": "progress", "stage": "compile", "fraction": 0.0})
            progress.update({"event": "progress", "stage": "compile", "fraction": 0.5})
    (one,) = caplog.records
    assert re.search(r"compiling the kernels, once per machine \(\d+ s on two idle cores\)", one.message)


def test_loading_reports_progress_within_two_seconds() -> None:
    assert runtime_logging.FIRST_PROGRESS_S < 2
