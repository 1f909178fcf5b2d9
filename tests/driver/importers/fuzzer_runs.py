"""Runs of a fuzzer of a file format in a process of its own."""

import re
import subprocess
import sys


def finds_nothing(program, folder, inputs, seed, patience):
    """(mutants, accepted) of one run."""
    command = [sys.executable, "-W", "error", program, "--inputs", str(inputs), "--seed", str(seed), "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    count, accepted = map(int, re.match(r"(\d+) mutants, (\d+) accepted", done.stdout).groups())
    return count, accepted
