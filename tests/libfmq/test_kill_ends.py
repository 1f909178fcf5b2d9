"""Programs in C at both ends of a queue, killed with SIGKILL at random moments."""

import random
import re
import subprocess
from pathlib import Path

import pytest
import stress
from libburst_by_ctypes import ROOT

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("kills", [600, pytest.param(stress.times(20_000), marks=pytest.mark.stress)])
def test_the_survivor_is_told_and_goes_on(prefix, tmp_path, tally, kills):
    """Half of them kill the writer, half the reader: the other end is told within 100 ms, and goes on with the next
    program, which begins where the last one ended; no element is lost, torn or read twice."""
    source, program = Path(__file__).with_name("kill_ends.c"), tmp_path / "kill_ends"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{prefix}/include"]
    subprocess.run(["cc", *flags, source, prefix / "lib/libfmq.a", "-pthread", "-o", program], check=True, cwd=ROOT)
    seed = str(random.randrange(2**32))
    print("seed", seed)
    command = [program, str(kills), seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500 + kills / 5, check=False)
    assert done.returncode == 0, done.stderr
    said, elements = map(int, re.match(r"(\d+) kills, (\d+) elements", done.stdout).groups())
    assert said == kills
    assert elements > kills
    print(done.stdout)
    tally("kills of a queue's end in C", kills)
