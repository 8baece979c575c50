"""`penstock top`: a live view of pools, nodes and tenants, drawn with rich for 80 columns and for wide terminals."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.console import Console
from penstock.cli.options import RedisUrl
from penstock.cli.output import write_line
from penstock.cli.top.reader import (
    SORT_KEYS,
    Frame,
    NodeRow,
    NodeState,
    PoolFrame,
    SortKey,
    SplitReader,
    TopReader,
    sorted_nodes,
)
from penstock.cli.top.sets import AskedSets, SetReader, table_of
from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.contract.pool import PoolEvent
from penstock.queue.broker.connection import connect
from penstock.queue.broker.pools import ActivityBroker
from penstock.queue.broker.producer import ProducerBroker
from penstock.runtime.settings import pool_urls, redis_url_of, redis_urls_of, without_password

# Drawing of a frame.

WIDE_COLUMNS = 130
_BAR_CELLS, _WIDE_BAR_CELLS = 10, 20
_NAME_CHARS, _WIDE_NAME_CHARS = 14, 24
_STYLES: dict[NodeState, str] = {
    "ok": "green",
    "draining": "yellow",
    "unhealthy": "yellow bold",
    "silent": "red",
    "dead": "red bold",
}
_EVENT_STYLES = {"node_lost": "red", "dead_letter": "red", "takeover": "yellow"}
_EVENT_NAMES = {
    "node_joined": "node joined",
    "node_left": "node left",
    "node_lost": "node lost",
    "takeover": "takeover",
    "dead_letter": "dead letter",
}
_FIXED_LINES = 9
"""Lines of a pool besides those of its nodes, tenants and events."""


def screen_of(
    frame: Frame, console: Console, *, sort: SortKey = "node", max_lines: int | None = None, head: str = ""
) -> RenderableType:
    """Return the frame as a renderable; `head` is its first line. With `max_lines`, nodes and events are left out."""
    is_wide = console.width >= WIDE_COLUMNS
    parts: list[RenderableType] = [_head(frame, head)]
    lines = None if max_lines is None else max(12, (max_lines - 2) // max(1, len(frame.pools)))
    for pool in frame.pools:
        parts += [Text(), *_pool(pool, sort, is_wide, lines)]
    if frame.sets:
        parts += [Text(), table_of(frame.sets, is_wide=is_wide)]
    if frame.num_batches_left_out:
        parts.append(Text(f"and {frame.num_batches_left_out} more open batches and flows", "dim"))
    if not frame.pools:
        parts.append(Text("No pool: no node has announced a model in this Redis.", "yellow"))
    parts += [Text(f"The Redis at {url} is unreachable.", "red") for url in frame.away]
    if frame.folded:
        names = ", ".join(frame.folded)
        parts.append(Text(f"Without a node for an hour or more (--pool shows one): {names}", "dim"))
    if frame.num_pools_left_out:
        parts.append(Text(f"{frame.num_pools_left_out} more pools; choose one with --pool.", "dim"))
    return Group(*parts)


def _head(frame: Frame, head: str) -> Text:
    at = datetime.fromtimestamp(frame.time_ms / 1000).astimezone()
    num_alive = sum(pool.num_alive for pool in frame.pools)
    counts = f"{_counted(len(frame.pools), 'pool')}, {_counted(num_alive, 'node')}"
    text = Text.assemble(("penstock top", "bold"), f"  {at:%H:%M:%S}  {counts}", no_wrap=True, overflow="ellipsis")
    return text.append(f"  {head}", "dim") if head else text


def _pool(pool: PoolFrame, sort: SortKey, is_wide: bool, lines: int | None) -> list[RenderableType]:
    events = _event_lines(pool.events)[: 6 if is_wide else 4]
    nodes = sorted_nodes(pool.nodes, sort)
    num_hidden = 0
    if lines is not None:
        num_shown = max(1, lines - _FIXED_LINES - len(events))
        num_hidden = max(0, len(nodes) - num_shown)
        nodes = nodes[: len(nodes) - num_hidden]
    parts: list[RenderableType] = [_title(pool), _summary(pool), _outlook(pool)]
    if pool.paused:
        parts.append(Text(f"  paused: {', '.join(pool.paused)}", "yellow", no_wrap=True, overflow="ellipsis"))
    parts.append(_node_table(nodes, is_wide) if nodes else Text("  no live node", "red"))
    if num_hidden:
        parts.append(Text(f"  {_counted(num_hidden, 'more node')}", "dim"))
    parts += [Text(f"  {node.node_id}: {node.reason}", _STYLES[node.state]) for node in nodes if node.reason]
    parts += [Text(f"  {node.node_id}: {text}", "dim") for node in nodes if (text := _ranks(node))]
    parts += [Text(f"  {node.node_id}: {_states(node)}", "dim") for node in nodes if node.state_slots_total]
    parts += [Text(f"  {node.node_id}: {_windows(node)}", "dim") for node in nodes if node.window_blocks_total]
    parts += [Text(f"  {node.node_id}: {_held_back(node)}", "dim") for node in nodes if node.num_held_back]
    below = Table.grid(padding=(0, 3))
    below.add_row(_class_table(pool), *([_tenant_table(pool)] if pool.tenants else []))
    parts.append(below)
    return [*parts, *events]


def _title(pool: PoolFrame) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis").append(pool.pool, "bold cyan")
    facts = [] if pool.model == pool.pool else [pool.model]
    facts += sorted({node.arithmetic for node in pool.nodes if node.arithmetic})
    facts += sorted({f"{node.num_ranks} ranks a node" for node in pool.nodes if node.num_ranks > 1})
    if num_losses := pool.total("num_rank_losses"):
        facts.append(f"ranks lost {_counted(round(num_losses), 'time')}")
    return title.append("".join(f"  {fact}" for fact in facts), "dim")


def _summary(pool: PoolFrame) -> Text:
    rates = f"{pool.total('tokens_in_per_s'):,.0f} in, {pool.total('tokens_out_per_s'):,.0f} out tokens/s"
    parts = [_counted(pool.num_alive, "live node"), f"{pool.total('num_jobs'):,.0f} running"]
    num_scheduled = sum(row.num_scheduled for row in pool.classes)
    num_awaiting = sum(row.num_awaiting_tokens for row in pool.classes)
    parts += [f"{pool.num_waiting:,} queued"]
    parts += [f"{num_scheduled:,} scheduled"] * (num_scheduled > 0)
    parts += [f"{num_awaiting:,} awaiting tokens"] * (num_awaiting > 0)
    num_for_key = sum(row.num_awaiting_key for row in pool.classes)
    parts += [f"{num_for_key:,} awaiting their key"] * (num_for_key > 0)
    parts.append(rates)
    if takeovers := pool.counts.get("takeovers", 0):
        parts.append(_counted(takeovers, "takeover"))
    return Text("  " + " · ".join(parts), no_wrap=True, overflow="ellipsis")


def _outlook(pool: PoolFrame) -> Text:
    """Return the time that the queued jobs need, and how the engines' time was divided in the last minute."""
    backlogs = ["unknown" if seconds is None else _seconds(round(1000 * seconds)) for seconds in pool.backlog_s]
    text = f"  backlog: {backlogs[0]} foreground, {backlogs[1]} background"
    if pool.background_share is not None:
        text += f" · engine time: {1 - pool.background_share:.0%} foreground, {pool.background_share:.0%} background"
    return Text(text, no_wrap=True, overflow="ellipsis")


