"""A real browser for tests of the page: Debian's Chromium, headless, driven by Playwright.

The tests of a file share one, in which each is another reader: nothing that a page keeps outlives its test. Whatever
the page writes to its console, raises, or asks of another host fails the test, but for the lines that the test names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
PATIENCE = 100_000
"""Milliseconds, far above what anything takes on two busy cores."""
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
CUT_OFF = r"INCOMPLETE_CHUNKED_ENCODING|CONTENT_LENGTH_MISMATCH|EMPTY_RESPONSE"
REFUSED = rf"status of (4\d\d|503)|net::ERR_(CONNECTION_\w+|{CUT_OFF}|SOCKET_\w+)"
"""What the browser itself says of answers that a test provokes."""
SERIOUS = ("serious", "critical")
CUT_OFF_ROWS = """() => {
  const edge = document.documentElement.clientWidth;
  const isCutOff = (row) => {
    const texts = document.createTreeWalker(row, NodeFilter.SHOW_TEXT);
    const range = document.createRange();
    const shown = [];
    while (texts.nextNode()) {
      range.selectNodeContents(texts.currentNode);
      shown.push(...range.getClientRects());
    }
    const bottom = Math.max(...shown.filter((one) => one.right <= edge).map((one) => one.bottom));
    return shown.some((one) => one.right > edge) || row.getBoundingClientRect().bottom - bottom > 28;
  };
  const rows = [...document.querySelectorAll("tbody tr")].filter((row) => row.offsetParent && isCutOff(row));
  return rows.map((row) => row.textContent);
}"""
"""Rows of tables that have text beyond the window, or are higher than the text within it and a button's padding."""
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}}


@dataclass
class Watched:
    """One page, and what it has said."""

    page: Page
    url: str
    allowed: str = ""
    console: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.console.append(f"error: {error}"))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        self.console.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        self.asked.append(request.url)

    def check(self) -> None:
        """Nothing in the console, no other host, no policy broken."""
        wrong = [line for line in self.console if not (self.allowed and re.search(self.allowed, line))]
        assert wrong == [], f"in the console: {wrong}"
        elsewhere = [url for url in self.asked if not url.startswith((self.url, "blob:", "about:"))]
        assert elsewhere == [], f"asked of other hosts: {elsewhere}"

    # ---- places

    def open(self, fragment: str = "") -> None:
        self.page.goto(f"{self.url}/{fragment}")

    def open_job(self, job: str = "job", world: bool = True) -> None:
        """The job's view; returns when its figures, and marks of its world, are there."""
        self.open(f"#/jobs/{job}")
        expect(self.page.locator("#phase .badge")).to_be_visible()
        if world:
            expect(self.page.locator(".marks .mark").first).to_be_visible()

    def as_answered(self) -> None:
        """Answers are no longer altered; one that a test has in hand at this moment goes to the page as it is."""
        for page in self.page.context.pages:
            page.unroute_all(behavior="ignoreErrors")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    def accessibility_faults(self) -> list[str]:
        """What axe-core calls serious or worse."""
        found = Axe().run(self.page, options=RULES).response["violations"]
        return [
            f"{one['id']} ({one['impact']}): {one['help']}; {[node['target'] for node in one['nodes']][:4]}"
            for one in found
            if one["impact"] in SERIOUS
        ]

    def cut_off_rows(self) -> list[str]:
        return list(self.page.evaluate(CUT_OFF_ROWS))

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


_browser: Browser | None = None


@contextmanager
def one_browser() -> Iterator[None]:
    """A browser for all that is `browsed` in this context."""
    global _browser
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        _browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*ARGUMENTS])
        try:
            _browser.new_page().close()  # with that its helpers are there
            yield
        finally:
            _browser.close()
            _browser = None


@contextmanager
def browsed(url: str, allowed: str = "", look: Mapping[str, Any] | None = None) -> Iterator[Watched]:
    """A reader with one page, not yet anywhere. `look`: of the context, such as PHONE or a colour scheme."""
    assert _browser, "no browser: tests of the page ask for the fixture `browser`"
    context = _browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **(look or {})})
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        watched = Watched(page, url, allowed)
        watched.watch()
        try:
            yield watched
            watched.check()
        finally:
            watched.as_answered()
    finally:
        context.close()
