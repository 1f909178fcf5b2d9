"""A Chromium without a window, for tests of pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser; skips the test where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip("no Chromium: install one (Debian: apt install chromium-headless-shell)")
    with playwright.sync_playwright() as leading:
        browser = leading.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def violations(page: Any) -> list[str]:
    """What axe finds against a page: rule, what it says, and the elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}" for each in found]
