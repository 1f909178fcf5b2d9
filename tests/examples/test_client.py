"""The C client as a reader of docs/protocol.md builds and runs it: on a device that lives, dies, or is not there."""

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import driver

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "examples/client.c").read_text()
LONG = 20.0  # seconds after which what never comes is an error
MANY = 1_000_000  # requests: more than are answered before the device dies


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The program, built by the line in its own head."""
    (line,) = re.findall(r"^ \*\s+(cc .*) -o client$", SOURCE, re.MULTILINE)
    program = tmp_path_factory.mktemp("client") / "client"
    subprocess.run(f"{line} -o {shlex.quote(str(program))}", shell=True, cwd=ROOT, check=True, timeout=120)
    return program


@pytest.fixture
def place(monkeypatch):
    """A runtime directory of our own."""
    with tempfile.TemporaryDirectory(prefix="burst-c-", dir="/tmp") as path:
        monkeypatch.setenv("BURST_RUNTIME_DIR", path)
        yield path


class Process:
    """One that is not our child, held so that its number cannot come to mean another."""

    def __init__(self, pid):
        self.pid, self.fd = pid, os.pidfd_open(pid)

    def signal(self, number):
        """And for SIGSTOP, waits until it has stopped."""
        signal.pidfd_send_signal(self.fd, number)
        if number == signal.SIGSTOP:
            until(lambda: state(self.pid) == "T")

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
            assert has_ended(self.fd)
        os.close(self.fd)


def has_ended(pidfd):
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(LONG * 1e3))


def until(condition):
    """Looks until `condition` holds, without sleeping."""
    end = time.monotonic() + LONG
    while not (found := condition()):
        assert time.monotonic() < end, f"it never came true: {condition}"
        os.sched_yield()
    return found


def state(pid, thread=None):
    """A thread's state, R, S or T, as the kernel tells it."""
    return Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def device(place):
    """Its two processes, of a device in `place`: service and engine. Killed after the test."""
    with driver.connect("reference") as connection:
        processes = {"service": Process(connection.service_pid), "engine": Process(connection.engine_pid)}
        yield processes
        for process in processes.values():
            process.end()


@pytest.fixture
def start(client):
    """Runs the client; killed after the test, if it still runs."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen([client, *map(str, arguments)], text=True, **pipe))
            stack.callback(process.kill)
            return process

        yield start


def run(client, *arguments):
    """Its output, once it has ended well and without complaints."""
    done = subprocess.run([client, *map(str, arguments)], capture_output=True, text=True, timeout=LONG * 3, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("version", [1, 2])
def test_the_client_adds(client, device, version):
    """In both wire versions: the first sum and the last, as they should be, and the time that a request takes."""
    said = run(client, 1200, version)
    assert "1: 11 22 33 44\n1200: 1210 1221 1232 1243\n" in said
    assert re.search(rf"^1200 requests in wire version {version}, median \d+\.\d\d us$", said, re.MULTILINE)


def test_the_newest_version_is_taken(client, device):
    """A client that offers both gets 2."""
    assert "in wire version 2" in run(client, 1)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_clients_leave_nothing_behind(client, start, device, is_killed):
    """After ten that ended or were killed, the engine holds no more descriptors, threads and mappings, but for the
    threads that serve all clients: these begin when one first needs them.
    """
    engine = Path(f"/proc/{device['engine'].pid}")

    def held():
        maps = (engine / "maps").read_text().count("memfd:client")
        return len(os.listdir(engine / "fd")), len(os.listdir(engine / "task")), maps

    def is_no_more():
        return all(now <= then for now, then in zip(held(), most, strict=True))

    run(client, 10)
    fds, tasks, maps = held()  # with what the first has not let go of yet, perhaps: less than ten would leave
    most = fds, tasks + 3, maps
    for _ in range(10):
        if is_killed:
            victim = start(MANY)
            assert victim.stdout.readline() == "1: 11 22 33 44\n"
            victim.kill()
            victim.wait()
        else:
            run(client, 10)
    until(is_no_more)


def test_a_device_that_the_page_starts_is_found(client, place):
    """The line from the page, which is also what the client says when nobody is there."""
    page = (ROOT / "docs/protocol.md").read_text()
    (code,) = re.findall(r'^ {4}python -c "(.*)"$', page, re.MULTILINE)
    missing = subprocess.run([client], capture_output=True, text=True, timeout=LONG, check=False)
    assert missing.returncode == 1
    assert missing.stdout == ""
    assert missing.stderr == (
        f'client: no device at {place}/reference.sock (No such file or directory); start it: python -c "{code}"\n'
    )
    starter = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: Path(place, "reference.sock").exists())
        assert "1: 11 22 33 44" in run(client, 1)
        with driver.connect("reference") as connection:
            processes = [Process(connection.service_pid), Process(connection.engine_pid)]
    finally:
        starter.kill()
        starter.wait()
    for process in processes:
        process.end()


def test_a_socket_without_a_device_is_told(client, device, place):
    """What a killed device leaves behind is no device."""
    for process in device.values():
        process.signal(signal.SIGKILL)
        assert has_ended(process.fd)
    done = subprocess.run([client], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 1
    assert f"no device at {place}/reference.sock (Connection refused); start it:" in done.stderr


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("victim", ["engine", "service"])
def test_a_death_ends_the_wait_for_a_result(start, device, victim, version):
    """Stopped, so that a result is awaited, and killed: within 100 ms the client has ended and says what happened."""
    waiting = start(MANY, version)
    assert waiting.stdout.readline() == "1: 11 22 33 44\n"
    device["engine"].signal(signal.SIGSTOP)
    until(lambda: state(waiting.pid) == "S")
    killed = time.monotonic()
    device[victim].signal(signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it is the victim
        device["engine"].signal(signal.SIGCONT)  # to notice that its service is gone
    assert waiting.wait(LONG) == 1
    assert time.monotonic() - killed < 0.1
    assert waiting.stderr.read() == "client: the device died with a request in flight\n"


def test_a_death_ends_the_wait_for_an_answer(start, device):
    """The service stopped before `hello` and then killed: within 100 ms the client has ended and says what happened."""
    device["service"].signal(signal.SIGSTOP)
    waiting = start()
    until(lambda: is_at_a_socket(waiting.pid))
    killed = time.monotonic()
    device["service"].signal(signal.SIGKILL)
    assert waiting.wait(LONG) == 1
    assert time.monotonic() - killed < 0.1
    assert waiting.stderr.read() == "client: the device died, or ended, with a call to answer\n"


def is_at_a_socket(pid):
    """Whether it sleeps in a program of its own (and not on its way there) and holds a socket."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return state(pid) == "S" and any(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("arguments", [["0"], ["-1"], ["1000001"], ["1", "3"], ["1", "0"]])
def test_impossible_arguments_are_refused(client, place, arguments):
    """With the usage, before anything is connected."""
    done = subprocess.run([client, *arguments], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("client: client [requests, 1 to 1000000 ")
