"""Repeats frames on a terminal, and reads keys between them."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.cli.top.frame import SORT_KEYS, Frame, SortKey
from penstock.cli.top.reader import FrameReader
from penstock.cli.top.screen import screen_of
from penstock.contract.errors import UnavailableError

_MAX_KEYS = 64


@dataclass
class LiveView:
    """The view until `q`. Keys: `s` sorts by the next column, `p` shows the next pool alone, then all again."""

    reader: FrameReader
    console: Console
    interval_s: float
    sort: SortKey = "node"
    _frame: Frame | None = None
    _only: str | None = None
    _problem: str = ""
    _quits: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Show frames until the user quits."""
        with _keys(self._press), Live(console=self.console, screen=True, auto_refresh=False) as live:
            while not self._quits:
                await self._read()
                deadline_s = asyncio.get_running_loop().time() + self.interval_s
                self._draw(live)
                # A key redraws the view at once; Redis is still read only once per interval.
                while not self._quits:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(deadline_s):
                            await self._wake.wait()
                            self._wake.clear()
                            self._draw(live)
                            continue
                    break

    async def _read(self) -> None:
        try:
            self._frame, self._problem = await self.reader.read(), ""
        except UnavailableError as error:
            self._problem = error.message

    def _press(self, key: str) -> None:
        if key in "qQ":
            self._quits = True
        elif key == "s":
            self.sort = SORT_KEYS[(SORT_KEYS.index(self.sort) + 1) % len(SORT_KEYS)]
        elif key == "p" and self._frame is not None:
            choices = [None, *(pool.pool for pool in self._frame.pools)]
            at = choices.index(self._only) if self._only in choices else 0
            self._only = choices[(at + 1) % len(choices)]
        self._wake.set()

    def _draw(self, live: Live) -> None:
        if self._frame is None:
            live.update(Text(f"penstock top  {self._problem}  (q quits)", "red"), refresh=True)
            return
        pools = tuple(pool for pool in self._frame.pools if self._only in (None, pool.pool))
        shown = Frame(self._frame.time_ms, pools, self._frame.num_pools_left_out)
        head = self._problem or f"q: quit  s: sort ({self.sort})  p: pool ({self._only or 'all'})"
        lines = self.console.height
        live.update(screen_of(shown, self.console, sort=self.sort, max_lines=lines, head=head), refresh=True)


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` for each key while the block runs, without waiting for the end of a line."""
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> None:
        data = os.read(fd, _MAX_KEYS)
        if not data:
            loop.remove_reader(fd)
        for key in data.decode(errors="ignore"):
            press(key)

    try:
        tty.setcbreak(fd)
        loop.add_reader(fd, read)
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
