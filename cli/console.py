"""The console of tables, bars and live views. Names in them come from models, files and callers."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from penstock.runtime.terminal import without_controls


class Console(RichConsole):
    """Shows text without control characters. rich keeps escape characters of a text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of an object; control codes are segments of their own."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(without_controls(segment.text), segment.style)
