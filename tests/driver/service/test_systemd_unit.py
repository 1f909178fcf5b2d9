"""`burst serve` under systemd: the unit, and what the service tells of itself."""

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import driver
from driver.cli.command import burst as command
from driver.engine.system_calls import ALLOWED
from driver.service.health import NotifyPipe, notify, watchdog_seconds


def unit(*words):
    done = CliRunner().invoke(command, ["serve", "--unit", *words])
    assert done.exit_code == 0
    return done.output


def test_the_unit_runs_this_installation():
    """What is printed names this `burst`, the account and the group, and nothing is left to be filled in."""
    text = unit("--user", "nobody", "--group", "inference")
    assert f"ExecStart={Path(sys.executable).with_name('burst')} serve %i --group inference $BURST_OPTIONS\n" in text
    assert "User=nobody\nGroup=inference\n" in text
    assert "Group=burst\n" in unit()
    assert not any(f"@{name}@" in text for name in ("user", "group", "burst"))


def test_the_unit_of_an_account_that_systemd_makes():
    """With --dynamic-user the account is there while the device runs, and the device's folder with it: others could
    not enter one that stays.
    """
    text = unit("--dynamic-user", "--group", "inference")
    assert "User=burst\nDynamicUser=yes\nEnvironment=HOME=/var/lib/burst\nGroup=inference\n" in text
    assert "\nRuntimeDirectory=burst/%i\n" in text
    assert "RuntimeDirectoryPreserve" not in text
    assert " serve %i --dir /run/burst/%i --group inference $BURST_OPTIONS\n" in text
    assert "DynamicUser" not in unit()


def test_the_unit_delegates_its_control_group():
    """The service may divide its control group for the memory of engines, which is mounted so that it can."""
    lines = unit().splitlines()
    assert "Delegate=memory" in lines
    assert not any(line.startswith("ProtectControlGroups=") for line in lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: install systemd")
@pytest.mark.parametrize("words", [(), ("--dynamic-user",), ("--uids", "2100000000-2100000063")])
def test_systemd_takes_the_unit(tmp_path, words):
    """`systemd-analyze verify` has nothing to say about it."""
    path = tmp_path / "burst@reference.service"
    path.write_text(unit("--user", "root", "--group", "root", *words))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "burst@" in line]) == (0, [])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: install systemd")
def test_the_unit_leaves_a_device_its_own_sandbox():
    """Under the unit's filter and families, a device can make the calls that it needs, and those that confine it."""
    groups, group = {}, ""
    for line in subprocess.check_output(["systemd-analyze", "syscall-filter"], text=True).splitlines():
        if line.startswith("@"):
            group = groups.setdefault(line.strip(), set())
        elif line.strip() and not line.strip().startswith("#") and groups:
            group.add(line.strip())

    def expanded(name):
        return set().union(*map(expanded, groups[name])) if name.startswith("@") else {name}

    lines = unit().splitlines()
    (words,) = (line.partition("=")[2].split() for line in lines if line.startswith("SystemCallFilter="))
    allowed = set().union(*map(expanded, words))
    assert {"seccomp", "capset", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"} <= allowed
    assert ALLOWED.keys() - allowed <= {"mincore"}
    (families,) = (line.partition("=")[2] for line in lines if line.startswith("RestrictAddressFamilies="))
    assert "AF_UNIX" in families.split()


@contextlib.contextmanager
def listening():
    """A socket as systemd's, with the folder that it lies in."""
    with tempfile.TemporaryDirectory(prefix="burst-n-", dir="/tmp") as folder:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.closing(sock):
            sock.bind(f"{folder}/notify")
            sock.settimeout(20)
            yield sock, folder


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.integration
@pytest.mark.parametrize("words", [(), ("--group", "0")], ids=["one engine", "cells"])
def test_told_when_ready_and_while_it_answers(words):
    """READY comes after the self test, then WATCHDOG as long as the device answers, and the reason when it does not:
    all of it from the main process, which is the only one that systemd believes."""
    with listening() as (sock, folder):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        said = {"NOTIFY_SOCKET": f"{folder}/notify", "WATCHDOG_USEC": "1200000"}
        words = [sys.executable, "-m", "driver.cli", "serve", "reference", "--dir", f"{folder}/run", *words]

        def received():
            raw, ((_, _, credentials),), *_ = sock.recvmsg(4096, socket.CMSG_SPACE(12))
            assert struct.unpack("iii", credentials)[0] == process.pid
            return raw

        with subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd="/", env=os.environ | said) as process:
            try:
                assert received() == b"READY=1\nSTATUS=ready: its self test passed"
                assert received() == b"WATCHDOG=1\nSTATUS=answers; 0 clients"
                service = children(process.pid)[-1] if "--group" in words else process.pid
                engine = children(service)[0]
                os.kill(engine, signal.SIGSTOP)
                try:
                    while (told := received()).startswith(b"WATCHDOG=1"):
                        pass
                    assert told == b"STATUS=it did not answer within 0.6 s"
                finally:
                    os.kill(engine, signal.SIGCONT)
            finally:
                process.kill()


def test_notify_by_abstract_name(monkeypatch):
    """A name that begins with @ is an abstract socket's; without systemd, or when it is gone, nothing happens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0burst-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@burst-test-{os.getpid()}")
        notify(STATUS="two\nlines", READY=1)
        assert sock.recv(100) == b"STATUS=two lines\nREADY=1"
    notify(READY=1)
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify(READY=1)


def test_what_a_child_says_is_of_its_state_alone(monkeypatch):
    """The main process passes on neither what ends or changes the unit, nor descriptors, which a pipe cannot carry."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0burst-test-{os.getpid()}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@burst-test-{os.getpid()}")
        pipe = NotifyPipe()
        with monkeypatch.context() as child:
            child.setenv("NOTIFY_SOCKET", "@")
            pipe.enter()
            notify(STOPPING=1, MAINPID=1, WATCHDOG="trigger", FDSTORE=1, READY=0)
            notify(READY=1, STATUS="well", EXTEND_TIMEOUT_USEC=1)
        for _ in range(3):
            pipe.forward()
        assert sock.recv(100) == b"READY=1\nSTATUS=well"
        with pytest.raises(BlockingIOError):
            sock.recv(100, socket.MSG_DONTWAIT)
    for fd in (pipe.readable, pipe.writable, pipe.systemd):
        os.close(fd)


def test_watchdogs_of_others(monkeypatch):
    """A watchdog that is meant for another process, or set to nothing, is not ours."""
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    for usec, seconds in (("3000000", 3.0), ("0", None), ("x", None)):
        monkeypatch.setenv("WATCHDOG_USEC", usec)
        assert watchdog_seconds() == seconds
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() is None


@pytest.mark.integration
def test_nobody_listens_to_what_it_prints(kit):
    """Whoever starts it may close its output at once: it is served all the same."""
    with tempfile.TemporaryDirectory(prefix="burst-n-", dir="/tmp") as folder:
        words = [sys.executable, "-m", "driver.cli", "serve", "reference", "--dir", f"{folder}/run"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as process:
            try:
                process.stdout.readline()
                process.stdout.close()
                with (
                    driver.connect(f"{folder}/run/reference.sock") as device,
                    device.prepare(kit.add_model()) as prepared,
                ):
                    assert prepared.run(np.ones((1, 4), np.float32))[0].tolist() == [[2, 2, 2, 2]]
            finally:
                process.kill()
