"""Applications: what a client declares or its control group says, and how they divide the share of their account."""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driver
from burst import InvalidArgument, ResourceExhaustedTransient
from burst.channel import Channel
from driver.protocol.rpc import PROTOCOL
from driver.service.applications import application_of, control_group_in

X = np.ones((1, 4), np.float32)
SYSTEMD = "/user.slice/user-1000.slice/user@1000.service/app.slice/app-camera-12.scope"

# ---- what a client says


@pytest.mark.parametrize("name", ["", "x" * 101, "a\nb", "/system.slice/x", 5, b"camera", ["camera"]])
def test_invalid_names_are_refused(name, device, kit):
    """By the client before it connects, and by the service whatever a client sends."""
    with pytest.raises(InvalidArgument, match=r"application=.*1 to 100 printable characters"):
        driver.connect("reference", application=name)
    with pytest.raises(InvalidArgument, match=r"application=.*1 to 100 printable characters"):
        device.call("hello", PROTOCOL, name)
    with pytest.raises(ValueError, match=r"application=.*1 to 100 printable characters"):
        driver.compile(kit.add_model(), application=name)


def test_a_client_stays_in_its_application(device, kit):
    """It cannot take what it has prepared to another one."""
    with device.prepare(kit.add_model()), pytest.raises(InvalidArgument, match="hello comes before prepare"):
        device.call("hello", PROTOCOL, "another")


def test_a_connected_device_has_its_application(device, kit):
    """`compile` cannot give it another one."""
    with pytest.raises(ValueError, match=r"application='x': device 'reference' is connected already"):
        driver.compile(kit.add_model(), [device], application="x")


def test_a_declared_name_is_seen_and_kept(kit, home):
    """In the statistics, with its part of the account's time, and in a prepared model that was pickled."""
    with driver.connect("reference", application="camera") as device:
        found = device.stats()
        assert found["application"] == "camera"
        assert found["application_share"] is None  # no execution has waited for another
        with device.prepare(kit.add_model()) as prepared:
            again = pickle.dumps(prepared)
    with pickle.loads(again).device as device:
        assert device.stats()["application"] == "camera"


def test_a_compiled_model_executes_as_its_application(kit, home):
    """Its executions count for that application, and so do those of its copy that was pickled."""
    with driver.compile(kit.add_model(), ["reference"], application="robot") as compiled:
        compiled.run(X)
        again = pickle.dumps(compiled)
        with driver.connect("reference", application="robot") as device:
            assert device.stats()["application"] == "robot"
    with pickle.loads(again) as compiled:
        compiled.run(X)
        (device,) = compiled._devices
        assert device.stats()["application"] == "robot"


def test_a_device_is_connected_again_as_the_same_application(kit, place, process):
    """After its death, by a burst that recovers."""
    with (
        driver.connect("reference", application="camera") as device,
        device.prepare(kit.add_model()) as prepared,
        prepared.burst(recover=True) as burst,
    ):
        burst.run(X)
        engine = process(device.engine_pid)
        engine.kill()
        assert engine.has_ended()
        burst.run(X)
        assert device.stats()["application"] == "camera"


def test_an_account_has_so_many_applications(place, kit):
    """One more is refused with the figure; a client that declares nothing is served; one that ended makes room."""
    path = Path(f"{place.path}-home/.config/burst/limits.toml")
    path.parent.mkdir(parents=True)
    path.write_text("uid_applications = 2")
    with driver.connect("reference") as first, contextlib.ExitStack() as stack:
        others = 2 - bool(first.stats()["application"])
        for n in range(others):
            stack.enter_context(driver.connect("reference", application=f"a {n}"))
        with driver.connect("reference", application="a 0") as again:
            assert again.stats()["application"] == "a 0"
        with pytest.raises(ResourceExhaustedTransient, match="uid_applications = 2 is reached, with 2 in use"):
            driver.connect("reference", application="one more")
        with driver.connect("reference") as undeclared:
            assert undeclared.stats()["application"] == first.stats()["application"]
        stack.close()

        def connected():
            with contextlib.suppress(ResourceExhaustedTransient):
                return driver.connect("reference", application="one more")

        with kit.until(connected) as device:
            assert device.stats()["application"] == "one more"


