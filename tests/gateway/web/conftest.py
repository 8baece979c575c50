"""A headless Chromium for the tests of the web page, and a chat in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright

CHROMIUM = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 10_000

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file. While it is open, this thread can run no other event loop."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, and containers lack what it needs.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty tab of its own context. A script error or a violated policy fails the test.

    It shows no animations, whose frames would take most of the browser's CPU time.
    """
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, color_scheme="light", reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    yield page
    context.close()
    assert problems == []


class Playground:
    """The playground in a tab."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        page.goto(url)
        self.prompt = page.get_by_label("Message")
        self.model = page.get_by_label("Model", exact=True)

    def choose(self, model: str) -> None:
        """Choose a model, once the list has it."""
        expect(self.model.locator("option", has_text=model)).to_have_count(1)
        self.model.select_option(model)

    def ask(self, text: str) -> None:
        """Send a message."""
        self.prompt.fill(text)
        self.prompt.press("Enter")

    @property
    def answer(self) -> Locator:
        """The last answer."""
        return self.page.locator(".turn.answer").last

    def wait_end(self) -> str:
        """The last answer's text, once it is complete."""
        expect(self.answer).to_have_attribute("aria-busy", "false")
        return self.answer.locator(".said").inner_text()

    @property
    def status(self) -> Locator:
        """Where the last answer is, or why it ended."""
        return self.answer.get_by_role("status")


def scroll_width(page: Page) -> int:
    """The width of the page, which is larger than the window if it scrolls horizontally."""
    try:
        return int(page.evaluate("document.documentElement.scrollWidth"))
    except Error as error:
        raise AssertionError("the page has no document") from error
