"""Pages in a real browser, driven by Playwright; skipped aloud where none is installed."""

import shutil
from collections.abc import Iterator

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)


class Window:
    """A page of Playwright's that keeps what it asked for and what it complained about.

    Attributes:
        tab: Playwright's page.
        requests: Addresses that it asked for.
        complaints: Errors and warnings on its console, and exceptions.
    """

    def __init__(self, tab) -> None:
        self.tab, self.requests, self.complaints = tab, [], []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        tab.set_default_timeout(60_000)

    def view(self, width, height, *, dark=False):
        """Sets the size of the window, and the colours that its user prefers."""
        self.tab.set_viewport_size({"width": width, "height": height})
        self.tab.emulate_media(color_scheme="dark" if dark else "light")
        self.frame()

    def open(self, address):
        """Loads a page."""
        self.tab.goto(address)

    def drawn(self):
        """Waits until every plot is drawn. The page's policy forbids the polling by `eval` of `wait_for_function`."""
        self.tab.wait_for_selector("html[data-drawn=yes]", state="attached")

    def frame(self):
        """Waits until the next frame is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def run(self, expression):
        """The value of a JavaScript expression, awaited."""
        return self.tab.evaluate(expression)

    def press(self, *keys):
        """Presses keys one after another, and waits until their effect is drawn."""
        for key in keys:
            self.tab.keyboard.press(key)
        self.frame()

    def tab_from(self, selector):
        """Goes on with Tab from an element; the element that has the focus then is seen to have it."""
        self.tab.focus(selector)
        self.press("Tab")
        assert self.run("getComputedStyle(document.activeElement).outline").endswith("solid 2px")


@pytest.fixture(scope="module")
def page() -> Iterator[Window]:
    if BROWSER is None:
        pytest.skip("no chromium on this machine, so no page was looked at (Debian: apt-get install chromium)")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield Window(browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page())
        finally:
            browser.close()
