"""Logs: lines for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from fakes.command import restored_process
from fakes.processes.python_process import PythonProcess, run_python

from penstock.contract.errors import ConfigError
from penstock.runtime.logging import LogSettings, configure_logging, has_color, inherited_log_variables, log_formatter

PROGRAM = """
import logging
from penstock.runtime.logging import LogSettings, configure_logging
configure_logging(LogSettings.load())
for name in ("penstock.part", "other.library"):
    for level in ("debug", "info", "warning"):
        getattr(logging.getLogger(name), level)(level)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_color_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "PENSTOCK_LOG_LEVEL", "PENSTOCK_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def shown(stream: io.StringIO, *, name: str = "penstock.node", message: str = "took a job", **fields: object) -> str:
    record = logging.getLogger(name).makeRecord(name, logging.WARNING, "f", 1, message, (), None, extra=fields)
    return log_formatter(LogSettings.load(), stream).format(record)


def test_a_terminal_gets_time_level_event_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    time, _, rest = shown(Terminal(), num_jobs=3, pool="a", why="two words", none=None).partition(" ")
    assert len(time.split(":")) == 3
    assert rest == 'WARNING took a job num_jobs=3 pool=a why="two words" none=null'


def test_a_pipe_gets_json() -> None:
    said = json.loads(shown(io.StringIO(), num_jobs=3, color_message="\x1b[1m"))
    assert abs(datetime.fromisoformat(said.pop("time")) - datetime.now(UTC)) < timedelta(minutes=1)
    assert said == {"level": "WARNING", "logger": "penstock.node", "message": "took a job", "num_jobs": 3}


def test_the_setting_overrides_what_stderr_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    assert json.loads(shown(Terminal()))
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "console")
    assert "WARNING took a job" in shown(io.StringIO())
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="log_format"):
        LogSettings.load()


def test_a_process_that_another_one_starts_logs_as_that_one_does() -> None:
    root = logging.getLogger()
    with restored_process():
        root.handlers[:] = [logging.NullHandler()]
        assert inherited_log_variables() == {"PENSTOCK_LOG_LEVEL": "warning"}
        for name in ("json", "console"):
            root.handlers[:] = []
            configure_logging(LogSettings.load(log_format=name, log_level="error"))
            assert inherited_log_variables() == {"PENSTOCK_LOG_LEVEL": "error", "PENSTOCK_LOG_FORMAT": name}


def test_fields_of_a_process_are_in_each_of_its_lines() -> None:
    record = logging.LogRecord("penstock.node", logging.INFO, "f", 1, "ready", (), None)
    line = log_formatter(LogSettings.load(), io.StringIO(), fields={"rank": 3}).format(record)
    assert json.loads(line)["rank"] == 3


def test_values_cannot_forge_lines_or_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    said = shown(Terminal(), message="evil\n10:00:00 INFO", tenant="a\x1b[2J\u2028b", items=["x\n"])
    assert said.isprintable()


def test_events_of_other_libraries_name_their_logger() -> None:
    assert "uvicorn.error: took a job" in shown(Terminal(), name="uvicorn.error")


def test_a_traceback_is_one_line_of_json_and_readable_on_a_terminal() -> None:
    try:
        raise ValueError("deep down")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("penstock.node", logging.ERROR, "f", 1, "the node ends", (), error)
    as_json = log_formatter(LogSettings.load(), io.StringIO()).format(record)
    assert "\n" not in as_json and "ValueError: deep down" in json.loads(as_json)["exc_info"]
    lines = log_formatter(LogSettings.load(), Terminal()).format(record).splitlines()
    assert lines[1] == "Traceback (most recent call last):" and lines[-1] == "ValueError: deep down"


@pytest.mark.parametrize(
    ("variables", "terminal", "pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_color_follows_the_usual_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], terminal: bool, pipe: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (has_color(Terminal()), has_color(io.StringIO())) == (terminal, pipe)


@pytest.mark.parametrize(
    ("level", "events"),
    [
        ("debug", ["penstock.part debug", "penstock.part info", "penstock.part warning"]),
        ("info", ["penstock.part info", "penstock.part warning"]),
        ("warning", ["penstock.part warning"]),
    ],
)
def test_the_level_selects_events_and_other_libraries_log_no_debug_events(level: str, events: list[str]) -> None:
    env = os.environ | {"PENSTOCK_LOG_LEVEL": level}
    done = run_python("-c", PROGRAM, env=env)
    said = [json.loads(line) for line in done.stderr.splitlines()]
    ours = [f"{one['logger']} {one['message']}" for one in said if one["logger"] == "penstock.part"]
    assert ours == events
    others = [one["message"] for one in said if one["logger"] == "other.library"]
    assert others == [event.split()[1] for event in events if not event.endswith("debug")]


def test_stderr_on_a_real_terminal_gets_lines_for_people() -> None:
    ours, theirs = pty.openpty()
    try:
        with PythonProcess("-c", PROGRAM, stderr=theirs) as process:
            assert process.wait() == 0
        said = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "\x1b[33mWARNING\x1b[0m warning" in said and "{" not in said


def test_a_crash_of_a_process_and_of_a_thread_are_lines_of_json() -> None:
    code = (
        "import threading\n"
        "from penstock.runtime.logging import LogSettings, configure_logging\n"
        "configure_logging(LogSettings.load(log_format='json'))\n"
        "def fail(): raise KeyError('in a thread')\n"
        "thread = threading.Thread(target=fail, name='worker'); thread.start(); thread.join()\n"
        "raise ValueError('a bug')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    of_thread, last = map(json.loads, ran.stderr.splitlines())
    assert (of_thread["message"], of_thread["of_thread"]) == ("a thread has ended", "worker")
    assert (ran.returncode, last["message"], last["level"]) == (1, "the process ends", "CRITICAL")
    assert last["reason"] == "ValueError: a bug" and "Traceback" in last["exc_info"]
