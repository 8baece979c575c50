"""Draw the spans of one trace as an SVG: a row for each span, below its parent, and a bar from its start to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from fixtures.otlp_collector import CollectedSpan

WIDTH, LEFT, RIGHT, ROW, TOP = 900, 300, 70, 26, 34
"""Pixels: the picture's width, the columns of names and of durations, the height of a row, and the head."""
BAR, INDENT, MIN_BAR = 14, 14, 2
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
MAX_TICKS = 8
COLORS = (("#4e79a7", "#7aa6d6"), ("#f28e2b", "#f5a95c"), ("#59a14f", "#7cc472"), ("#b07aa1", "#cf9fc0"))
"""Of the gateway and of each node, on light and on dark."""


def svg_of(spans: Sequence[CollectedSpan]) -> str:
    """Return the picture."""
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    total_s = (end_ns - start_ns) / 1e9
    scale = (WIDTH - LEFT - RIGHT) / total_s
    rows = list(_rows(spans))
    places = list(dict.fromkeys(_place(span) for span, _ in rows))
    height = TOP + ROW * len(rows) + ROW
    parts = [*_axis(total_s, scale, height - ROW), *_legend(places, height - ROW)]
    for at, (span, depth) in enumerate(rows):
        parts += _row(span, depth, TOP + ROW * at, (span.start_ns - start_ns) / 1e9, scale, places.index(_place(span)))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    title = "<title>The trace of one request whose node was killed</title>"
    return "\n".join([head, title, f"<style>{_style()}</style>", *parts, "</svg>"]) + "\n"


def _rows(spans: Sequence[CollectedSpan]) -> Iterator[tuple[CollectedSpan, int]]:
    """Yield the spans with their depth: each one after its parent, siblings by their start."""
    children = defaultdict(list)
    ids = {span.span_id for span in spans}
    for span in sorted(spans, key=lambda span: span.start_ns):
        children[span.parent_id if span.parent_id in ids else ""].append(span)

    def below(parent: str, depth: int) -> Iterator[tuple[CollectedSpan, int]]:
        for span in children[parent]:
            yield span, depth
            yield from below(span.span_id, depth + 1)

    return below("", 0)


def _place(span: CollectedSpan) -> str:
    """Return the process that the span is about: a node by its name, else the service."""
    node_id: str = span.attributes.get("penstock.node.id", "")
    return f"node {node_id.partition('-')[0]}" if node_id else span.service.removeprefix("penstock-")


def _row(span: CollectedSpan, depth: int, y: float, start_s: float, scale: float, place: int) -> Iterator[str]:
    duration_s = (span.end_ns - span.start_ns) / 1e9
    x, width = LEFT + start_s * scale, max(MIN_BAR, duration_s * scale)
    name = span.name + (" (killed)" if span.is_error else "")
    yield f'<text x="{8 + INDENT * depth}" y="{y + 17}">{escape(name)}</text>'
    kind = f"p{place} lost" if span.is_error else f"p{place}"
    yield f'<rect class="{kind}" x="{x:.1f}" y="{y + 6}" width="{width:.1f}" height="{BAR}" rx="2"/>'
    yield f'<text class="small" x="{x + width + 5:.1f}" y="{y + 17}">{_shown(duration_s)}</text>'


def _axis(total_s: float, scale: float, bottom: float) -> Iterator[str]:
    step_s = next((tick for tick in TICKS if total_s / tick <= MAX_TICKS), TICKS[-1])
    for number in range(int(total_s / step_s) + 1):
        x = LEFT + number * step_s * scale
        yield f'<line x1="{x:.1f}" y1="24" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="small" x="{x:.1f}" y="18" text-anchor="middle">{number * step_s:g} s</text>'


def _legend(places: Sequence[str], y: float) -> Iterator[str]:
    for at, place in enumerate(places):
        x = LEFT + 130 * at
        yield f'<rect class="p{at}" x="{x}" y="{y + 6}" width="12" height="12" rx="2"/>'
        yield f'<text class="small" x="{x + 17}" y="{y + 16}">{escape(place)}</text>'


def _shown(duration_s: float) -> str:
    return f"{duration_s:.2f} s" if duration_s >= 1 else f"{duration_s * 1e3:.1f} ms"


def _style() -> str:
    light = "".join(f".p{at}{{fill:{color}}}" for at, (color, _) in enumerate(COLORS))
    dark = "".join(f".p{at}{{fill:{color}}}" for at, (_, color) in enumerate(COLORS))
    return (
        "svg{background:#fff}text{font:13px sans-serif;fill:#1f2328}.small{font-size:11px;fill:#59636e}"
        f"line{{stroke:#d1d9e0}}.lost{{fill-opacity:.45}}{light}"
        "@media(prefers-color-scheme:dark){svg{background:#0d1117}text{fill:#e6edf3}.small{fill:#9198a1}"
        f"line{{stroke:#30363d}}{dark}}}"
    )
