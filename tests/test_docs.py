"""The documentation: complete, without a dead link, and of what there is."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

import burst
import driver
import fmq
from driver.cli.command import burst as command

pytestmark = pytest.mark.sources

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(ROOT / f"{page}.md" for page in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
    ROOT / "bench/README.md",
    *(ROOT / "csrc").rglob("*.md"),
]
PAGES += [ROOT / "tests/README.md", ROOT / "CODE_OF_CONDUCT.md", ROOT / "llms.txt"]
PAGES += sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
SHELL = {"", "sh", "bash", "console", "shell", "ini", "dockerfile", "Dockerfile"}


def name(page):
    return str(page.relative_to(ROOT))


@cache
def parsed(path):
    """A file's code as a tree: pages name the same files again and again."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees():
    """Are forgotten after the last of these tests, so that later garbage collections need not look at them."""
    yield
    parsed.cache_clear()


def prose(page):
    """Without blocks of code."""
    return FENCE.sub("", page.read_text())


# ---- navigation and links --------------------------------------------------------------------------------------------


def entries():
    """What index.md has in its trees of pages."""
    for fence in FENCE.finditer((DOCS / "index.md").read_text()):
        if fence[2].startswith("{toctree}"):
            lines = [line for line in fence[3].split("\n") if line and not line.startswith(":")]
            yield from (re.sub(r"^.*<(.*)>$", r"\1", line) for line in lines)


def test_every_page_has_a_place_in_the_navigation():
    """And one only; what is in the navigation exists."""
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"index"}
    places = {page: [entry for entry in entries() if fnmatch(page, entry)] for page in pages}
    assert {page: found for page, found in places.items() if len(found) != 1} == {}
    assert [entry for entry in entries() if "*" not in entry and not (DOCS / f"{entry}.md").exists()] == []


