"""Checks the links of built pages: their files and anchors exist, and nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""Elements that a browser loads when it shows a page."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors, self.links, self.loaded = set[str](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        if tag == "a":
            self.anchors.add(found.get("name", ""))
            self.links.append(found.get("href", ""))
        elif tag in _LOADED and found.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.loaded.append(found.get(_LOADED[tag], ""))


@cache
def _parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(errors="replace"))
    return page


def broken_links(folder: Path) -> list[str]:
    """Return one line for each link of the pages in `folder` that leads nowhere, or that loads from the network."""
    _parsed.cache_clear()
    pages = sorted(folder.rglob("*.html"))
    return [line for page in pages if page.name != "404.html" for line in _broken_in(page, folder)]


def _broken_in(path: Path, folder: Path) -> Iterator[str]:
    page = _parsed(path)
    name = path.relative_to(folder)
    for address in page.loaded:
        if urlsplit(address).netloc:
            yield f"{name}: loads {address}"
        elif address and not address.startswith("data:") and not _target(path, address).is_file():
            yield f"{name}: no file {address}"
    for address in page.links:
        split = urlsplit(address)
        if split.scheme or split.netloc or not address:
            continue
        target = _target(path, address)
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            yield f"{name}: no page {address}"
        elif split.fragment and target.suffix == ".html" and unquote(split.fragment) not in _parsed(target).anchors:
            yield f"{name}: no heading {address}"


def _target(path: Path, address: str) -> Path:
    relative = unquote(urlsplit(address).path)
    return (path.parent / relative).resolve() if relative else path
