"""The library as `make install` leaves it, and a device of the test's own."""

import contextlib

import libburst_by_ctypes
import pytest
from held_processes import HeldProcess
from libburst_by_ctypes import Adder

import driver


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Its prefix."""
    return libburst_by_ctypes.install(tmp_path_factory.mktemp("libburst"))


@pytest.fixture(scope="session")
def library(installed):
    """The shared library."""
    return libburst_by_ctypes.load(installed)


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """A runtime directory of our own; the library starts devices with this Python."""
    with libburst_by_ctypes.own_place(monkeypatch) as path:
        yield path


@pytest.fixture
def device(place):
    """Its two processes, of a device in `place`: service and engine. Killed after the test."""
    with contextlib.ExitStack() as stack:
        with driver.connect("reference") as connection:
            processes = {"service": connection.service_pid, "engine": connection.engine_pid}
            held = {name: HeldProcess(pid) for name, pid in processes.items()}
        stack.callback(lambda: [process.end() for process in held.values()])
        yield held


@pytest.fixture
def adders(library, device):
    """adders(**options): bursts that add."""
    made = []

    def make(**options):
        made.append(Adder(library, **options))
        return made[-1]

    yield make
    for adder in made:
        adder.library.burst_close(adder.controller)
        adder.library.burst_disconnect(adder.client)