def _node_table(nodes: Sequence[NodeRow], is_wide: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", collapse_padding=True)
    cells = _WIDE_BAR_CELLS if is_wide else _BAR_CELLS
    table.add_column("node", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("KV used", no_wrap=True, min_width=cells + 5)
    has_gpu = any(node.gpu_utilization is not None for node in nodes)
    names = ["run", "wait", "in/s", "out/s", "batch", "step"]
    names += ["p99", "hits", "preempt", "used+cached/blocks", "frag", "memory", "model"] if is_wide else []
    names += ["GPU", "GPU memory"][: 1 + is_wide] if has_gpu else []
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")
    for node in nodes:
        table.add_row(*_cells(node, cells, is_wide), *(_gpu_cells(node)[: 1 + is_wide] if has_gpu else ()))
    return table


def _cells(node: NodeRow, bar_cells: int, is_wide: bool) -> list[RenderableType]:
    state = Text(node.state, _STYLES[node.state])
    name, num_chars = node.node_id, _WIDE_NAME_CHARS if is_wide else _NAME_CHARS
    if len(name) > num_chars:
        # Its middle is left out: hosts' names begin alike, and ids end differently.
        half = num_chars // 2
        name = f"{name[: num_chars - half - 1]}…{name[-half:]}"
    if node.state == "dead" and not node.kv_blocks_total:
        return [name, state]
    found: list[RenderableType] = [name, state, _bar(node, bar_cells)]
    found += [str(node.num_running), str(node.num_waiting)]
    found += [_short(node.tokens_in_per_s), _short(node.tokens_out_per_s), f"{node.mean_batch:.1f}"]
    found.append(f"{_short(node.step_ms_p50)}ms")
    if is_wide:
        blocks = f"{node.kv_blocks_used}+{node.kv_blocks_cached}/{node.kv_blocks_total}"
        memory, model = (f"{size / 2**20:,.0f}M" if size else "–" for size in (node.process_bytes, node.weight_bytes))
        lost = "–" if node.page_utilization is None else f"{1 - node.page_utilization:.0%}"
        hits = "–" if node.prefix_hit_rate is None else f"{node.prefix_hit_rate:.0%}"
        found += [f"{_short(node.step_ms_p99)}ms", hits, str(node.num_preemptions), blocks, lost, memory, model]
    return found


def _ranks(node: NodeRow) -> str:
    """Return what a node's ranks spent in the last minute, and what they hold; empty for a node without ranks."""
    facts = []
    if node.stage_idle:
        facts.append(f"stages idle {', '.join(f'{share:.0%}' for share in node.stage_idle)}")
    if node.rank_exchange_ms is not None and node.rank_wait_ms is not None:
        facts.append(f"a step: exchange {_short(node.rank_exchange_ms)}ms, wait {_short(node.rank_wait_ms)}ms")
    held = {"weights": node.rank_weight_bytes, "KV": node.rank_kv_bytes}
    sizes = [f"{name} {'+'.join(f'{size / 2**20:,.0f}' for size in each)}M" for name, each in held.items() if each]
    return " · ".join([*facts, *sizes])


def _states(node: NodeRow) -> str:
    """Return how the slots for states of recurrent layers are used."""
    held = node.state_slots_total - node.state_slots_free
    slots = f"{held:,} of {_counted(node.state_slots_total, 'state slot')} held"
    snapshots = f"{_counted(node.state_snapshots, 'snapshot')}, {node.state_evictions:,} evicted"
    return f"{slots} · {snapshots} · {_counted(node.state_hits, 'hit')}"


def _windows(node: NodeRow) -> str:
    """Return how the blocks of layers with windows are used."""
    held = node.window_blocks_total - node.window_blocks_free
    blocks = f"{held:,} of {_counted(node.window_blocks_total, 'block')} of windows held"
    return f"{blocks} · {node.window_blocks_cached:,} cached, {node.window_evictions:,} evicted"


def _held_back(node: NodeRow) -> str:
    """Return how many sequences of the batch steps leave out for chats."""
    num_in_step = node.num_running - node.num_held_back
    running = _counted(node.num_running, "running sequence")
    return f"{num_in_step:,} of {running} in a step, {node.num_held_back:,} held back"


def _gpu_cells(node: NodeRow) -> list[str]:
    """Return how busy the node's GPU is, and its memory in GiB."""
    if node.gpu_utilization is None:
        return ["–", "–"]
    used, total = (size / 2**30 for size in (node.gpu_memory_used_bytes, node.gpu_memory_total_bytes))
    return [f"{node.gpu_utilization:.0%}", f"{used:.0f}/{total:.0f}G"]


def _bar(node: NodeRow, cells: int) -> Text:
    """Return a bar of used, cached and free blocks, and the used share."""
    total = max(1, node.kv_blocks_total)
    used = round(cells * node.kv_blocks_used / total)
    if node.kv_blocks_used and not used:
        used = 1
    cached = min(cells - used, round(cells * node.kv_blocks_cached / total))
    share = node.kv_blocks_used / total
    color = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    bar = Text("█" * used, color).append("▒" * cached, "blue").append("·" * (cells - used - cached), "dim")
    return bar.append(f" {share:>4.0%}", "")


def _class_table(pool: PoolFrame) -> Table:
    table = _small_table("class", "queued", "sched", "oldest", "run", "share")
    for row in pool.classes:
        oldest = _seconds(row.oldest_ms) if row.oldest_ms else "–"
        share = "–" if row.engine_share is None else f"{row.engine_share:.0%}"
        table.add_row(row.name, str(row.num_waiting), str(row.num_scheduled), oldest, str(row.num_running), share)
    return table


def _tenant_table(pool: PoolFrame) -> Table:
    table = _small_table("tenant", "queued", "run")
    for row in pool.tenants:
        table.add_row(row.name, str(row.num_waiting), str(row.num_running))
    return table


def _small_table(first: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True, overflow="ellipsis", max_width=24, min_width=8)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _event_lines(events: Sequence[PoolEvent]) -> list[Text]:
    """Return a line for each event, newest first. Jobs that one node took over from another share a line."""
    found = []
    for _, group in groupby(
        reversed(events), key=lambda event: (event.kind, event.node_id, event.source, event.reason)
    ):
        newest, *others = group
        found.append(_event_line(newest, len(others)))
    return found


def _event_line(event: PoolEvent, num_others: int) -> Text:
    at = datetime.fromtimestamp(event.at_ms / 1000).astimezone()
    words = [_EVENT_NAMES.get(event.kind, event.kind), event.node_id]
    if event.source:
        words.append(f"← {event.source}")
    if event.reason:
        words.append(f"({event.reason})")
    if event.job_id:
        words.append(f"{num_others + 1} jobs" if num_others else f"job …{event.job_id[-12:]}")
    text = Text(no_wrap=True, overflow="ellipsis").append(f"{at:%H:%M:%S} ", "dim")
    return text.append(" ".join(words), _EVENT_STYLES.get(event.kind, ""))


def _short(value: float) -> str:
    """Return a number in at most four characters up to 999k."""
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 9_999.5 else f"{value / 1000:.0f}k"


_LONGEST_S = 30 * 86400
"""Longer times are no longer told apart: a node without work for its jobs has a pace of nearly 0."""


def _seconds(num_ms: int) -> str:
    seconds = num_ms / 1000
    if seconds > _LONGEST_S:
        return f">{_LONGEST_S // 86400}d"
    return (
        f"{seconds:.1f}s" if seconds < 60 else f"{seconds / 60:.0f}min" if seconds < 5400 else f"{seconds / 3600:.0f}h"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# The command.

_MAX_KEYS = 64


@dataclass
class LiveView:
    """Repeats frames until `q`. `s` sorts by the next column; `p` shows the next pool alone, after the last one all."""

    reader: SetReader
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
            self._problem = error.reason

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
        shown = replace(self._frame, pools=pools)
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
    tag: Annotated[
        list[str] | None, typer.Option(help="Also show how far the jobs of this tag are. May repeat.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of the tags.")] = "default",
    redis_url: RedisUrl = None,
) -> None:
    """Show what pools, nodes and tenants do: KV blocks, running and waiting jobs, tokens per second, and takeovers.

    Below are the open batches and flows, unless --pool names a pool: how far they are, how fast, and when they end.

    Where PENSTOCK_POOLS names several Redis, the pools of all are shown; with --redis-url, those of that Redis.

    Keys: q quits, s sorts by the next column, p shows the next pool alone. Without a terminal, one view is printed.
    docs/QUEUE.md says what each state and each share of jobs means.

    Examples:
        penstock top
        penstock top --json
        penstock top --once --sort kv
        penstock top --tag run:7
    """
    urls = redis_urls_of(redis_url) if pool is None else [redis_url_of(redis_url, pool=pool)]
    sets = AskedSets(tag or [], tenant, redis_url, has_batches=pool is None)
    asyncio.run(_top(urls, pool, sort, interval, sets, once=once, as_json=as_json))


async def _top(
    urls: Sequence[str],
    pool: str | None,
    sort: SortKey,
    interval_s: float,
    sets: AskedSets,
    *,
    once: bool,
    as_json: bool,
) -> None:
    console = Console()
    own = pool_urls() if len(urls) > 1 else {}
    async with AsyncExitStack() as stack:
        readers = dict[str, TopReader]()
        for url in urls:
            redis = await stack.enter_async_context(connect(url))
            is_here = partial(_is_shown, pool, {name: of_name == url for name, of_name in own.items()}, url == urls[0])
            readers[without_password(url)] = TopReader(
                ActivityBroker(redis), ProducerBroker(redis), shows=is_here, folds=pool is None
            )
        of_pools = SplitReader(readers) if len(urls) > 1 else readers[without_password(urls[0])]
        reader = await sets.beside(of_pools, urls[0], stack)
        if once or as_json or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
            await _print_once(reader, console, pool, sort, as_json=as_json)
        else:
            await LiveView(reader, console, interval_s, sort).run()


def _is_shown(only: str | None, of_url: Mapping[str, bool], is_directory: bool, pool: str) -> bool:
    """Return whether a Redis shows a pool. `of_url` says of each pool with a Redis of its own if it is this one."""
    return only in (None, pool) and of_url.get(pool, is_directory)


async def _print_once(reader: SetReader, console: Console, pool: str | None, sort: SortKey, *, as_json: bool) -> None:
    frame = await reader.read()
    if pool is not None and not frame.pools:
        raise NotFoundError(f"no pool {pool!r} is announced", code="pool_not_found", param="pool")
    if as_json:
        write_line(json.dumps(frame.as_json(), ensure_ascii=False))
    else:
        console.print(screen_of(frame, console, sort=sort))
