"""`make wheels`, run once for the tests of this folder."""

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
            command, env=os.environ | environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return out

    return make


@pytest.fixture(scope="session")
def wheels(make_wheels, tmp_path_factory):
    """An sdist, a wheel for each processor, and their sums."""
    return make_wheels(tmp_path_factory.mktemp("wheels") / "dist")
