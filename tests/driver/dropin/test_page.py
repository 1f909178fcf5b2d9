"""The program on docs/howto/onnxruntime.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[3] / "docs/howto/onnxruntime.md"


def test_the_program_on_the_page(home, net, tmp_path):
    """It makes a session of a file beside it, and prints nothing."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-W", "error", "-c", block]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
