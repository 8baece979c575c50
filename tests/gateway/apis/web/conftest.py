"""A headless Chromium for the tests of the web page, and a chat in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, Route, expect, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")
"""Debian's names. The first one is Chromium without windows, which takes two thirds of the CPU time."""
CHROMIUM = os.environ.get("PENSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE_MS = 60_000
BLANK = "about:blank"
FORGET = """async () => {
    localStorage.clear();
    sessionStorage.clear();
    const names = (await indexedDB.databases()).map(({ name }) => name);
    await Promise.all(names.map((name) => new Promise((resolve) => {
        indexedDB.deleteDatabase(name).onsuccess = resolve;
    })));
}"""
REBOUND = "rebound.example"
"""A name of a web site that, in the browser, leads to this machine."""

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One browser for the tests of this folder. While it is open, this thread can run no other event loop."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, and containers lack what it needs.
        args = ["--no-sandbox", "--disable-gpu", f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def tab(browser: Browser) -> Iterator[Page]:
    """A tab that the tests use in turn. Another context would take another process and 0.7 s of CPU time."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """An empty tab without stored data. A script error or a violated policy fails the test.

    It shows no animations, whose frames would take most of the browser's CPU time.
    """
    problems: list[str] = []

    def note(problem: object) -> None:
        problems.append(str(problem))

    def note_violation(message: ConsoleMessage) -> None:
        if "Content Security" in message.text:
            note(message.text)

    tab.set_viewport_size({"width": 1280, "height": 800})
    tab.emulate_media(color_scheme="light", reduced_motion="reduce")
    tab.on("pageerror", note)
    tab.on("console", note_violation)
    yield tab
    for other in tab.context.pages[1:]:
        other.close()
    tab.unroute_all()
    tab.remove_listener("pageerror", note)
    tab.remove_listener("console", note_violation)
    leave(tab)
    assert problems == []


def leave(tab: Page) -> None:
    """Delete the page's stored data, and end its streams by leaving it."""
    if tab.url != BLANK:
        tab.evaluate(FORGET)
        tab.goto(BLANK)


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
        """Send a message. A page that was just loaded may still read on the answer before: it sends none then.

        The page sends none either if it read the list of models while the node was late. It then reads the list again.
        """
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()
        self.prompt.fill(text)
        self.prompt.press("Enter")
        if self.page.get_by_text("No model is served yet.").and_(self.page.get_by_role("status")).count():
            expect(self.model.locator("option")).not_to_have_count(0)
            self.prompt.press("Enter")

    @property
    def answer(self) -> Locator:
        """The last answer."""
        return self.page.locator(".turn.answer").last

    def wait_end(self) -> str:
        """The last answer's text, once it is complete."""
        said = self.answer.locator(".said")
        expect(said).to_have_attribute("aria-busy", "false")
        return said.inner_text()

    @property
    def status(self) -> Locator:
        """The state of the last answer, or why it ended."""
        return self.answer.get_by_role("status")


class Held:
    """Holds the page's requests to an address."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.routes = list[Route]()
        page.route(address, self._hold)

    def _hold(self, route: Route) -> None:
        self.routes.append(route)

    def first(self) -> Route:
        """Wait for the first one. Its route may come after the page has reported the request."""
        for _ in range(PATIENCE_MS // 10):
            if self.routes:
                return self.routes[0]
            self.page.wait_for_timeout(10)
        raise AssertionError("the page sent no such request")


def scroll_width(page: Page) -> int:
    """The width of the page, which is larger than the window if it scrolls horizontally."""
    try:
        return int(page.evaluate("document.documentElement.scrollWidth"))
    except Error as error:
        raise AssertionError("the page has no document") from error
