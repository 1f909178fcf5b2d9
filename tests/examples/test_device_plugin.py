"""The device that comes from outside: examples/device-plugin."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples/device-plugin"


@pytest.mark.integration
def test_the_plugin_passes_its_tests_from_its_folder(tmp_path):
    """In an environment that sees its folder beside ours: its own tests, `burst vts --smoke` among them."""
    venv.create(tmp_path / "empty")
    python = tmp_path / "empty/bin/python"
    paths = [path for path in sys.path if "site-packages" in path]
    seen = [str(PLUGIN), *(f"import site; site.addsitedir({path!r})" for path in paths)]
    (packages,) = (tmp_path / "empty/lib").glob("python3.*/site-packages")
    (packages / "plugin.pth").write_text("\n".join(seen) + "\n")  # device processes find modules there and nowhere else
    environment = {"PATH": "/usr/bin:/bin", "BURST_RUNTIME_DIR": str(tmp_path / "run")}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", PLUGIN, PLUGIN]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
