"""A GPU that is none: one fake library for these tests, with a context in this process."""

from pathlib import Path

import pytest
from fake_cuda import FakeCuda, Word

from driver.devices.cuda.context import CudaContext
from driver.devices.cuda.driver_api import CudaLibrary


@pytest.fixture(scope="session")
def library_of_fake(tmp_path_factory):
    """The library, loaded once: its streams' threads stay."""
    fake = FakeCuda(tmp_path_factory.mktemp("cuda"))
    return fake, CudaLibrary(str(fake.path))


@pytest.fixture
def fake(library_of_fake):
    """The fake, without faults before and after the test."""
    found = library_of_fake[0]
    for word in (
        Word.FAIL_CALL,
        Word.HOLD_IN,
        Word.HOLD_KERNELS,
        Word.HOLD_OUT,
        Word.LOST,
        Word.NO_READ_ONLY,
    ):
        found[word] = 0
    yield found
    for word in (Word.HOLD_IN, Word.HOLD_KERNELS, Word.HOLD_OUT, Word.LOST):
        found[word] = 0


@pytest.fixture
def context(fake, library_of_fake):
    """A context of the fake's GPU."""
    return CudaContext(library_of_fake[1], 0)


@pytest.fixture
def gpu(place):
    """The library that the engines of this test load, and the counters of their GPU."""
    found = FakeCuda(Path(place.path))
    found.configure()
    return found
