"""Both libraries as `make install` leaves them."""

import os

import libburst_by_ctypes
import pytest
from libfmq_by_ctypes import Library


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """Where they are installed."""
    return libburst_by_ctypes.install_libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="session")
def fmq_path(prefix):
    return str(prefix / "lib/libfmq.so")


@pytest.fixture(scope="session")
def c(fmq_path):
    return Library(fmq_path)


@pytest.fixture
def name(c):
    """A name for a queue, which is removed afterwards."""
    chosen = f"/fmq-c-{os.getpid()}".encode()
    yield chosen
    c.c.fmq_queue_unlink(chosen)
