"""Handles that threads use, close and free at the same time, and the example, under sanitizers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import stress
from libburst_by_ctypes import ROOT
from libburst_sources import libburst_sources

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent
CSRC = ROOT / "csrc"
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


@pytest.fixture(params=sorted(SANITIZERS))
def build(request, tmp_path):
    """Compiles a program with all of the library in it, under one of the sanitizers; returns what runs it."""

    def make(program):
        flags = ["-std=gnu11", "-O1", "-g", "-w", f"-I{CSRC}", f"-I{CSRC}/libburst", *SANITIZERS[request.param]]
        command = ["cc", *flags, program, *libburst_sources(), "-o", tmp_path / "program", "-pthread"]
        subprocess.run(command, check=True, timeout=500)
        return lambda *arguments: run(tmp_path / "program", *arguments)

    return make


def run(*command):
    """Its output; what a sanitizer finds is a failure."""
    strict = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=3600, env=strict, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.parametrize("rounds", [10, pytest.param(stress.times(3_000), marks=pytest.mark.stress)])
def test_handles_are_used_and_closed_at_once(build, device, rounds):
    """Four threads on one burst: every result is one that burst.h has, and no memory is used after it was freed."""
    said = run_until_mixed(build(HERE / "handle_race.c"), rounds)
    assert re.fullmatch(rf"{rounds} rounds, \d+ calls succeeded, \d+ were refused\n", said)


def run_until_mixed(program, rounds):
    said = program(rounds, 1)
    assert all(int(number) > rounds for number in re.findall(r"(\d+) (?:calls|were)", said))
    return said


def test_the_example_is_clean(build, device):
    """Two thousand requests, from the beginning to the end of the connection: nothing leaks."""
    assert "2000 requests, median" in build(ROOT / "examples/client.c")(2000)
