"""Drivers in C that are broken in one way: the kit finds each, and sanitizers find what no result shows."""

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from c_drivers import SOURCES, compiled

from driver.vts import SMOKE, Report, Target, catalogue, run

pytestmark = pytest.mark.integration
BROKEN = {
    "WRONG_RESULTS": {"operations": "value 5 is"},
    "WRONG_SHAPES": {
        "operations": "output 0 has dimensions [2, 4], the model says [2, 3]",
        "burst": "output 0 has dimensions",
        "memory": "output 0 has dimensions",
    },
    "GENEROUS": {"burst": "gets GENERAL_FAILURE, although its shape is known beforehand"},
    "MORTAL": {"operations": "the device died"},
    "LIAR": {
        "operations": "operation 0 is too much for this device",
        "burst": "operation 1 is too much for this device",
    },
    "RACY": {"burst": "at once: output 0 differs from that of the plain path"},
    "LATCHED": {"burst": "output 0 differs from that of the plain path"},
    "SCRIBBLER": {"memory": "the device wrote to 1 bytes outside of its outputs"},
    "SPOILER": {"memory": "the device wrote to 4 bytes outside of its outputs"},
    "UNFINISHED": {
        "operations": "execute returned 77, which is no burst_status",
        "burst": "execute returned 77",
        "memory": "execute returned 77",
    },
}
ALSO = {
    "SCRIBBLER": {"operations"},  # where the byte behind an output is another argument's
    "SPOILER": {"operations"},  # where the same inputs are used again
}
OFTEN = {"WRONG_RESULTS", "GENEROUS", "MORTAL", "SCRIBBLER"}
FEW = re.compile(
    r"operations/generated_(add|abs|relu)_|burst/(equals_plain/add|several|short)|memory/one_pool(_offset)?/add"
).match


@pytest.fixture
def broken(tmp_path):
    """The library of the toy driver that is broken in this way."""
    return lambda way, *flags: compiled(
        tmp_path / f"lib{way.lower()}.so", "broken.c", flags=(f"-I{SOURCES}", f"-DBROKEN={way}", *flags)
    )


@pytest.mark.parametrize(
    "way", [way if way in OFTEN else pytest.param(way, marks=pytest.mark.stress) for way in BROKEN]
)
def test_the_kit_finds_what_is_broken(broken, way, shared, monkeypatch):
    """A driver in C that is broken in one way fails in the categories for that, with words for it, and in no others."""
    shared.enter(monkeypatch)
    library = str(broken(way))
    found = Report(library, "")
    with Target(library, 20.0) as target:
        for outcome in run([test for test in catalogue(scope=SMOKE) if FEW(test.name)], target):
            found.add(outcome)
    failed = {category for category, counts in found.categories.items() if counts["failed"]}
    assert BROKEN[way].keys() <= failed <= BROKEN[way].keys() | ALSO.get(way, set())
    for category, words in BROKEN[way].items():
        assert any(words in o.message for o in found.of_kind("failed") if o.category == category)


@pytest.fixture
def vts(shared):
    """Runs `burst vts` on a few tests, as its user would; returns its exit status and what it printed."""
    return partial(_vts, shared.path)


def _vts(place, library, *options):
    command = [sys.executable, "-m", "driver.cli", "vts", library, "--filter", "operations/generated_add_*", *options]
    done = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "HOME": str(place), "BURST_RUNTIME_DIR": str(place)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


SANITIZED = ("-g", "-fsanitize=address,undefined")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf")
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("OVERFLOW", "heap-buffer-overflow"),
        pytest.param("UNDEFINED", "signed integer overflow", marks=pytest.mark.stress),
    ],
)
def test_sanitizers_find_what_no_result_shows(broken, vts, way, words):
    """A driver that computes rightly, and has a defect: the kit finds nothing, and with --sanitize it reports the
    defect, the function and the line.
    """
    assert vts(broken(way))[0] == 0
    status, said = vts(broken(way, *SANITIZED), "--sanitize")
    assert status == 1
    assert words in said
    assert re.search(r"broken\.c:\d+", said)


@pytest.mark.stress
@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf")
def test_sanitizers_find_nothing_in_the_toy(vts, tmp_path):
    """A sound driver passes with --sanitize."""
    status, said = vts(compiled(tmp_path / "libtoy.so", "toy.c", flags=SANITIZED), "--sanitize")
    assert status == 0, said


@pytest.mark.parametrize(
    ("flags", "device", "words"),
    [
        ((), None, "names no sanitizer's runtime; build it with -g -fsanitize=address,undefined"),
        ((), "reference", "--sanitize is for a driver in C"),
    ],
)
def test_what_cannot_be_sanitized_is_refused(vts, tmp_path, flags, device, words):
    """A library that was built without sanitizers, or a device that is no library, with the remedy."""
    status, said = vts(device or compiled(tmp_path / "libtoy.so", "toy.c", flags=flags), "--sanitize")
    assert status == 2
    assert words in " ".join(said.split())


def test_the_list_is_whole():
    """Each way of tests/devices/c/broken.c is tried here."""
    (words,) = re.findall(r"enum \{(.*?)\};", Path(SOURCES / "broken.c").read_text(), re.DOTALL)
    assert {word.strip() for word in words.split(",")} == {*BROKEN, "OVERFLOW", "UNDEFINED"}