def anchors(page):
    """Of its headings, as code hosts and the site make them."""
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    """To files of the repository, and to headings in them."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            assert other.exists(), target
            assert not anchor or anchor in anchors(other), target


# ---- what is said about the sources ----------------------------------------------------------------------------------


def lines_of_commands(page):
    """The arguments of `burst` on its lines of shell, and where it is named in the text."""
    text = page.read_text()
    blocks = [fence[3] for fence in FENCE.finditer(text) if fence[2].strip() in SHELL]
    blocks += re.findall(r"^    (\S.*)$", FENCE.sub("", text), re.MULTILINE)
    line = re.compile(r"^\s*(?:\$ |ExecStart=|CMD |sudo )*(?:\w+=\S+ )*(?:\S*/)?burst +([a-z-].*)$", re.MULTILINE)
    for block in blocks:
        yield from line.findall(block)
    yield from (" ".join(span.split()) for span in re.findall(r"`burst ([^`]+)`", prose(page)))


def check_command(words):
    """Raises AssertionError for a sub-command or an option that is none. `a|b` is both."""
    found, options = command, {"-h", "--help", "--version"}
    for word in words:
        if word == "--":
            return
        if word.startswith("-") and not re.match(r"-\d", word):
            assert word.partition("=")[0] in options, f"{found.name} has no option {word}"
        elif isinstance(found, click.Group) and not word.isupper():
            inner = [found.get_command(click.Context(found), each) for each in word.split("|")]
            assert all(inner), f"{found.name} has no sub-command {word}"
            found = inner[0]
            options = {"-h", "--help"}.union(*(it.opts + it.secondary_opts for it in found.params))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_command_lines_are_of_the_command(page):
    """Each `burst …` names a sub-command and options that there are."""
    for line in lines_of_commands(page):
        words = shlex.split(line.partition(" #")[0].replace("[", " ").replace("]", " "))
        check_command(words)


@pytest.mark.parametrize("line", ["--fast", "fly", "serve --wings", "cache fly"])
def test_a_wrong_command_line_is_found(line):
    """So that silence above means something."""
    with pytest.raises(AssertionError, match="has no"):
        check_command(line.split())


@pytest.mark.parametrize("package", [fmq, burst, driver], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(package):
    """Those of another package stand there, and nothing that is gone is listed."""
    pages = {each.stem: each.read_text() for each in (DOCS / "reference").glob("*.md")}
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", pages[package.__name__], re.MULTILINE)
    borrowed = {name for name in package.__all__ if not getattr(package, name).__module__.startswith(package.__name__)}
    assert set(listed) == set(package.__all__) - borrowed
    for taken in borrowed:
        assert re.search(rf"^\.\. auto\w+:: {taken}$", pages["burst"], re.MULTILINE), taken


def test_named_tests_exist():
    """A page that says which test holds a claim names one that there is."""
    named = {found for page in PAGES for found in re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)*)`", page.read_text())}
    assert len(named) > 60
    for path, inside in named:
        tree = parsed(ROOT / path)
        for part in inside.split("::")[1:]:
            tree = next((node for node in tree.body if getattr(node, "name", None) == part), None)
            assert tree is not None, f"{path}{inside}"


NAME = r"`((?:fmq|burst|driver|csrc)/[\w/.-]+\.(?:py|[ch])):\s+([\w.]+)`"
CODE = re.compile(NAME)


def definitions(tree):
    """Name -> node of what a module or a class defines: classes, functions, constants and annotated fields."""
    for node in ast.walk(tree) if not isinstance(tree, ast.Module) else tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name | ast.Attribute):
                yield target.id if isinstance(target, ast.Name) else target.attr, node
            elif isinstance(target, ast.Tuple):
                yield from ((each.attr, node) for each in target.elts if isinstance(each, ast.Attribute))


def found_in(path, name):
    """The node of `Class.method` in a Python file, or True for a name that a C file has; None when it is not there."""
    file = ROOT / path
    if not file.exists():
        return None
    if file.suffix != ".py":
        return bool(re.search(rf"\b{name}\b", file.read_text())) or None
    node = parsed(file)
    for part in name.split("."):
        node = dict(definitions(node)).get(part)
        if node is None:
            return None
    return node


def elsewhere(name):
    """Files of the product that define the last part of a dotted name, for the author of a rename."""
    last = re.escape(name.rpartition(".")[2])
    pattern = re.compile(rf"^\s*(?:async def|def|class) {last}\b|^{last}\b.* = ", re.MULTILINE)
    files = [file for package in ("fmq", "burst", "driver") for file in (ROOT / package).rglob("*.py")]
    return [str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_code_exists(page):
    """Every `file: name` of a page is in that file. When it fails: the page has to follow the code."""
    missing = {
        f"{path}: {each}": f"defined in {elsewhere(each) or 'no file: renamed?'}"
        for path, each in CODE.findall(page.read_text())
        if found_in(path, each) is None
    }
    assert missing == {}, f"{page.relative_to(ROOT)} names code that is not there; correct the page"


@pytest.mark.parametrize(
    ("path", "each"),
    [("burst/run_queue.py", "Tickett"), ("burst/run_queue.py", "Ticket.fly"), ("burst/no.py", "Ticket")],
)
def test_a_name_that_is_not_there_is_found(path, each):
    """So that silence above means something."""
    assert found_in(path, each) is None
    assert found_in("burst/run_queue.py", "Ticket.leave") is not None


WALKS = DOCS / "how-it-works.md"


def arrows(text):
    """(caller, callee) for each `A` → `B` of a page, each a pair of file and name; brackets may stand between."""
    text = " ".join(text.split())
    for match in re.finditer(rf"{NAME}(?= (?:\([^)]*\) )?→ {NAME})", text):
        yield (match[1], match[2]), (match[3], match[4])


def names_in(path, name):
    """Every name, attribute and string that a function uses; a class counts whole. Of a C function, its words."""
    if path.endswith(".py"):
        for node in ast.walk(found_in(path, name)):
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                    yield word
        return
    text = (ROOT / path).read_text()
    body = re.search(rf"^[\w*][^\n;]*\b{name}\([^;{{]*\)\s*\{{.*?^\}}", text, re.MULTILINE | re.DOTALL)
    line = re.search(rf"^[\w*][^\n;]*\b{name}\([^;{{]*\)\s*\{{.*\}}$", text, re.MULTILINE)
    yield from re.findall(r"\w+", (line or body)[0] if line or body else "")


def test_each_arrow_of_the_tour_is_a_call():
    """Where how-it-works.md says `A` → `B`, A's code names B. A call to another process names it in a string."""
    found = list(arrows(WALKS.read_text()))
    assert len(found) > 50
    wrong = []
    for (path, caller), (other, callee) in found:
        words = callee.removesuffix(".__init__").split(".")
        if found_in(path, caller) is None or words[-1] not in names_in(path, caller):
            wrong.append(f"`{path}: {caller}` → `{other}: {callee}`: the first does not name {words[-1]!r}")
    assert wrong == [], "the code has changed: correct these steps of docs/how-it-works.md"


def test_an_arrow_that_is_no_call_is_found():
    """So that silence above means something; brackets and line ends do not hide an arrow."""
    text = "`burst/run_queue.py: Ticket.leave` (x)\n → `burst/run_queue.py: RunQueue` → `burst/run_queue.py: Share`"
    assert [(a, b) for (_, a), (_, b) in arrows(text)] == [("Ticket.leave", "RunQueue"), ("RunQueue", "Share")]
    assert "RunQueue" not in names_in("burst/run_queue.py", "Ticket.leave")
    assert "burst_leave" in names_in("burst/run_queue.py", "Ticket.leave")
    assert "burst_enter" in names_in("csrc/burst/deadline.c", "burst_judge_begin")


