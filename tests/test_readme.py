"""The README's code runs."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
EXPECTED = [["[[0., 2., 4., 6.]]", "[[2. 3. 4. 5.]] NONE"], ["[1 2 3]"]]


@pytest.mark.parametrize(("block", "expected"), list(zip(BLOCKS, EXPECTED, strict=True)), ids=["burst", "queue"])
def test_a_block_of_the_readme_runs_as_a_program(block, expected, tmp_path):
    """Each Python block is a whole program that prints what it promises and warns of nothing."""
    program = tmp_path / "block.py"
    program.write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in expected:
        assert line in done.stdout
