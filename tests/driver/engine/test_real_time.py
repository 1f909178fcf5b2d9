"""Bursts in real time: who may have them, which threads that makes so, and what ends one that runs away."""

import os
import re
import resource
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import accounts as other_accounts
import numpy as np
import pytest
from click.testing import CliRunner
from served_devices import folder, served

import driver
from burst import InvalidArgument, ResourceExhaustedPersistent, ResourceExhaustedTransient
from burst.real_time import LONGEST, PRIORITY, limits, why_not
from driver.cli.command import burst as command
from driver.engine import sandbox
from driver.engine.real_time import RealTime

X = np.ones((1, 4), np.float32)
ACCOUNT = 61005  # nobody's
LONG = np.zeros(1 << 18, np.float32)
FIFO = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK


@pytest.fixture
def limit():
    """limit(name, value): the soft one of this process, and of the devices that it starts; as before afterwards."""
    before = {}

    def change(name, value):
        number = getattr(resource, f"RLIMIT_{name}")
        before.setdefault(number, resource.getrlimit(number))
        try:
            resource.setrlimit(number, (value, max(value, before[number][1])))
        except (ValueError, OSError):
            pytest.skip(f"this account may not set RLIMIT_{name}")

    yield change
    for number, pair in before.items():
        resource.setrlimit(number, pair)


@pytest.fixture
def forbidden():
    """Where devices may not be real time, unless their owner has a privilege."""
    if limits()[1]:
        pytest.skip("this account has RLIMIT_RTPRIO")


@pytest.fixture
def address():
    """Of a device of this account whose owner has said that it is real time."""
    if why := why_not():
        pytest.skip(why)
    with folder() as path, served(path / "run", "--real-time"):
        yield str(path / "run/reference.sock")


@pytest.fixture
def limited(limit, place, new_interpreters):
    """A place where devices may be real time, because the programs that start them may."""
    limit("RTPRIO", 10)


def is_listener(pid, thread):
    return Path(f"/proc/{pid}/task/{thread}/comm").read_text().startswith("burst-listen")


def listeners(pid):
    """The scheduling class of each thread of a process that serves a burst."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(OSError):  # it has ended
            if is_listener(pid, thread):
                found.append(os.sched_getscheduler(int(thread)))
    return found


def locked_bytes(pid):
    return 1024 * int(re.search(r"VmLck:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])


def long_model():
    """Computes for much longer than a thread in real time may."""
    m = driver.ModelBuilder()
    y = m.input("float32", LONG.shape)
    for _ in range(1500):
        y = m.operation("POW", y, y)
    m.output(y)
    return m.build()


@pytest.mark.usefixtures("forbidden", "place", "new_interpreters")
def test_it_is_refused_with_the_limit_and_the_remedy():
    """Where the device has no RLIMIT_RTPRIO; without real time, the same program has an ordinary device."""
    with pytest.raises(InvalidArgument, match=r"RLIMIT_RTPRIO is 0; allow it by LimitRTPRIO="):
        driver.connect("reference", real_time=True)
    with driver.connect("reference") as device:
        assert resource.prlimit(device.engine_pid, resource.RLIMIT_MEMLOCK) == (0, 0)


@pytest.mark.usefixtures("limited")
def test_a_client_has_it_where_the_device_may(kit):
    """Its own bursts alone: those of another client of the device are ordinary."""
    with driver.connect("reference", real_time=True) as device, driver.connect("reference") as other:
        pid = device.engine_pid
        with device.prepare(kit.add_model()) as model, model.burst() as burst:
            assert np.array_equal(burst.run(X).outputs[0], 2 * X)
            assert listeners(pid) == [FIFO]
        kit.until(lambda: not listeners(pid))
        with other.prepare(kit.add_model()) as model, model.burst() as burst:
            burst.run(X)
            assert listeners(pid) == [os.SCHED_OTHER]


def test_the_threads_that_serve_bursts_are_real_time(address, kit):
    """And no other thread of the device; with a client that asks, the burst's memory is locked on both sides."""
    with driver.connect(address, real_time=True) as device, device.prepare(kit.add_model()) as model:
        pid, before = device.engine_pid, locked_bytes(os.getpid())
        with model.burst() as burst:
            assert np.array_equal(burst.run(X).outputs[0], 2 * X)
            assert listeners(pid) == [FIFO]
            assert locked_bytes(pid) > 0
            assert locked_bytes(os.getpid()) > before
        kit.until(lambda: not listeners(pid))
        policies = [os.sched_getscheduler(int(task)) for task in os.listdir(f"/proc/{pid}/task")]
        assert FIFO not in policies


def test_the_limits_of_an_engine_in_real_time(address):
    """RLIMIT_RTTIME bounds a thread from the beginning; of capabilities it keeps the one that is for its threads."""
    with driver.connect(address) as device:
        assert resource.prlimit(device.engine_pid, resource.RLIMIT_RTTIME) == (LONGEST * 1e6, 1e6)
        status = Path(f"/proc/{device.engine_pid}/status").read_text()
        kept = int(re.search(r"CapPrm:\s+(\w+)", status)[1], 16)
        assert not kept & ~(sandbox.OF_CELLS | sandbox.SYS_NICE)