def test_the_rooms_are_those_of_the_contract():
    """The table of rooms has the layers of pyproject.toml, in their order."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["driver"])
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", WALKS.read_text(), re.MULTILINE)
    assert [set(re.findall(r"\w+", row)) for row in rows] == [set(layer.split(" | ")) for layer in layers]


def test_the_glossary_has_code_for_every_term():
    """Each row says what it means in one sentence, and where that is."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    terms = [(term, text, code) for term, text, code in rows if term != "term"]
    assert len(terms) > 50
    for term, text, code in terms:
        assert CODE.search(code), term
        assert re.fullmatch(r"[^.]*(?:\.\w[^.]*)*\.", text), f"{term}: one sentence"
    assert len({term for term, _, _ in terms}) == len(terms)


def test_the_operations_of_a_device_are_counted():
    """The numbers of operations that two pages give are those of the devices' tables."""
    pages = [(DOCS / page).read_text() for page in ("guarantees.md", "devices.md")]
    for device in ("litert", "onnxruntime"):
        count = len(importlib.import_module(f"driver.devices.{device}.lower").LOWERINGS)
        for page in pages:
            assert re.search(rf"`{device}`[^.\n]*?\b{count}\b", page), (device, count)


def test_drawings_say_what_they_show():
    """Each has a title, and a description for those who do not see it, also where it stands, and fetches nothing."""
    text = "".join(page.read_text() for page in PAGES)
    for drawing in (DOCS / "pictures").glob("*.svg"):
        source = drawing.read_text()
        assert re.search(r"<title id=\"title\">\w", source), drawing.name
        assert re.search(r"<desc id=\"description\">\w", source), drawing.name
        assert "prefers-color-scheme: dark" in source, drawing.name
        assert re.findall(r"(?:href|url\()\W*http", source) == []
        assert re.search(rf"!\[[^\]]{{20,}}\]\([\w/.]*{drawing.name}\)", text), drawing.name


# ---- the site --------------------------------------------------------------------------------------------------------


class Fetched(HTMLParser):
    """What a browser loads for a page, as far as it comes from elsewhere."""

    def __init__(self):
        super().__init__()
        self.elsewhere = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        source = attributes.get("src") or (attributes.get("href") if tag == "link" else None) or ""
        if re.match(r"(https?:)?//", source):
            self.elsewhere.append(source)


@pytest.mark.stress
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path):
    """Every link, heading, docstring and drawing in order; nothing that a page loads comes from elsewhere; a search."""
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-j",
        "auto",
        "-c",
        DOCS,
        "-d",
        tmp_path / "trees",
        ROOT,
    ]
    done = subprocess.run([*build, tmp_path / "site"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text())
        assert parser.elsewhere == [], page.name
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert re.findall(r"url\(\W*http|@import", sheet.read_text()) == [], sheet.name
    assert "Controller" in (tmp_path / "site/searchindex.js").read_text()


# ---- manual pages ----------------------------------------------------------------------------------------------------


def test_manual_pages_have_each_command_and_option(tmp_path):
    """`make man` writes a page for each sub-command, with all of its options."""
    subprocess.run([sys.executable, DOCS / "man_pages.py", tmp_path], check=True, timeout=60)
    pages = {page.stem: page.read_text() for page in tmp_path.glob("*.1")}
    assert {f"burst-{each}" for each in command.list_commands(click.Context(command))} < set(pages)
    for option in ("--input", "--shape", "-h, --help"):
        assert f".B {option}".replace("-", "\\-") in pages["burst-run"]
    assert "burst run net.tflite \\-\\-input photo.jpg" in pages["burst"]
    assert all(text.isascii() for text in pages.values())


def test_the_tour_can_be_played():
    """docs/tour.cast is a recording of asciinema's version 2, of two minutes at most; its commands exist, and
    docs/tour.md shows what it shows.
    """
    sys.path.append(str(DOCS))
    import tour

    head, *events = map(json.loads, (DOCS / "tour.cast").read_text().splitlines())
    assert (head["version"], head["width"], head["height"]) == (2, tour.WIDTH, tour.HEIGHT)
    times = [at for at, kind, text in events if kind == "o" and isinstance(text, str)]
    assert len(times) == len(events)
    assert times == sorted(times)
    assert 30 < times[-1] <= 120
    for words in tour.COMMANDS:
        if words.startswith("burst "):  # up to a pipe
            check_command(words.partition(" |")[0].split()[1:])
    text = tour.shown("".join(text for _, _, text in events))
    assert f"```text\n{text}\n```" in (DOCS / "tour.md").read_text()
    assert [words for words in tour.COMMANDS if f"$ {words}\n" not in f"{text}\n"] == []
    assert "recovery, no frame lost" in text
