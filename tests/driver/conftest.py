"""Devices of real processes, models, and ways to wait for what processes do."""

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_devices import ForkServer
from small_models import (
    add_model,
    conv_model,
    long_model,
    mul_model,
    odd,
    open_model,
    optional_model,
    quantised_model,
    reshape_model,
)

import driver
from burst import Memory, Request, RequestArgument
from driver.client import device_stream, discovery
from driver.vts.target import answering

sys.path.append(str(Path(__file__).parents[1]))  # for programs of tests, which import this file by itself

from waiting import PATIENCE, until

if importlib.util.find_spec("burst_test_devices") is None:
    pytest.exit("the tests' devices are not installed: pip install --editable tests/devices", 2)


@pytest.fixture(scope="session")
def fork_server():
    """Starts the devices whose first client is this process; other processes start interpreters for theirs."""
    with contextlib.closing(ForkServer()) as server, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(discovery, "subprocess", server)
        yield


@pytest.fixture
def new_interpreters(fork_server, monkeypatch):
    """Devices start as they do for users, each with an interpreter of its own."""
    monkeypatch.setattr(discovery, "subprocess", subprocess)


@pytest.fixture
def made_in(monkeypatch):
    """made_in(module, name): the objects of a class that anything refers to, of those that are made from now on there.

    Only weakly: what asks the garbage collector for all objects holds the results of every stream meanwhile.
    """

    def those_of(module, name):
        kept, kind = weakref.WeakSet(), getattr(module, name)

        def made(*terms, **options):
            kept.add(found := kind(*terms, **options))
            return found

        monkeypatch.setattr(module, name, made)
        return kept

    return those_of


@pytest.fixture
def feeds(made_in):
    """The feeds of this process's streams."""
    return made_in(device_stream, "StreamFeed")


class Process:
    """Any process, held by its pidfd so that its number cannot come to mean another."""

    def __init__(self, pid):
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def kill(self, number=signal.SIGKILL):
        signal.pidfd_send_signal(self._fd, number)

    def has_ended(self, timeout=PATIENCE):
        """True as soon as it is gone, or a zombie that whoever adopted it has not looked at."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(timeout * 1e3))

    def close(self):
        os.close(self._fd)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Place:
    """A runtime directory: what runs for it, and what lies in it."""

    def __init__(self, path):
        self.path = Path(path)
        self._mark = f"BURST_RUNTIME_DIR={path}".encode()

    def enter(self, monkeypatch):
        """From now on this process has its devices here, and they remember here what they have written."""
        monkeypatch.setenv("BURST_RUNTIME_DIR", str(self.path))
        monkeypatch.setenv("HOME", f"{self.path}-home")

    def pids(self, launchers=False):
        """Of the device processes that were started for this directory and live; of their launchers too, if asked."""
        found = map(int, filter(str.isdigit, os.listdir("/proc")))
        return sorted(pid for pid in found if self._is_device(pid, launchers))

    def _is_device(self, pid, launchers):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return (
                self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                and b"-P" in words
                and (launchers or os.getsid(pid) != pid)  # a launcher leads its session, and ends at once
            )
        except OSError:
            return False  # ended meanwhile

    def held(self, launchers=False):
        """Processes of `pids`, to be closed by the caller."""
        found = []
        for pid in self.pids(launchers):
            with contextlib.suppress(ProcessLookupError):
                found.append(Process(pid))
        return found

    def files(self):
        return sorted(p.name for p in self.path.iterdir())

    def clear(self):
        """Ends what runs for this directory, until nothing does."""
        while processes := self.held(launchers=True):
            for process in processes:
                with process, contextlib.suppress(ProcessLookupError):
                    process.kill()
                    assert process.has_ended()


@contextlib.contextmanager
def new_place(monkeypatch):
    path = tempfile.mkdtemp(prefix="burst-t-", dir="/tmp")
    place = Place(path)
    place.enter(monkeypatch)
    try:
        yield place
    finally:
        place.clear()
        shutil.rmtree(path)
        shutil.rmtree(f"{path}-home", ignore_errors=True)


@pytest.fixture
def place(monkeypatch, fork_server):
    """A runtime directory for this test alone."""
    with new_place(monkeypatch) as found:
        yield found


@pytest.fixture
def process():
    """Process(pid), closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda pid: stack.enter_context(Process(pid))


