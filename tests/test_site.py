"""The site in a real browser: people can read it in both themes, and its search finds pages."""

import subprocess
import sys
from pathlib import Path

import pytest
from chromium import chromium, violations

ROOT = Path(__file__).parents[1]
MAIN = ("index", "is-it-for-me", "start", "install", "guarantees", "performance", "command", "glossary", "queues")
MAIN += ("concepts/burst", "howto/camera", "reference/driver", "protocol")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site, which is read without a server."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-c", ROOT / "docs", "-d", folder / "trees", ROOT, folder / "site"]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_against_the_main_pages(site, browser, scheme, width):
    """In either theme, on a desk and on a telephone: contrast, names of controls, order of headings, landmarks."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, found = context.new_page(), {}
    for name in MAIN:
        page.goto((site / f"docs/{name}.html").as_uri())
        found[name] = violations(page)
    context.close()
    assert {name: those for name, those in found.items() if those} == {}


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("priority", "qos.html"),
        ("ray serve", "is-it-for-me.html"),
        ("descriptor", "queues.html"),
        ("doctor", "doctor.html"),
    ],
)
def test_the_search_finds(site, browser, words, page):
    """A word of a page, typed into the search, lists that page; nothing on the way complains in the console."""
    context = browser.new_context()
    tab, complaints = context.new_page(), []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto((site / "docs/index.html").as_uri())
    tab.fill("input[name=q]", words)
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f"#search-results a[href*='{page}']")
    context.close()
    assert complaints == []
