"""burst_try_submit and burst_poll: what they say, and what they do not call."""

import errno
import signal
import subprocess
from ctypes import byref, c_uint64
from pathlib import Path

import pytest
from libburst_by_ctypes import FOREVER, Outcome, why
from waiting import until

pytestmark = pytest.mark.integration
ROUNDS, TRIES = 300, 20


def sent(burst, request=None):
    number = c_uint64()
    wanted = request or burst.request
    return burst.library.burst_try_submit(burst.controller, wanted, c_uint64(FOREVER), byref(number)), number.value


def polled(burst):
    """The number of the next result, or why there is none."""
    outcome = Outcome()
    return burst.library.burst_poll(burst.controller, byref(outcome)) or outcome.number


def arrived(burst):
    """The next result's number, looked for until it is there."""
    found = []
    until(lambda: found.append(polled(burst)) or found[-1] != -errno.EAGAIN)
    return found[-1]


@pytest.fixture(scope="session")
def counted(installed, tmp_path_factory):
    """counted(way): allocations, locks, system calls, and wakes of the device, in ROUNDS requests that are sent so."""
    program = tmp_path_factory.mktemp("immediate") / "immediate"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-rdynamic", f"-I{installed}/include"]
    source, library = Path(__file__).with_name("immediate.c"), [f"-L{installed}/lib", f"-Wl,-rpath,{installed}/lib"]
    subprocess.run(["cc", *flags, source, *library, "-lburst", "-pthread", "-o", program], check=True, timeout=500)

    def count(way):
        command = [program, way, str(ROUNDS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return [int(word) for word in done.stdout.split()]

    return count


@pytest.mark.usefixtures("device")
def test_nothing_is_called_while_the_device_is_awake(counted):
    """No allocation, no lock and no system call in 300 requests and results. A device that has to share a processor
    with its client sleeps before each of them, and then is woken, by nothing else.
    """
    found = []
    while not found or (found[-1] and len(found) < TRIES):
        *calls, wakes = counted("now")
        assert calls == [0, 0, 0]
        found.append(wakes)
    assert found[-1] == 0


@pytest.mark.usefixtures("device")
def test_the_counts_see_a_lock(counted):
    """burst_submit takes some for each request."""
    _, locks, _, _ = counted("submit")
    assert locks >= ROUNDS


def test_what_cannot_be_now_is_said(adders, device):
    """No room, no result, none in flight; the results come in order, without those that were cancelled."""
    burst = adders(depth=3)
    assert burst.adds()
    assert polled(burst) == -errno.ENOMSG
    requests = [burst.new_request(burst.new_pool()[0]) for _ in range(4)]
    device["engine"].signal(signal.SIGSTOP)
    numbers = [sent(burst, request)[1] for request in requests[:3]]
    assert numbers == [2, 3, 4]
    assert sent(burst, requests[0])[0] == -errno.EBUSY
    assert sent(burst, requests[3])[0] == -errno.EAGAIN
    assert polled(burst) == -errno.EAGAIN
    assert burst.library.burst_cancel(burst.controller, c_uint64(3)) == 0
    device["engine"].signal(signal.SIGCONT)
    assert [arrived(burst), arrived(burst), polled(burst)] == [2, 4, -errno.ENOMSG]
    assert burst.adds()


@pytest.mark.parametrize("recover", [0, 1])
def test_a_death_is_told(adders, device, recover, library):
    """And nothing is started; with `recover`, by a call that waits."""
    burst = adders(recover=recover)
    assert burst.adds()
    device["engine"].signal(signal.SIGSTOP)
    assert sent(burst) == (0, 2)
    device["engine"].signal(signal.SIGKILL)
    assert arrived(burst) == -errno.EPIPE
    assert "died" in why(library)
    if recover:
        result, outcome = burst.wait()
        assert (result, outcome.number) == (0, 2)
        assert sent(burst)[0] == 0
        assert arrived(burst) == 3
    else:
        assert sent(burst)[0] == polled(burst) == -errno.EPIPE
    assert burst.count()["revivals"] == recover
