"""Folders and blob stores of the test's own, and tests that can import what lies beside them."""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from driver.engine.cache.blobs import BlobStore
from driver.runtime.cache.folder import Folder

sys.path.insert(0, str(Path(__file__).parent))  # for marked_sets


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "compiled", 10**9)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "blobs.db"


@pytest.fixture
def opened(path):
    """Opens stores on the file, which save when they are told to; closed after the test."""
    with contextlib.ExitStack() as stack:

        def opened(at=path, **options):
            store = BlobStore(at, **{"build_id": "one", "delay": float("inf"), **options})
            stack.callback(store.close)
            return store

        yield opened


@pytest.fixture
def quick():
    """A folder in memory: where thousands of files are written, nothing waits for a disk."""
    memory = Path("/dev/shm")
    for left in memory.glob("burst-test-*-*"):  # by a run of the tests that was killed
        if not Path("/proc", left.name.split("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    prefix = f"burst-test-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
