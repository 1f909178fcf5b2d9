"""Tests talk to devices of their own, never to the user's."""

import os
import shutil
import signal
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def ctrl_c():
    """A shell that runs us in the background ignores SIGINT for us and for our children; tests of Ctrl-C need it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def runtime_dir():
    """A directory of its own for sockets, with a path short enough for one."""
    path = tempfile.mkdtemp(prefix="burst-test-")
    os.environ["BURST_RUNTIME_DIR"] = path
    yield path
    shutil.rmtree(path, ignore_errors=True)
