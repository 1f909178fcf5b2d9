"""The site in a real browser: people can read it in both themes, and its search finds pages."""

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from chromium import chromium, violations

ROOT = Path(__file__).parents[1]
MAIN = ("index", "is-it-for-me", "start", "install", "guarantees", "performance", "command", "glossary", "queues")
MAIN += ("concepts/burst", "howto/camera", "reference/driver", "protocol")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site, which is read without a server; beside it stands another version, `stable`."""
    folder = tmp_path_factory.mktemp("sites")
    build = [sys.executable, "-m", "sphinx", "-q", "-c", ROOT / "docs", "-d", folder / "trees", ROOT, folder / "latest"]
    versions = os.environ | {"BURST_DOCS_VERSIONS": "stable latest"}
    done = subprocess.run(build, capture_output=True, text=True, timeout=500, check=False, env=versions)
    assert done.returncode == 0, done.stderr
    (folder / "stable").symlink_to("latest")
    return folder / "latest"


class Links(HTMLParser):
    """Where a page's links lead, and what may be linked to in it."""

    def __init__(self, page):
        super().__init__()
        self.targets, self.names = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names |= {found.get("id"), found.get("name")}
        self.targets += [found[key] for key in ("href", "src") if found.get(key)]


links_of = cache(Links)


def broken(page):
    """Links of a page to files that are not there, or to headings that they do not have."""
    for target in links_of(page).targets:
        parts = urlparse(target)
        if parts.scheme:
            continue
        other = (page.parent / unquote(parts.path)) if parts.path else page
        has_names = parts.fragment and other.suffix == ".html"
        if not other.is_file() or (has_names and unquote(parts.fragment) not in links_of(other).names):
            yield target


def test_no_link_inside_the_site_is_broken(site):
    """Pages, headings, pictures, scripts: each link of each page leads to something, also those to other versions."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    assert sum(len(links_of(page).targets) for page in pages) > 5000
    assert {page.name: found for page in pages if (found := list(broken(page)))} == {}


def test_a_broken_link_is_found(tmp_path):
    """So that silence above means something."""
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    (tmp_path / "a.html").write_text('<a href="b.html#there">1</a><a href="b.html#gone">2</a><img src="c.png">')
    assert list(broken(tmp_path / "a.html")) == ["b.html#gone", "c.png"]


def test_each_page_says_which_version_it_is_for(site, browser):
    """The release of pyproject.toml stands in the sidebar, and a link leads from any page to the other version."""
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tab = browser.new_page()
    for name in ("index", "howto/camera", "reference/driver"):
        tab.goto((site / f"docs/{name}.html").as_uri())
        said = tab.inner_text(".shown-version")
        assert re.match(rf"Burst {re.escape(release)}(, development, commit \w+)?: stable · latest$", said), said
    tab.get_by_role("link", name="stable").click()
    tab.wait_for_url("**/stable/docs/index.html")
    tab.close()


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


def test_code_can_be_copied(site, browser):
    """A button at each block: of a program all of it, of a console the commands without their prompts."""
    tab = browser.new_page()
    tab.add_init_script(
        """Object.defineProperty(navigator, "clipboard", {value: {writeText: async (x) => {window.taken = x}}})"""
    )
    for name, words in (
        ("start", "import numpy as np\n\nimport driver\n"),
        ("doctor", "burst doctor -- python app.py"),
    ):
        tab.goto((site / f"docs/{name}.html").as_uri())
        block = tab.locator("div.highlight", has_text=words.partition("\n")[0]).first
        block.get_by_role("button").click()
        assert block.get_by_role("button").inner_text() == "Copied"
        taken = tab.evaluate("window.taken")
        assert taken.startswith(words) if name == "start" else taken == words
    tab.close()


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


@pytest.mark.parametrize("name", ["start", "bursts", "howto/agents", "howto/c", "howto/device"])
def test_no_line_of_code_is_cut_on_a_wide_screen(site, browser, name):
    """A page of 1680 pixels shows each line of its programs whole."""
    tab = browser.new_page(viewport={"width": 1680, "height": 1000})
    tab.goto((site / f"docs/{name}.html").as_uri())
    programs = "[...document.querySelectorAll('.highlight-python pre, .highlight-c pre')]"
    cut = f"{programs}.filter(p => p.scrollWidth > p.clientWidth).map(p => p.textContent.slice(0, 60))"
    assert tab.evaluate(cut) == []
    tab.close()
