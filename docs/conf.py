"""How Sphinx makes the site: `make docs`. Its root is the repository, so that links to any file in it are checked."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def shown_version() -> str:
    """Return the release, or the development version that the pages are for: a commit without a release's tag."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--tags", "--match", f"v{release}"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    is_release = found in ("", f"v{release}")  # "": an sdist, which has no history
    return release if is_release else f"{release}, development, commit {found.rpartition('-g')[2]}"


project = "Burst"
html_title = "Burst"
root_doc = "docs/index"
include_patterns = ["docs/**", "CHANGELOG.md", "bench/README.md", "csrc/README.md", "csrc/model/README.md"]
exclude_patterns = ["**/.*", ".*", "build", "burst", "driver", "fmq", "site", "tests", "**/out"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # a link may end in #heading, as on a code host
suppress_warnings = ["ref.python"]  # `type` is an attribute of two classes, and a word of Python's
default_role = "code"  # in docstrings
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
napoleon_use_ivar = True
MADE_BY_CALLS = {  # no program of one's own makes these, so that their constructors are no concern of its author
    *(
        "AnyBurst",
        "AnyPreparedModel",
        "Buffer",
        "Burst",
        "Chain",
        "CompiledModel",
        "DeviceBuffer",
        "FencedExecution",
        "Future",
    ),
    *("MessageQueue", "MessageQueueReader", "MessageQueueWriter", "Region", "RemoteDevice", "RemotePreparedModel"),
    *("Descriptor", "HardwareBuffer", "Memory"),
}

html_theme = "furo"  # brings its fonts and scripts along: nothing is fetched from elsewhere
html_extra_path = ["index.html"]
html_show_sourcelink = html_copy_source = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "footer_icons": []}
html_show_search_summary = False  # it would need a server, and the site can be read from a folder
html_static_path = ["site.css", "site.js"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "shown_version.html", "sidebar/search.html", "sidebar/scroll-start.html"),
        *("sidebar/navigation.html", "sidebar/scroll-end.html"),
    ]
}
html_context = {
    "shown_version": shown_version(),
    # Folders beside this one that have the pages of other versions: `make docs VERSIONS="stable latest"`.
    "versions": os.environ.get("BURST_DOCS_VERSIONS", "").split(),
}
linkcheck_ignore = [r"https?://(?:127\.0\.0\.1|localhost|HOST)\b.*"]
linkcheck_timeout = 20


def signature(_app: Sphinx, what: str, name: str, *_: object) -> tuple[str, str] | None:
    """None is what autodoc found."""
    return ("", "") if what == "class" and name.rpartition(".")[2] in MADE_BY_CALLS else None


def docstring(_app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Drop the docstring that Python gives to a field of a named tuple: it says nothing."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


# What Sphinx and the theme leave out for people who read with a keyboard or a screen reader: each replacement changes a
# page once. Without `tabindex`, a keyboard cannot scroll what is wider than the window.
ACCESSIBLE = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="All pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="Sections of this page">',
    '<aside class="toc-drawer no-toc">': '<aside class="toc-drawer no-toc" aria-label="Sections of this page">',
    '<div class="table-wrapper colwidths-auto docutils container">': (
        '<div class="table-wrapper colwidths-auto docutils container" tabindex="0">'
    ),
    "<pre>": '<pre tabindex="0">',
    '<th class="head"><p></p></th>': '<td class="head"></td>',
}
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)
PARAMETERS = {
    "<dl>": '<span class="sig-lines">',
    "</dl>": "</span>",
    "<dd>": '<span class="sig-line">',
    "</dd>": "</span>",
}


def replaced(text: str, words: dict[str, str]) -> str:
    """Return the text with each key's value in its place."""
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def make_accessible(app: Sphinx, error: Exception | None) -> None:
    """Mends the pages that were written. A list of parameters is no list of definitions: it becomes plain lines."""
    if error is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            text = replaced(page.read_text(), ACCESSIBLE)
            page.write_text(SIGNATURE.sub(lambda found: replaced(found[0], PARAMETERS), text))


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Put llms.txt at the site's root, with links to the site's pages."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "llms.txt").write_text((ROOT / "llms.txt").read_text().replace(".md)", ".html)"))


def setup(app: Sphinx) -> None:
    """Register what the pages need. The blocks of the protocol's page are in no language that a lexer knows."""
    app.connect("build-finished", make_accessible)
    app.connect("build-finished", write_llms_txt)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    for name in ("hex", "order"):
        app.add_lexer(name, TextLexer)
