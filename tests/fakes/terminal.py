"""A program on a terminal of its own, typed at and read by a test."""

from __future__ import annotations

import os
import pty
import select
from collections.abc import Callable
from contextlib import suppress
from subprocess import TimeoutExpired
from types import TracebackType
from typing import Self

from fakes.processes.python_process import PythonProcess
from fakes.waiting import Deadline

CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"


class TerminalProcess:
    """`python <words>` as a program whose stdin, stdout and stderr are a terminal. Ctrl-C reaches it as a signal."""

    def __init__(self, *words: str, **env: str) -> None:
        self._terminal, side = pty.openpty()
        self._program_side = side
        env = os.environ | {"TERM": "xterm"} | env
        self._process = PythonProcess(*words, stdin=side, stdout=side, stderr=side, env=env, on_terminal=True)
        self.screen = ""
        """All that the program has written."""
        self._num_read = 0

    def press(self, text: str) -> None:
        """Press these keys."""
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str) -> str:
        """Return what follows on the screen up to this text, which must come."""
        return self._read_until(lambda new: new.find(text) + len(text) if text in new else 0, repr(text))

    def wait_for_more(self, num_characters: int) -> str:
        """Return the next characters on the screen, this many."""
        wanted = f"{num_characters} characters"
        return self._read_until(lambda new: num_characters * (len(new) >= num_characters), wanted)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return the program's exit status."""
        return self._process.wait(timeout_s)

    def leave(self, key: str = CTRL_C) -> int:
        """Press a key until the program ends, and return its exit status.

        Python's `input` overlooks a signal that comes between its prompt and its wait for a key, until the next key.
        """
        deadline = Deadline()
        while True:
            self.press(key)
            with suppress(TimeoutExpired):
                return self.wait(2.0)
            deadline.check(lambda: f"the program did not end:\n{self.screen}")

    def _read_until(self, end_in: Callable[[str], int], wanted: str) -> str:
        """Return the unread part of the screen up to the index that `end_in` returns (0: not yet)."""
        deadline = Deadline()
        while not (end := end_in(self.screen[self._num_read :])):
            deadline.check(lambda: f"{wanted} did not come on the screen:\n{self.screen}")
            if select.select([self._terminal], [], [], 1.0)[0]:
                self.screen += os.read(self._terminal, 4096).decode(errors="replace")
        start, self._num_read = self._num_read, self._num_read + end
        return self.screen[start : self._num_read]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)
        os.close(self._program_side)
