"""The blocks of code of the tutorial and the how-to pages, and how a test runs each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.source_tree import ROOT

PAGES = (ROOT / "docs/tutorial.md", *sorted((ROOT / "docs/howto").glob("*.md")))
_BLOCK = re.compile(
    r"(?:<!-- (?P<note>[^>]+) -->\n\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
Way = Literal["run", "in another terminal", "not run"]


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code. `reason` says why it is not run."""

    language: str
    text: str
    way: Way
    reason: str = ""


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page. A comment above a block says if it does not simply run."""
    return [_block(match) for match in _BLOCK.finditer(page.read_text())]


def _block(match: re.Match[str]) -> Block:
    note = match["note"] or ""
    if note.startswith("not run: "):
        return Block(match["language"], match["text"], "not run", note.removeprefix("not run: "))
    way: Way = "in another terminal" if note == "in another terminal" else "run"
    return Block(match["language"], match["text"], way)
