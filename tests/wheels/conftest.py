"""`make wheels`, run once for the tests of this folder."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def make_wheels():
    """Runs what `make wheels` runs, and returns the folder that it filled."""

    def make(out, *options, **environment):
        command = [sys.executable, ROOT / "csrc/wheels.py", "--out", out, *options]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return out

    return make


@pytest.fixture(scope="session")
def wheels(make_wheels, tmp_path_factory):
    """An sdist, a wheel for each processor, and their sums: those of another worker, if it was first."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (folder / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / "wheels/SHA256SUMS"  # is written last
        return built.parent if built.exists() else make_wheels(built.parent)
