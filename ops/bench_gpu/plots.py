"""Bars of the achieved fraction of the limit, as SVG; nothing to install."""

from __future__ import annotations

from html import escape
from pathlib import Path

_BAR, _LEFT, _WIDTH = 18, 260, 400


def plot_fractions(path: Path, title: str, bars: list[tuple[str, float]]) -> None:
    """bars: what, and its fraction of the limit; a line marks the whole."""
    height = 40 + _BAR * len(bars)
    lines = [f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>']
    for i, (name, fraction) in enumerate(bars):
        y, width = 32 + i * _BAR, _WIDTH * min(fraction, 1.2)
        lines += [
            f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 4}" fill="#4878a8"/>',
            f'<text x="{_LEFT + width + 4:.1f}" y="{y + 12}">{fraction:.2f}</text>',
        ]
    limit = _LEFT + _WIDTH
    lines.append(f'<line x1="{limit}" y1="28" x2="{limit}" y2="{height}" stroke="#c04040"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{limit + 140}" height="{height}" font-family="sans-serif"'
    path.write_text("\n".join([head + ' font-size="11">', *lines, "</svg>"]) + "\n")
