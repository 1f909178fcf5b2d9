"""The C client builds as its own head says, and runs: on a device that lives, dies, or is not there."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stress
from held_processes import HeldProcess, state
from waiting import PATIENCE, until

import driver

ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "examples/client.c").read_text()
MANY = 200_000  # requests: more than are answered before the device dies
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def client(built):
    """The program."""
    return built("client.c")


@pytest.fixture
def device(place):
    """Its two processes, of a device in `place`: service and engine. Killed after the test."""
    with driver.connect("reference") as connection:
        processes = {"service": HeldProcess(connection.service_pid), "engine": HeldProcess(connection.engine_pid)}
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
    done = subprocess.run([client, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_it_is_short():
    """A program that connects, prepares, and recovers has less than 80 lines."""
    assert len(SOURCE.splitlines()) < 80


def test_the_client_adds(client, device):
    """The first sum and the last, as they should be, and the time that a request takes."""
    said = run(client, 1200)
    assert "1: 11 22 33 44\n1200: 1210 1221 1232 1243\n" in said
    assert re.search(r"^1200 requests, median \d+\.\d\d us$", said, re.MULTILINE)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_clients_leave_nothing_behind(client, start, device, is_killed):
    """After ten that ended or were killed, the engine holds no more descriptors, threads and mappings, but for the
    threads that serve all clients: these begin when one first needs them.
    """
    engine = Path(f"/proc/{device['engine'].pid}")

    def held():
        maps = (engine / "maps").read_text().count("memfd:burst-pool")
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


@pytest.mark.parametrize("kills", [30, pytest.param(stress.times(6000), marks=pytest.mark.stress)])
def test_the_client_is_killed_at_any_moment(client, start, device, tally, kills):
    """While it connects, prepares, opens a burst or runs requests: others are served between the kills, by the engine
    that was there, which holds no more at the end than before.
    """
    engine, rng = Path(f"/proc/{device['engine'].pid}"), random.Random(kills)

    def held():
        return len(os.listdir(engine / "fd")), (engine / "maps").read_text().count("memfd:burst-pool")

    run(client, 10)
    before = held()
    for number in range(kills):
        victim = start(MANY)
        if number % 2:
            assert victim.stdout.readline() == "1: 11 22 33 44\n"
        for _ in range(rng.randrange(500)):  # some milliseconds
            state(victim.pid)
        victim.kill()
        victim.communicate()
        if number % 10 == 0:
            assert "10 requests, median" in run(client, 10)
    assert "10 requests, median" in run(client, 10)
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    with driver.connect("reference") as connection:
        assert connection.engine_pid == device["engine"].pid
    tally("kills of a client in C", kills)


def test_a_device_that_the_page_starts_is_found(client, place):
    """By the line from docs/protocol.md, for clients that start none."""
    page = (ROOT / "docs/protocol.md").read_text()
    (code,) = re.findall(r'^ {4}python -c "(.*)"$', page, re.MULTILINE)
    starter = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: Path(place, "reference.sock").exists())
        assert "1: 11 22 33 44" in run(client, 1)
        with driver.connect("reference") as connection:
            processes = [HeldProcess(connection.service_pid), HeldProcess(connection.engine_pid)]
    finally:
        starter.kill()
        starter.wait()
    for process in processes:
        process.end()


def test_a_device_that_does_not_run_is_started(client, place):
    """Also where a killed one has left its socket."""
    assert "1: 11 22 33 44" in run(client, 1)
    with driver.connect("reference") as connection:
        processes = [HeldProcess(connection.service_pid), HeldProcess(connection.engine_pid)]
    for process in processes:
        process.end()
    assert "1: 11 22 33 44" in run(client, 1)


def test_a_python_without_burst_is_told(client, place, monkeypatch):
    """What starts a device, and that it could not."""
    monkeypatch.setenv("BURST_PYTHON", "/bin/false")
    done = subprocess.run([client], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "client: connecting: device 'reference' is not there, and /bin/false could not start it" in done.stderr


@pytest.mark.parametrize("victim", ["engine", "service"])
def test_a_death_costs_no_request(start, device, victim):
    """Stopped, so that a result is awaited, and killed: the client starts the device again, and all sums are right."""
    waiting = start(MANY)
    assert waiting.stdout.readline() == "1: 11 22 33 44\n"
    device["engine"].signal(signal.SIGSTOP)
    until(lambda: state(waiting.pid) == "S")
    device[victim].signal(signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it is the victim
        device["engine"].signal(signal.SIGCONT)  # to notice that its service is gone
    said, complaints = waiting.communicate(timeout=3 * PATIENCE)
    assert (waiting.returncode, complaints) == (0, "")
    assert f"{MANY} requests, median" in said


def test_a_device_that_leaves_while_it_is_greeted_is_started_again(start, device):
    """The service stopped before `hello` and then killed."""
    device["service"].signal(signal.SIGSTOP)
    waiting = start(1)
    until(lambda: is_at_a_socket(waiting.pid))
    device["service"].signal(signal.SIGKILL)
    said, _ = waiting.communicate(timeout=3 * PATIENCE)
    assert (waiting.returncode, said[:14]) == (0, "1: 11 22 33 44")


def is_at_a_socket(pid):
    """Whether it sleeps in a program of its own (and not on its way there) and holds a socket."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return state(pid) == "S" and any(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("argument", ["0", "-1", "1000001"])
def test_impossible_arguments_are_refused(client, place, argument):
    """With the usage, before anything is connected."""
    done = subprocess.run([client, argument], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("client: client [requests, 1 to 1000000]")
