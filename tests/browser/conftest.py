"""One browser for all tests that look at pages."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Page, open_browser


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    """A tab of a headless browser, with nothing opened in it yet."""
    with open_browser() as tab:
        yield tab
