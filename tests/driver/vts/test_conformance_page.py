"""docs/conformance.md says what is so."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from driver.cli.vts import vts
from driver.vts import CATEGORIES
from driver.vts.report import KnownFailure

PAGE = Path(__file__).parents[3].joinpath("docs/conformance.md")


@pytest.fixture(scope="module")
def page():
    """Its text, if this is not an installed copy of the tests."""
    return PAGE.read_text()


def block(page, language):
    return page.split(f"```{language}\n")[1].split("```")[0]


def test_every_option_is_explained(page):
    """In its table, and no other one is."""
    explained = set(re.findall(r"`(--[a-z-]+)", page.split("| option | |")[1].split("\n\n")[0]))
    assert explained == {option for parameter in vts.params for option in parameter.opts if option.startswith("--")}


def test_every_category_is_explained(page):
    """In the order in which they run."""
    table = page.split("| category |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == CATEGORIES


def test_its_known_failures_are_well_formed(page):
    """The example is an entry."""
    (record,) = tomllib.loads(block(page, "toml"))["known"]
    assert KnownFailure(**record).concerns("mine", "2.1")


@pytest.mark.integration
def test_its_json_is_of_that_form(page, vts):
    """The same fields as the command prints."""
    real = json.loads(vts("reference", "--filter", "qos/timing/*", "--json").stdout)
    example = json.loads(block(page, "json"))
    assert example.keys() == real.keys()
    assert example["summary"].keys() == real["summary"].keys() == real["categories"]["qos"].keys()
    assert example["tests"][0].keys() == real["tests"][0].keys()


@pytest.mark.integration
def test_its_program_runs(page, shared, monkeypatch):
    """With the tests of bursts in the place of all."""
    shared.enter(monkeypatch)
    code = block(page, "python").replace("catalogue()", "__import__('driver.vts.burst').vts.burst.tests()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "'failed': 0" in done.stdout
