"""Pages in a real browser; skipped aloud where none is installed."""

from collections.abc import Iterator

import pytest

from autotune.report import browser


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    if browser.find() is None:
        pytest.skip("no chromium on this machine, so no page was looked at (Debian: apt-get install chromium)")
    with browser.browsing() as found:
        yield found
