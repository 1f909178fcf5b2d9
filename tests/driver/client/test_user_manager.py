"""Devices that systemd's manager of the account starts, for clients whose limits a device would keep."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from limited_clients import CPU, DEVICE_NICE, NICE, NICE_WORDS, limited, limits_of

import driver
from driver.client import user_manager
from driver.doctor import machine

MANAGER = Path("/usr/lib/systemd/systemd")
ASKING = """#!{python} -P
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(os.environ["XDG_RUNTIME_DIR"] + "/systemd/private")
    sock.sendall(json.dumps(sys.argv[1:]).encode())
    sock.shutdown(socket.SHUT_WR)
    code, words = json.loads(sock.makefile().read())
sys.exit(words if code else 0)
"""


@pytest.fixture
def session(place, tmp_path, monkeypatch):
    """The account's session folder, without a manager."""
    folder = Path(place.path, "session")
    (folder / "systemd").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def manager(session, tmp_path, monkeypatch):
    """A program `systemd-run` and what it asks: this process, which has no limits, runs the command as systemd would.

    Its `asked` has the command lines, and `refusal` the words with which it refuses the next.
    """
    command = tmp_path / "bin/systemd-run"
    command.parent.mkdir()
    command.write_text(ASKING.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)

    class Manager:
        asked, refusal = [], ""

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(session / "systemd/private"))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener, Manager))
        thread.start()
        yield Manager
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def serve(listener, manager):
    """Until the listener is shut down."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock, sock.makefile() as words:
            asked = json.loads(words.read())
            manager.asked.append(asked)
            if manager.refusal:
                sock.sendall(json.dumps([1, manager.refusal]).encode())
                continue
            own = asked[asked.index("--") + 1 :]
            done = subprocess.run(
                [word.replace("$$", "$") for word in own], stdin=subprocess.DEVNULL, env={}, check=False
            )
            sock.sendall(json.dumps([done.returncode, "it ended"]).encode())


@pytest.mark.integration
def test_the_manager_starts_the_device_of_all(manager, kit):
    """A client with limits has the manager start the device: it keeps none of them, and others use it, too."""
    with limited(CPU + "\n" + NICE) as client:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        assert manager.asked[0][:4] == ["--user", "--quiet", "--collect", "--service-type=forking"]
        for pid in pids:
            assert limits_of(pid)["Max cpu time"] == ("unlimited", "unlimited")
            assert os.getpriority(os.PRIO_PROCESS, pid) == DEVICE_NICE
            assert b"XDG_RUNTIME_DIR" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert os.readlink(f"/proc/{pid}/cwd") == "/"
        with driver.connect() as device, limited(NICE) as other:
            assert [device.service_pid, device.engine_pid] == pids
            assert [int(pid) for pid in other.stdout.readline().split()] == pids
            other.stdin.write(b".")
        _, said = client.communicate(b".")
    assert said == b""
    assert len(manager.asked) == 1


@pytest.mark.integration
def test_a_manager_that_cannot(manager, kit):
    """When the manager refuses, the client starts a device for itself, and is told why."""
    manager.refusal = "the manager is tired"
    with limited(NICE) as client:
        assert client.stdout.readline()
        _, said = client.communicate(b".")
    assert b"for this program and those with the same limits alone" in said
    assert NICE_WORDS.encode() in said
    assert b"cannot start it: the manager is tired" in said


@pytest.mark.integration
def test_without_a_manager(session, kit):
    """So it is where no manager listens; `systemd-run` is not called."""
    assert f"no manager listens at {session}/systemd/private" in user_manager.absence() or not shutil.which(
        "systemd-run"
    )
    with limited(NICE) as client:
        assert client.stdout.readline()
        _, said = client.communicate(b".")
    assert user_manager.absence().encode() in said


def test_another_accounts_session(tmp_path, monkeypatch):
    """A variable that `su` has left, which names another account's folder, is not used."""
    if os.geteuid():
        pytest.skip("only root can give a folder to another account")
    os.chown(tmp_path, 65534, 65534)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert str(tmp_path) not in user_manager.absence()


def test_doctor_says_who_starts_devices(session, monkeypatch):
    """`burst doctor` names the limits that a device would keep of this process, and why the manager does not help."""
    monkeypatch.setattr(machine.launch, "kept", lambda: {"nice": 5})
    (finding,) = [found for found in machine.limits_of_the_process() if found.subject == "limits of devices"]
    assert (finding.state, finding.found) == ("note", "nice 5")
    assert finding.why.endswith(f"systemd's manager cannot start it: {user_manager.absence()}")


REAL = """
set -e
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/burst-test-$$
echo $$ > /sys/fs/cgroup/burst-test-$$/cgroup.procs
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
exec "$0" --user
"""


@pytest.fixture
def real(session, kit):
    """systemd itself as this account's manager, in namespaces in which it seems to have booted the machine."""
    if os.geteuid() or not MANAGER.exists() or not all(map(shutil.which, ("unshare", "systemd-run"))):
        pytest.skip("needs root, unshare and systemd")
    (session / "systemd").rmdir()
    words = ["unshare", "--mount", "bash", "-c", REAL, MANAGER]
    with subprocess.Popen(words, env=os.environ | {"SYSTEMD_LOG_TARGET": "null"}, stderr=subprocess.PIPE) as process:
        kit.until(lambda: process.poll() is not None or not user_manager.absence())
        if process.poll() is not None:
            pytest.skip(f"systemd does not run here: {process.stderr.read().decode().strip()}")
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(kit.patience)
    for hierarchy in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        for group in sorted(hierarchy.glob(f"burst-test-{process.pid}/**/"), reverse=True):
            group.rmdir()


@pytest.mark.integration
def test_a_real_manager(real, kit):
    """systemd's own manager starts the device, in a group of its own, and ends nothing when the client ends."""
    with limited(CPU) as client:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        with driver.connect() as device:
            assert [device.service_pid, device.engine_pid] == pids
            for pid in pids:
                assert limits_of(pid)["Max cpu time"] == ("unlimited", "unlimited")
                assert ".service" in Path(f"/proc/{pid}/cgroup").read_text()
            _, said = client.communicate(b".")
            assert (client.returncode, said) == (0, b"")
            assert device.stats()["sandbox"]["engine"]["landlock_files"]
            device.call("status")
