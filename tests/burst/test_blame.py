"""A device that crashes: its bursts' traces tell which request did it."""

import ctypes
import os
import signal

import pytest

from burst import ErrorStatus, NotSent, PeerDied
from burst.trace import note_crashes
from burst.wire import VERSIONS


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


CRASHES = {
    "a null pointer": (lambda: ctypes.string_at(0), signal.SIGSEGV),
    "abort": (os.abort, signal.SIGABRT),
    "a signal that was sent": (lambda: signal.raise_signal(signal.SIGFPE), signal.SIGFPE),
}


@pytest.mark.integration
@pytest.mark.parametrize("how", CRASHES)
def test_who_crashed_the_device(service, burst, memory, increment, how):
    """The signal and the request stand in the trace of the burst that did it, and in no other."""
    crash, number = CRASHES[how]

    class Crashing(increment):
        def __init__(self, request):
            super().__init__(request)
            note_crashes()

        def run(self):
            if len(self.source) == 5:
                crash()
            super().run()

    _, configure = service(Crashing)
    guilty, innocent, pool = burst(configure), burst(configure), memory()
    for client in (guilty, innocent):
        for _ in range(3):
            assert client.run(pool).status is ErrorStatus.NONE
    with pytest.raises(PeerDied):
        guilty.run(pool, 5)
    with pytest.raises((PeerDied, NotSent)):
        innocent.run(pool)
    device = guilty.trace.page.device
    assert (device.signal, device.running, device.answered) == (number, 4, 3)
    assert innocent.trace.page.device.signal == 0


def test_truncated_memory_is_still_no_crash(service, burst, increment):
    """A device that notes its crashes survives memory that its client truncates, whichever it asked for first."""

    class Noting(increment):
        def __init__(self, request):
            super().__init__(request)
            note_crashes()  # after the guard, here

    client = burst(service(Noting)[1])
    fd = os.memfd_create("shrinks")
    os.ftruncate(fd, 8192)
    client.answer = lambda self, slots: self._callback.send([0, [["ashmem", 8192, False]]], [fd])
    pool = type("Somewhere", (), {"nbytes": 8192, "is_closed": True})()
    assert client.run(pool, timeout=20).status is ErrorStatus.NONE
    os.ftruncate(fd, 0)
    for _ in range(3):
        assert client.run(pool, timeout=20).status is ErrorStatus.NONE
    os.close(fd)
    assert client.trace.page.device.signal == 0
