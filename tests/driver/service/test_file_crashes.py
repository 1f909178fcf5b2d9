"""Model files that end the engine later, in some run: their clients get an error, and all others recover."""

import asyncio
import os

import numpy as np
import pytest
from inside import controller_of
from worded_files import FILER, ONE, X, file_model

import driver
from burst import GeneralFailure, MissedDeadlineTransient, PeerDied, Timeout
from driver.options import Cache


@pytest.fixture
def neighbour(home, kit):
    """The burst of another client, with a model of its own."""
    with (
        kit.living(FILER) as device,
        device.prepare(file_model("a neighbour")) as prepared,
        prepared.burst(recover=True) as burst,
    ):
        yield burst


@pytest.fixture
def filer(home, kit):
    with kit.living(FILER) as device:
        yield device


@pytest.mark.parametrize("way", ["burst", "run", "run_async"])
def test_a_run_that_ends_the_engine(filer, neighbour, process, way):
    """The file is quarantined at once, its client is told, and the neighbour's answers go on, right."""
    engine = process(filer.engine_pid)
    prepared = filer.prepare(file_model(f"one:abort by {way}"))
    assert (neighbour.run(X).outputs[0] == 1).all()
    if way == "burst":
        with prepared.burst(recover=True) as burst:
            assert (burst.run(X).outputs[0] == 1).all()
            with pytest.raises(GeneralFailure, match=r"quarantined on this device: a run of it ended .* SIGABRT"):
                burst.run(ONE)
    else:
        with pytest.raises(PeerDied):
            prepared.run(ONE) if way == "run" else asyncio.run(prepared.run_async(ONE))
    assert engine.has_ended()
    for n in range(5):
        assert (neighbour.run(np.full(4, n, np.float32)).outputs[0] == n + 1).all()
    with driver.connect(FILER) as device, pytest.raises(GeneralFailure, match="SIGABRT"):
        device.prepare(file_model(f"one:abort by {way}"))


@pytest.mark.integration
def test_a_run_that_cannot_be_stopped(filer, neighbour, process):
    """After the deadline the engine is ended, and a neighbour whose request waits gets its answer from the
    next one. That happens twice; the third time the file is quarantined.
    """
    for times in range(3):
        engine = process(neighbour_pid(neighbour))
        with driver.connect(FILER) as device, device.prepare(file_model("one:sleep")) as prepared:
            with pytest.raises((MissedDeadlineTransient, Timeout)):
                prepared.run(ONE, timeout=0.2)
            assert engine.has_ended()
            assert (neighbour.run(X).outputs[0] == 1).all(), times
    with driver.connect(FILER) as device, pytest.raises(GeneralFailure, match="ran on after its deadline"):
        device.prepare(file_model("one:sleep"))


def neighbour_pid(burst):
    return int(controller_of(burst).trace.page.device.pid)


def test_a_cancelled_run_that_cannot_be_stopped(kit, filer, neighbour, process):
    """So it is when the client is gone, or has closed its burst."""
    engine = process(filer.engine_pid)
    with driver.connect(FILER) as device, device.prepare(file_model("one:sleep for good")) as prepared:
        burst = prepared.burst()
        burst.run(X)
        burst.submit(ONE)
        kit.until(lambda: controller_of(burst).trace.page.device.running == 2)
        burst.close()
    assert engine.has_ended()
    assert (neighbour.run(X).outputs[0] == 1).all()


def test_a_file_that_comes_from_the_cache(kit, filer, process):
    """A file that has ended the engine does not come back from cache files, where it was kept while it was good."""
    model, engine = file_model("one:abort from the cache"), process(filer.engine_pid)
    files = [os.memfd_create("cache") for _ in range(2)]
    cache = Cache(bytes(32), (), tuple(files))
    with filer.prepare(model, cache=cache):
        pass
    with filer.prepare_from_cache(model, cache) as prepared, pytest.raises(PeerDied):
        prepared.run(ONE)
    assert engine.has_ended()
    with kit.living(FILER) as device, pytest.raises(GeneralFailure, match="SIGABRT"):
        device.prepare_from_cache(model, cache)
    for fd in files:
        os.close(fd)
