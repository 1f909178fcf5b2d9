"""The conformance kit on devices for files of frameworks: extension/file/jax and extension/file/pt2."""

import json
import os
import subprocess
import sys

import pytest

from driver.devices.jax import JaxDevice
from driver.devices.torch import TorchDevice

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("kind", "device"), [("jax", JaxDevice), ("pt2", TorchDevice)])
def test_a_framework_passes_the_rows_of_its_files(shared, kind, device):
    """All types, open sizes, pools, clients at once, damaged files. A deadline is left out: no framework ends a run."""
    if lacks := device.missing():
        pytest.skip(f"{lacks}; needs the extra {device.name!r}")
    command = [sys.executable, "-m", "driver.cli", "vts", device.name, "--filter", f"extension/file/{kind}/*", "--json"]
    environment = {**os.environ, "BURST_RUNTIME_DIR": str(shared.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    found = json.loads(done.stdout)
    outcomes = {test["name"]: test["outcome"] for test in found["tests"]}
    assert len(outcomes) > 15
    others = {name: outcome for name, outcome in outcomes.items() if outcome != "passed"}
    assert others == {f"extension/file/{kind}/deadline": "skipped"}