def as_an_account(*words):
    """What a program of an account without privileges prints; it has this process's limits."""
    if why := other_accounts.missing():
        pytest.skip(why)
    command = other_accounts.words_as(ACCOUNT, (), [sys.executable, *map(str, words)])
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    return done.stdout + done.stderr


def test_what_cannot_be_locked_is_refused(limit, kit):
    """With the limit and the remedy; smaller requests go on."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        path = stack.enter_context(folder())
        limit("MEMLOCK", 1 << 20)
        stack.enter_context(served(path / "run", "--real-time"))
        device = stack.enter_context(driver.connect(str(path / "run/reference.sock")))
        large, small = (stack.enter_context(device.prepare(model)) for model in (long_model(), kit.add_model()))
        with large.burst() as burst, pytest.raises(ResourceExhaustedPersistent, match="RLIMIT_MEMLOCK is 1048576 byt"):
            burst.run(LONG)
        with small.burst() as burst:
            assert np.array_equal(burst.run(X).outputs[0], 2 * X)


@pytest.mark.usefixtures("forbidden")
def test_serving_in_real_time_is_refused_with_the_limit(tmp_path):
    """And the remedy, before there is a socket."""
    said = as_an_account("-m", "driver.cli", "serve", "reference", "--real-time", "--dir", tmp_path / "run")
    assert re.search(r"--real-time: .* RLIMIT_RTPRIO is 0; allow it by LimitRTPRIO=", " ".join(said.split()))


def run_away(burst):
    """Some requests: beside other work one of them may wait for a lock, which is a pause."""
    for _ in range(20):
        burst.run(LONG)


def test_a_runaway_is_an_ordinary_thread_from_then_on(address, kit):
    """Its request says so; the burst goes on without real time, and the device lives, also after the next one."""
    with driver.connect(address) as device, device.prepare(long_model()) as model:
        for _ in range(2):
            with model.burst() as burst:
                with pytest.raises(ResourceExhaustedTransient, match="RLIMIT_RTTIME"):
                    run_away(burst)
                assert listeners(device.engine_pid) == [os.SCHED_OTHER]
                assert burst.run(LONG).outputs[0].all()
            kit.until(lambda: not listeners(device.engine_pid))


def test_a_client_that_never_pauses_is_no_runaway(address, kit):
    """Requests back to back for longer than a thread may run at once."""
    with ExitStack() as stack:
        device = stack.enter_context(driver.connect(address))
        burst = stack.enter_context(stack.enter_context(device.prepare(kit.add_model())).burst(spin=0.01))
        burst.run(X)
        (thread,) = (t for t in os.listdir(f"/proc/{device.engine_pid}/task") if is_listener(device.engine_pid, t))
        spent = Path(f"/proc/{device.engine_pid}/task/{thread}/schedstat")
        begin = int(spent.read_text().split()[0])
        while int(spent.read_text().split()[0]) - begin < 3 * LONGEST * 1e9:
            for _ in range(100):
                burst.run(X)
        assert listeners(device.engine_pid) == [FIFO]


def test_a_client_of_a_device_of_several_accounts_may_not_ask():
    """Whatever the device may: its owner says so for all."""
    with pytest.raises(InvalidArgument, match="burst serve --real-time"):
        RealTime(may_be_asked=False).check_asked()


def test_a_device_of_a_group_is_real_time_for_all_of_it(kit):
    """Each account has an engine, and none of them asks for it."""
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        path = stack.enter_context(folder())
        stack.enter_context(served(path / "run", "--real-time", "--group", "0"))
        device = stack.enter_context(driver.connect(str(path / "run/reference.sock")))
        burst = stack.enter_context(stack.enter_context(device.prepare(kit.add_model())).burst())
        burst.run(X)
        assert listeners(device.engine_pid) == [FIFO]


def test_a_client_of_a_device_of_a_group_is_refused():
    """One that is served without --real-time, also where its limits would allow it."""
    with (
        folder() as path,
        served(path / "run", "--group", "0"),
        pytest.raises(InvalidArgument, match="its owner says for all of them"),
    ):
        driver.connect(str(path / "run/reference.sock"), real_time=True)


def test_the_unit_of_a_device_in_real_time():
    """It may be scheduled so, lock memory, and asks for it; the usual unit may not."""
    lines = CliRunner().invoke(command, ["serve", "--unit", "--real-time"]).output.splitlines()
    assert {f"LimitRTPRIO={PRIORITY}", "LimitMEMLOCK=256M", "RestrictRealtime=no"} <= {*lines}
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start.endswith(" serve %i --group burst --real-time $BURST_OPTIONS")
    assert "none of it is locked" not in "\n".join(lines)
    usual = CliRunner().invoke(command, ["serve", "--unit"]).output
    assert "RestrictRealtime=yes" in usual
    assert "RTPRIO" not in usual


def test_doctor_says_whether_devices_may():
    """With the limit, and where it is 0, the remedy."""
    hard = limits()[1]
    done = CliRunner().invoke(command, ["doctor"])
    if hard:
        assert f"real_time=True gives bursts SCHED_FIFO, priority {min(PRIORITY, hard)}" in done.output
    else:
        assert re.search(r"real time: .*RLIMIT_RTPRIO is 0; allow it by LimitRTPRIO=", done.output)
