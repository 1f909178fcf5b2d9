"""Compiles the C test programs: `build(program, *sources, flags=, sources=, …)` returns a function that runs one."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


@pytest.fixture
def csrc():
    """Where the sources of the core are."""
    return CSRC


@pytest.fixture
def build(tmp_path):
    """Compiles with warnings as errors; the program's exit status and output are checked by whoever runs it."""

    def make(program, *files, flags=(), sources=None, optimise="-O1", compiler="cc", runner=()):
        replaced = sources or {}
        for file, text in replaced.items():
            (tmp_path / file).write_text(text)
        paths = [(tmp_path if file in replaced else CSRC) / file for file in files]
        binary = tmp_path / "program"
        assert shutil.which(compiler), f"no C compiler '{compiler}'; install one (Debian: apt install gcc libc6-dev)"
        command = [compiler, "-std=gnu11", optimise, "-g", "-Wall", "-Wextra", f"-I{CSRC}", f"-I{HERE}", *flags]
        command += [*paths, HERE / program, "-o", binary, "-pthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert replaced or not done.stderr, done.stderr
        return lambda *arguments, **how: run(*runner, binary, *arguments, **how)

    return make


def run(*command, timeout=60, fails=False):
    """Its output, stderr included; the program must succeed, or fail when that is what is claimed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    out = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, f"exit status {done.returncode}\n{out[-8000:]}"
    return out
