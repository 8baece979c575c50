"""The reading of messages and the printing of answers, on a terminal or through pipes."""

from __future__ import annotations

from contextlib import suppress
from typing import TextIO

import typer

from penstock.cli.output import write_text

BLOCK = '"""'
"""Begins and ends a message of several lines."""
PROMPT, PROMPT_IN_BLOCK = ">>> ", "... "


class Terminal:
    """stdin and stdout of a chat."""

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self._stdin, self._stdout = stdin, stdout
        self.is_interactive = stdin.isatty()
        if self.is_interactive:
            _load_line_editor()

    def read_message(self) -> tuple[str, bool]:
        """Return the next message, and whether it was written as a block. Raises EOFError at the end of the input."""
        line = self._read_line(PROMPT).strip()
        if not line.startswith(BLOCK):
            return line, False
        block = line.removeprefix(BLOCK)
        with suppress(EOFError):  # the end of the input also ends the block
            while not block.rstrip().endswith(BLOCK):
                block += "\n" + self._read_line(PROMPT_IN_BLOCK)
        return block.rstrip().removesuffix(BLOCK).strip("\n"), True

    def write(self, text: str) -> None:
        """Print a part of an answer."""
        write_text(text, self._stdout)

    def end_line(self) -> None:
        """End the line of an answer."""
        self.write("\n")

    def note(self, line: str) -> None:
        """Print a line that is not part of an answer on stderr, dimmed on a terminal."""
        typer.secho(line, dim=True, err=True)

    def _read_line(self, prompt: str) -> str:
        if self.is_interactive:
            return input(prompt)
        line = self._stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


def _load_line_editor() -> None:
    """Let `input` edit lines and recall earlier messages of this chat. Nothing is stored."""
    try:
        import readline  # noqa: F401
    except ImportError:  # a Python that was built without it reads plain lines
        return