# ---- control groups


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([f"0::{SYSTEMD}"], SYSTEMD),
        (["0::/"], ""),
        (["4:memory:/m", "3:cpu,cpuacct:/c", "1:name=systemd:/s", "0::/"], "/s"),
        (["4:memory:/m", "3:cpu,cpuacct:/c", "1:name=systemd:/", "0::/"], "/c"),
        (["4:memory:/m", "2:pids:/p", "0::/"], "/m"),
        (["1:name=systemd:/s", "0::/v2:with:colons"], "/v2:with:colons"),
        ([], ""),
    ],
)
def test_the_path_that_tells_programs_apart(lines, found):
    """That of version 2, else of the first of systemd, cpu and memory that is not the root."""
    assert control_group_in("\n".join([*lines, ""])) == found


def test_the_group_of_a_process_that_ended_is_unknown():
    """Its number may be another process's by now."""
    near, far = Channel.pair()
    with near, far:
        assert application_of(near, ()) == control_group_in(Path("/proc/self/cgroup").read_text())
    listen = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.listen(); print(flush=True); s.accept()"
    with (
        Channel(_bound()) as ours,
        subprocess.Popen(
            [sys.executable, "-c", listen, str(ours.fileno())], pass_fds=[ours.fileno()], stdout=subprocess.PIPE
        ) as child,
    ):
        child.stdout.readline()
        with Channel(_connected(ours.socket.getsockname())) as channel:
            child.wait()
            assert channel.peer_pid == child.pid
            assert application_of(channel, ()) == ""


def _bound():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(f"\0burst-test-{os.getpid()}")
    return sock


def _connected(address):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address)
    return sock


@pytest.fixture
def group():
    """A control group of its own, below the one that this process is in."""
    for mount, name in (("", ""), ("unified", ""), ("systemd", "name=systemd")):
        own = Path("/proc/self/cgroup").read_text().splitlines()
        inside = next((line.split(":", 2)[2] for line in own if line.split(":", 2)[1] == name), None)
        path = Path("/sys/fs/cgroup", mount, str(inside).lstrip("/"), f"burst-test-{os.getpid()}")
        if inside is None or not (path.parent / "cgroup.procs").exists():
            continue
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            yield path
        finally:
            path.rmdir()
        return
    pytest.skip("this account may not make a control group")


@pytest.mark.integration
def test_a_process_of_another_control_group_is_another_application(group, place):
    """While all connections of one process that declares nothing are one application."""
    code = """
import sys, driver
open(sys.argv[1], "w").write("0")
found = [driver.connect("reference").stats()["application"] for _ in range(2)]
print(*found, sep="\\n")
"""
    with driver.connect("reference") as device:
        own = device.stats()["application"]
        done = subprocess.run(
            [sys.executable, "-c", code, group / "cgroup.procs"], stdout=subprocess.PIPE, text=True, check=True
        )
    one, other = done.stdout.splitlines()
    assert one == other != own
    assert one.endswith(group.name)


# ---- shares


CLIENT = """
import sys
import threading
import numpy as np
import driver
name, priority, application = sys.argv[1:]
builder = driver.ModelBuilder()
x = builder.input("float32", (1, 4))
builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
device = driver.connect(name, application=application)
burst = device.prepare(builder.build(), priority=priority).burst(depth=16)
frame = np.array([[0.002, 0, 0, 0]], np.float32)
burst.run(frame)
print("ready", flush=True)
sys.stdin.readline()
may_end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), may_end.set()), daemon=True).start()
while not may_end.is_set():
    burst.submit(frame)  # waits while sixteen are in flight
found = device.stats()
print(found["priorities"][priority]["used"], found["application_share"], found["share"])
"""


def used_by(kit, *clients):
    """What clients in processes of their own used, in s, until it was 0.8 s together; and their parts."""
    with contextlib.ExitStack() as stack:
        processes, watch = [], stack.enter_context(driver.connect(kit.odd("Single")))
        for words in clients:
            command = [sys.executable, "-c", CLIENT, kit.odd("Single"), *words]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for line in ("begin", "end"):
            for process in processes:
                print(line, file=process.stdin, flush=True)
            kit.until(lambda: watch.stats()["priorities"]["low"]["used_by_uid"] > 0.8)
        return [[float(word) for word in process.communicate(timeout=kit.patience)[0].split()] for process in processes]


@pytest.mark.integration
def test_a_program_at_high_priority_does_not_starve_another_one(kit, place):
    """Two processes of one account that declare two applications: neither gets less than half of what the other one
    gets, however busy the machine is. On simulated time both get the same (test_run_queue.py).
    """
    (one, its, share), (other, theirs, _) = used_by(kit, ("high", "a"), ("medium", "b"))
    assert min(one, other) > 0.5 * max(one, other)
    assert its + theirs == pytest.approx(1, rel=0.1)
    assert share == pytest.approx(1, rel=0.1)
