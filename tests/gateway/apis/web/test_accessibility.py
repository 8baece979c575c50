"""All views by WCAG 2.2 AA, as far as axe can tell, in both widths and themes; and what a phone shows."""

from __future__ import annotations

from importlib.resources import files
from itertools import pairwise
from typing import Literal

import httpx
import pytest
from fakes.cover import each_value
from playwright.sync_api import Page, ViewportSize, expect

from tests.gateway.apis.web.conftest import Playground, scroll_width
from tests.gateway.conftest import MODEL, EchoEngine

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
SIZES: dict[str, ViewportSize] = {"wide": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
SERIOUS = ("serious", "critical")
TEXT = """# Title

A [link](https://example.com) and `code`.

* one
* two

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x: int) -> str:  # a comment
    return "text" * 3
```
"""


def problems(page: Page, part: str | None = None) -> list[tuple[str, str]]:
    """What axe finds that is serious, with the first element of each. `part` selects a part of the page."""
    page.evaluate(AXE)
    found = page.evaluate("([part, runOnly]) => axe.run(part ?? document, { runOnly })", [part, RULES])["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in SERIOUS]


VIEWS = ("#playground", "#batches", "#jobs", "#dashboard", "docs")
FEW_ROUTES = "document.querySelectorAll('section:nth-of-type(n + 6), nav li:nth-child(n + 6)').forEach(e => e.remove())"


@pytest.mark.parametrize(("view", "size", "theme"), each_value(VIEWS, SIZES, ("light", "dark")))
def test_a_view_has_no_barriers(
    page: Page, url: str, http: httpx.Client, view: str, size: str, theme: Literal["light", "dark"]
) -> None:
    page.set_viewport_size(SIZES[size])
    page.emulate_media(color_scheme=theme)
    job = http.post("/v1/jobs", json={"model": MODEL, "prompt": "hi", "priority": "batch"}).json()["id"]
    page.goto(f"{url}/{view}")
    if view == "#playground":
        chat = Playground(page, url)
        chat.ask(TEXT)
        chat.wait_end()
    elif view == "#dashboard":
        expect(page.get_by_role("heading", name="Nodes and their KV blocks").first).to_be_visible()
    elif view == "#jobs":
        page.locator("#job-table tbody", has_text=job).locator(".job").click()
        expect(page.get_by_text("First token", exact=True)).to_be_visible()
    assert scroll_width(page) == SIZES[size]["width"]
    if view == "docs":
        page.evaluate(FEW_ROUTES)  # the others are like these
    assert problems(page) == []


def test_dialogs_and_drawers_have_no_barriers_and_close_with_a_key(page: Page, url: str, engine: EchoEngine) -> None:
    page.set_viewport_size(SIZES["phone"])
    chat = Playground(page, url)
    chat.ask("hello")
    chat.wait_end()
    for drawer, part in (("Settings", "#settings"), ("Chats", "#conversations")):
        page.get_by_role("button", name=drawer).click()
        assert problems(page, part) == []
        page.keyboard.press("Escape")
        expect(page.locator(part)).to_be_hidden()
        expect(page.get_by_role("button", name=drawer)).to_be_focused()
    for menu, opener in (("Menu", "API key"), ("More", "Rename")):
        page.get_by_role("button", name=menu, exact=True).click()
        page.get_by_role("button", name=opener).click()
        assert problems(page, "dialog[open]") == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name=opener)).to_be_focused()


def test_the_head_of_a_phone_is_one_row(page: Page, url: str, engine: EchoEngine) -> None:
    page.set_viewport_size({"width": 375, "height": 700})
    chat = Playground(page, url)
    chat.ask("a question whose title is longer than what a phone has room for in one row")
    chat.wait_end()
    box = page.locator("#turns").bounding_box()
    assert box is not None
    assert box["y"] <= 48
    assert scroll_width(page) == 375
    rows = page.locator("header button:visible, .bar :is(button, h2):visible").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect()).map(({ left, right }) => [left, right])"
    )
    assert len(rows) == 5
    assert all(right <= left for (_, right), (left, _) in pairwise(sorted(rows)))
    for view in ("Jobs", "Batches", "Dashboard"):
        page.get_by_role("button", name="Menu").click()
        page.get_by_role("link", name=view).click()
        expect(page.locator("#view-name")).to_have_text(view)
        expect(page.get_by_role("link", name="Playground")).to_be_hidden()
        head = page.locator("header").bounding_box()
        assert head is not None
        assert head["height"] <= 48


def test_a_phone_follows_the_answer_and_covers_nothing_of_it(page: Page, url: str, engine: EchoEngine) -> None:
    page.set_viewport_size(SIZES["phone"])
    chat = Playground(page, url)
    engine.step_s = 0.003
    chat.ask("\n\n".join(f"line {number}" for number in range(20)))
    chat.wait_end()
    last = chat.answer.get_by_role("button", name="Copy as Python").bounding_box()
    composer = page.locator("#composer").bounding_box()
    assert last is not None
    assert composer is not None
    assert last["y"] + last["height"] <= composer["y"]
    expect(chat.prompt).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollHeight") == SIZES["phone"]["height"]
    # The page leaves a reader alone that has scrolled back.
    page.locator("#turns").evaluate("turns => turns.scrollTop = 0")
    chat.ask("and more")
    chat.wait_end()


def test_words_are_broken_only_where_they_are_wider_than_the_window(page: Page, url: str, engine: EchoEngine) -> None:
    page.set_viewport_size(SIZES["phone"])
    chat = Playground(page, url)
    chat.ask("responsibilities " * 12)
    chat.wait_end()
    widths = """said => {
        const [text] = [said.querySelector("p").firstChild];
        const range = document.createRange();
        return Array.from({ length: 12 }, (_, i) => {
            range.setStart(text, 17 * i);
            range.setEnd(text, 17 * i + 16);
            return range.getClientRects().length;
        });
    }"""
    assert chat.answer.locator(".said").evaluate(widths) == [1] * 12
    chat.ask("x" * 120)
    chat.wait_end()
    assert scroll_width(page) == SIZES["phone"]["width"]
