"""What CONTRIBUTING.md and CHANGELOG.md promise to a contributor: commands that work, places that exist, one form."""

import re
import shlex
import subprocess
import tomllib
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE, CHANGES = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "CHANGELOG.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
ROW = re.compile(r"^\| .* \| `(\w+)` in `([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)


@pytest.mark.integration
@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith("make")])
def test_a_command_of_the_page_works(line):
    """Each that takes seconds ends with 0, as it stands there."""
    program = shlex.split(line)
    if not (ROOT / program[0]).exists():
        pytest.skip(f"{program[0]} is not here: `make .venv/check` installs it")
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make")])
def test_a_target_of_the_page_exists(line):
    """`make` knows what to do for it; that it succeeds is what the target itself tests."""
    done = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_help_has_each_target():
    """With what it does; `fuzzers` is a part of others."""
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(targets.split()) - {"fuzzers"}


def test_each_first_extension_is_a_line_in_a_table():
    """The file has that table, and the file for its test is there."""
    rows = ROW.findall(PAGE)
    assert len(rows) >= 5
    for table, source, test in rows:
        assert re.search(rf"^{table}\b[^=\n]* = ", (ROOT / source).read_text(), re.MULTILINE), (table, source)
        assert (ROOT / test).is_file(), test


def test_the_changelog_has_the_form_of_keep_a_changelog():
    """Unreleased first, then releases from new to old with their day; the known sections, in their order."""
    first, *releases = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\S+)", release).groups() for release in releases]
    versions = [tuple(map(int, numbers)) for *numbers, _ in found]
    assert versions == sorted(versions, reverse=True)
    assert all(date.fromisoformat(day) for *_, day in found)
    for release in re.split(r"^## ", CHANGES, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert kinds == sorted(set(kinds), key=KINDS.index)
    assert tuple(map(int, VERSION.split("."))) == versions[0]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("fmq/version.py", '__version__ = "{}"\n'),
        ("csrc/libburst/Makefile", "VERSION := {}\n"),
        ("csrc/libfmq/Makefile", "VERSION := {}\n"),
        ("csrc/debian/changelog", "burst ({}) "),
        ("packaging/debian/changelog", "burst-engine ({}) "),
        ("packaging/conda/recipe.yaml", 'version: "{}"\n'),
        ("packaging/home-assistant/wake_words/config.yaml", 'version: "{}"\n'),
        ("CITATION.cff", "version: {}\n"),
        ("examples/kserve/Containerfile", "registry.example/burst:{} "),
        ("examples/kserve/runtime.yaml", "registry.example/burst:{}\n"),
        ("docs/howto/scale.md", "registry.example/burst:{} "),
    ],
)
def test_a_place_has_the_version(place, text):
    """That of pyproject.toml, in each file that says the release."""
    assert text.format(VERSION) in (ROOT / place).read_text()


def test_no_change_is_told_twice():
    """A line of the changelog stands once in its release."""
    for release in re.split(r"^## ", CHANGES, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"^\* .*(?:\n  .*)*", release, re.MULTILINE)
        assert len(lines) == len(set(lines))
