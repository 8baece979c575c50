"""Links between the documents lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT

PAGES = sorted(
    path
    for folder in (
        *("", "docs", "docs/howto", "examples"),
        *("ops", "ops/acl", "ops/bench", "ops/observe", "ops/deploy/kubernetes", "ops/deploy/systemd"),
    )
    for path in (ROOT / folder).glob("*.md")
)
PATH = re.compile(r"`((?:[\w.]+/)+\w+\.(?:py|lua|h|cpp))(?::\w+)?`")
"""A file that a page names, from any folder on."""
SOURCES = [
    f"/{folder}/{path.relative_to(ROOT / folder)}"
    for folder in ("src", "cli", "producer", "gateway", "gpu_node", "kernels", "ops", "tests", "examples")
    for path in (ROOT / folder).rglob("*.*")
]
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return CODE.sub("", page.read_text())


def anchors_in(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors_in(target))):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {f"/{name}" for name in PATH.findall(text_of(page))}
    assert [name for name in sorted(named) if not any(path.endswith(name) for path in SOURCES)] == []


def test_readme_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = {str(path.relative_to(ROOT)) for folder in ("", "docs") for path in (ROOT / folder).glob("*.md")}
    assert [name for name in pages - {"README.md"} if f"]({name})" not in readme] == []


def test_readme_takes_three_screens() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []
