"""A test that hangs ends the run, and is named."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HANGS = """
import os
import signal

def test_that_hangs():
    os.fork()  # this process, too, keeps the worker's pipe
    signal.pause()
"""


@pytest.mark.integration
def test_a_test_that_hangs_is_ended_with_its_children(tmp_path):
    """The run fails and names the test, although a process that the test has forked hangs as well."""
    tmp_path.joinpath("test_it.py").write_text(HANGS)
    tmp_path.joinpath("conftest.py").write_text(
        "import hung_tests\n\ndef pytest_sessionstart(session):\n    hung_tests.watch(session.config)\n"
    )
    options = {"faulthandler_timeout": 5, "faulthandler_exit_on_timeout": "false", "pythonpath": Path(__file__).parent}
    run = [sys.executable, *shlex.split("-m pytest -n 2 --dist loadfile --max-worker-restart 0 --rootdir . .")]
    run += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_it.py::test_that_hangs'" in done.stdout
    assert "test_it.py::test_that_hangs took longer than 5 s; its worker is killed" in done.stderr
    assert 'test_it.py", line 7 in test_that_hangs' in done.stderr  # where it hangs
