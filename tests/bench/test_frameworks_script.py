"""bench/frameworks.py measures a framework in process and in a burst."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench/frameworks.py"


@pytest.mark.integration
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each side needs a CPU of its own")
@pytest.mark.parametrize("words", [(), ("first",)])
def test_a_framework_is_measured_both_ways(tmp_path, words):
    """JAX, whose results are compared; a framework that is not installed is named."""
    pytest.importorskip("jax", reason="needs the extra 'jax'")
    out = tmp_path / "out.json"
    command = [sys.executable, SCRIPT, *words, "--quick", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["subjects"]}
    assert all(rows[name]["us"] > 0 for name in ("jax, in process", "jax, in a burst"))
    assert rows["jax, in a burst"]["beside"]["median"] > 0
    assert "jax, beside in process" in done.stdout
    assert "us" in rows["torch, in a burst"] or "torch is not installed" in rows["torch, in a burst"]["error"]
