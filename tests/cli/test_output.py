"""Texts and names of models, files and callers are printed on a terminal without their control characters."""

from __future__ import annotations

import io
import json
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from fakes import fake_node
from fakes.processes.python_process import PythonProcess
from fakes.terminal import TerminalProcess
from fixtures.tiny_model import make_tiny_model
from rich.table import Table

from penstock.cli.console import Console
from penstock.cli.output import JsonArray, write_error, write_line
from penstock.producer.client import Client
from penstock.runtime.logging import ConsoleFormatter
from penstock.runtime.terminal import only_colors
from tests.producer.client.conftest import node_on_thread

STEERING = "\x1b[2Jone\x07\x9b1mtwo"


@pytest.mark.parametrize(
    "words",
    [
        "submit hello --raw --max-tokens 1",
        pytest.param("jobs tail JOB_ID", marks=pytest.mark.slow),
        pytest.param("jobs show JOB_ID --result", marks=pytest.mark.slow),
    ],
)
def test_control_characters_of_a_model_do_not_reach_the_terminal(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(fake_node, "fake_text", lambda _: STEERING)
    with node_on_thread(redis_url), Client(redis_url) as client:
        job = client.submit("hello", max_tokens=1)
        assert job.result().text == STEERING
        command = words.replace("JOB_ID", job.id).split()
        with TerminalProcess("-m", "penstock", *command, "--redis-url", redis_url) as terminal:
            terminal.wait_for("[2Jone1mtwo")
            assert terminal.wait() == 0


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lists_and_errors_have_no_control_characters() -> None:
    screen = _Terminal()
    with redirect_stdout(screen), redirect_stderr(screen):
        write_line("model", STEERING)
        write_error(f"cannot load {STEERING}")
        with JsonArray() as array:
            array.add({"model": STEERING})
    assert screen.getvalue() == (
        'model [2Jone1mtwo\npenstock: cannot load [2Jone1mtwo\n[\n{"model": "\\u001b[2Jone\\u00071mtwo"}\n]\n'
    )


def test_tables_keep_their_own_colors_alone() -> None:
    screen, table = _Terminal(), Table(STEERING)
    table.add_row(STEERING, style="red")
    console = Console(file=screen, force_terminal=True, color_system="standard", width=60, highlight=False)
    console.print(table)
    console.print(STEERING, markup=False)
    assert "\x1b[31m" in screen.getvalue()
    assert not {"\x07", "\x9b"} & {*screen.getvalue()} and "\x1b[2J" not in screen.getvalue()


def test_an_error_has_no_control_characters_even_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """A supervisor passes the lines of its children on."""
    write_error(STEERING)
    write_line(STEERING)
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("penstock: [2Jone1mtwo\n", f"{STEERING}\n")


def test_lines_of_children_keep_colors_and_logs_escape_tracebacks() -> None:
    assert only_colors(f"\x1b[32mINFO\x1b[0m {STEERING}") == "\x1b[32mINFO\x1b[0m [2Jone1mtwo"
    try:
        raise ValueError(STEERING)
    except ValueError:
        record = logging.LogRecord("penstock", logging.ERROR, "", 1, "failed", (), sys.exc_info())
    shown = ConsoleFormatter(has_color=False).format(record)
    assert "ValueError: [2Jone1mtwo" in shown


def test_a_node_names_a_wrong_template_without_its_control_characters(tmp_path: Path, redis_url: str) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text("{{ x \x1b[2J }}")
    words = ("-m", "penstock", "node", str(model), "--dtype", "bfloat16", "--redis-url", redis_url)
    with PythonProcess(*words) as node:
        _, said = node.communicate(timeout=60)
    last = json.loads(said.splitlines()[-1])
    assert (node.returncode, last["level"], last["message"]) == (2, "ERROR", "the process ends")
    sentence = last["reason"]
    assert sentence.startswith(f"cannot load {model}: the model's chat template does not compile: ")
    assert "chat_template.jinja" in sentence
    assert "\x1b" not in said and "Traceback" not in said and "BrokenPipe" not in said