@pytest.fixture(scope="session")
def shared(fork_server):
    """A runtime directory whose devices serve all tests that do them no harm."""
    with pytest.MonkeyPatch.context() as monkeypatch, new_place(monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def _home(fork_server):
    with pytest.MonkeyPatch.context() as monkeypatch, new_place(monkeypatch) as found:
        yield found


@pytest.fixture
def home(_home, monkeypatch):
    """A runtime directory for the tests of one file: a device that a test has left alive serves the next one."""
    _home.enter(monkeypatch)
    return _home


def living(name):
    """A connection to a device whose engine answers, so it is none that a test before has killed."""
    return answering(name, tries=100)


@pytest.fixture
def connect(shared, monkeypatch):
    """Connects to a shared device, by the name of its class for the odd ones; closed after the test."""
    shared.enter(monkeypatch)
    with contextlib.ExitStack() as stack:

        def connect(name="reference"):
            return stack.enter_context(driver.connect(name if name.islower() or ":" in name else odd(name)))

        yield connect


@pytest.fixture
def device(connect):
    """A connection to the shared reference device."""
    return connect()


@pytest.fixture
def slow(connect, kit):
    """x + 1 on the shared slow device: an execution takes as many seconds as the first element of its input says."""
    with connect("Slow").prepare(kit.add_model()) as prepared:
        yield prepared


@pytest.fixture
def fast(device, kit):
    """The same on the shared reference device, which takes no time."""
    with device.prepare(kit.add_model()) as prepared:
        yield prepared


def named_memory():
    """Names of shared memory in the system; our own have no name for longer than they are being made."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("fmq")}


def python(code, *arguments, dev=False, **options):
    """A Python process that runs `code`; `dev`: in development mode, with every warning."""
    mode = ["-X", "dev", "-W", "always"] if dev else []
    return subprocess.Popen([sys.executable, *mode, "-c", code, *map(str, arguments)], **options)


def dies(kill, wait, kind):
    """`wait()`, asleep in another thread, raises `kind` because of `kill()`. Seconds in between, for `make stress`."""
    ends = []

    def run():
        try:
            wait()
        except Exception as error:  # noqa: BLE001 (raised again where the test can see it)
            ends.append((time.monotonic(), error))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: ends or Path(f"/proc/self/task/{thread.native_id}/stat").read_text().split()[2] == "S")
    begin = time.monotonic()
    kill()
    thread.join(PATIENCE)
    ((end, error),) = ends
    if not isinstance(error, kind):
        raise error
    return end - begin


def request(inputs, nbytes):
    """A request with one pool for each input, and one for the output of `nbytes`; and the arrays in them."""
    pools = [Memory.create(a.nbytes) for a in inputs]
    arrays = [pool.asarray(a.dtype, a.shape) for pool, a in zip(pools, inputs, strict=True)]
    for place, array in zip(arrays, inputs, strict=True):
        place[...] = array
    pools.append(Memory.create(nbytes))
    arguments = [RequestArgument(pool=n, length=a.nbytes) for n, a in enumerate(inputs)]
    result = RequestArgument(pool=len(inputs), length=nbytes)
    return Request(tuple(arguments), (result,), tuple(pools)), arrays


@pytest.fixture(scope="session")
def kit():
    """What tests call."""
    return SimpleNamespace(
        add_model=add_model,
        conv_model=conv_model,
        dies=dies,
        living=living,
        long_model=long_model,
        mul_model=mul_model,
        named_memory=named_memory,
        odd=odd,
        open_model=open_model,
        optional_model=optional_model,
        patience=PATIENCE,
        python=python,
        quantised_model=quantised_model,
        request=request,
        reshape_model=reshape_model,
        until=until,
    )


@pytest.fixture
def two_cpus():
    """One for us and one for the other side; afterwards we may use all again that we might before."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU: nobody polls")
    yield sorted(before)[:2]
    os.sched_setaffinity(0, before)


@pytest.fixture
def heard():
    """What a device of `burst_test_devices.listening` has heard in this test, of some kinds, in order."""

    def path():
        return Path(os.environ["BURST_RUNTIME_DIR"], "heard")

    def heard(*kinds):
        lines = path().read_text().splitlines() if path().exists() else []
        return [line for line in map(json.loads, lines) if line["what"] in kinds]

    path().unlink(missing_ok=True)
    return heard
