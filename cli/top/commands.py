"""`penstock top`: a live view of pools, nodes and tenants."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.cli.options import RedisUrl
from penstock.cli.top.reader import SORT_KEYS, Frame, SortKey, TopReader
from penstock.cli.top.screen import screen_of
from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.queue.broker.connection import connect
from penstock.queue.broker.pools import ActivityBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.runtime.settings import redis_url_of

_MAX_KEYS = 64


@dataclass
class LiveView:
    """Repeats frames until `q`. `s` sorts by the next column; `p` shows the next pool alone, after the last one all."""

    reader: TopReader
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


def top(
    pool: Annotated[str | None, typer.Option(help="Show this pool alone. Default: all.")] = None,
    sort: Annotated[SortKey, typer.Option(help="Column that orders the nodes.")] = "node",
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two views.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view as text, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as a JSON object, and end.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show what pools, nodes and tenants do: KV blocks, running and waiting jobs, tokens per second, and takeovers.

    Keys: q quits, s sorts by the next column, p shows the next pool alone. Without a terminal, one view is printed.
    docs/QUEUE.md says what each state and each share of jobs means.

    Examples:
        penstock top
        penstock top --json
        penstock top --once --sort kv
    """
    asyncio.run(_top(redis_url_of(redis_url), pool, sort, interval, once=once, as_json=as_json))


async def _top(
    redis_url: str, pool: str | None, sort: SortKey, interval_s: float, *, once: bool, as_json: bool
) -> None:
    console = Console()
    async with connect(redis_url) as redis:
        reader = TopReader(ActivityBroker(redis), ProducerBroker(redis), pool=pool)
        if once or as_json or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
            await _print_once(reader, console, pool, sort, as_json=as_json)
        else:
            await LiveView(reader, console, interval_s, sort).run()


async def _print_once(reader: TopReader, console: Console, pool: str | None, sort: SortKey, *, as_json: bool) -> None:
    frame = await reader.read()
    if pool is not None and not frame.pools:
        raise NotFoundError(f"no pool {pool!r} is announced", code="pool_not_found", param="pool")
    if as_json:
        print(json.dumps(frame.as_json(), ensure_ascii=False))
    else:
        console.print(screen_of(frame, console, sort=sort))
