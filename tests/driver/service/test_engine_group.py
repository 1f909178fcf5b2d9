"""The control group of an engine: the kernel holds it to its memory, where systemd has delegated the service's."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import PATIENCE

from driver.engine.limits import NO_LIMIT, Limits
from driver.service import engine_group
from driver.service.engine_group import EngineGroups, delegated, most_of
from driver.service.engine_watch import EngineWatch

FILES = {"cgroup.procs": "", "memory.high": "max", "memory.max": "max", "memory.events": "high 0\noom_kill 0\n"}
STAT = "anon 10\nfile 1000\nshmem 200\nkernel 3000\n"


@pytest.fixture
def top(monkeypatch, tmp_path):
    """A tree of control groups, as this process sees it, whose own one is delegated."""
    path = tmp_path / "system.slice/burst@x.service"
    path.mkdir(parents=True)
    (path / "cgroup.controllers").write_text("cpu memory pids\n")
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/\n0::/system.slice/burst@x.service\n")
    monkeypatch.setattr(engine_group, "TOP", tmp_path)
    monkeypatch.setattr(engine_group, "OWN", own)
    monkeypatch.setattr(os, "getxattr", lambda _, mark: b"1" if mark == "user.delegate" else b"")
    return path


@pytest.fixture
def made(monkeypatch):
    """Has each new group the files that the kernel makes."""
    mkdir = Path.mkdir

    def make(path, *rest, **more):
        mkdir(path, *rest, **more)
        if path.name.startswith("engine-"):
            for name, text in (FILES | {"memory.stat": STAT}).items():
                (path / name).write_text(text)

    monkeypatch.setattr(Path, "mkdir", make)


def test_a_group_that_is_not_delegated_is_left_alone(monkeypatch, top):
    """Without systemd's mark, or without the controller of memory, nothing is divided."""
    assert delegated() == top
    (top / "cgroup.controllers").write_text("cpu pids\n")
    assert EngineGroups.of_this_process() is None
    (top / "cgroup.controllers").write_text("memory\n")
    monkeypatch.setattr(os, "getxattr", lambda *_: b"0")
    assert EngineGroups.of_this_process() is None
    assert [path.name for path in top.iterdir()] == ["cgroup.controllers"]


def test_what_is_written(top, made):
    """The service moves down, gives memory to the groups below, and has an engine bounded by descriptors that another
    process closes."""
    top.joinpath("service").mkdir()
    groups = EngineGroups.of_this_process()
    assert (top / "service/cgroup.procs").read_text() == str(os.getpid())
    assert (top / "cgroup.subtree_control").read_text() == "+memory"
    group = groups.begin()
    group.take(7)
    group.bound(1 << 30)
    path = top / "engine-0"
    texts = {name: (path / name).read_text() for name in ("cgroup.procs", "memory.high", "memory.max")}
    assert texts == {"cgroup.procs": "7", "memory.high": str(1 << 30), "memory.max": str((1 << 30) + (1 << 27))}
    assert (group.held(), group.has_ended_one()) == (3210, False)
    (path / "memory.events").write_text("high 3\noom_kill 1\n")
    assert group.has_ended_one()
    fds = group.fds
    group.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert not group.fds


def test_limits_of_a_group():
    """A group may have what its engine may, the buffers that clients share with it, and for the device's own account
    the pools that it makes pages of."""
    limits = Limits(100, 1000, account_bytes=250, engine_bytes=30, account_pool_bytes=7)
    assert [limits.group_most(n, makes_pages=False) for n in (0, 1, 2, 3)] == [230, 230, 430, 530]
    assert limits.group_most(1, makes_pages=True) == 237
    assert Limits(100, 1000).group_most(1, makes_pages=True) == NO_LIMIT


class Group:
    """An engine's group, as its watch sees it."""

    def __init__(self, held, killed):
        self._held, self._killed, self.bounds, self._come = held, killed, [], threading.Event()

    def bound(self, most):
        self.bounds.append(most)

    def wait(self):
        self._come.wait()

    def come(self):
        self._come.set()

    def held(self):
        return self._held

    def has_ended_one(self):
        return self._killed


class Account:
    def note(self, *_):
        pass


@pytest.mark.parametrize(("held", "killed", "found"), [(300, False, 300), (0, True, 200)])
def test_an_engine_that_comes_to_its_limit_is_ended(held, killed, found):
    """The service ends an engine whose memory the kernel cannot take back, and says so as well where the kernel was
    faster; its limit follows the number of its clients."""
    ended, told = [], threading.Event()

    def end(*figures):
        ended.append(figures)
        told.set()

    group = Group(held, killed)
    watch = EngineWatch(
        os.getpid(), Limits(NO_LIMIT // 4, NO_LIMIT), Account(), end, group=group, group_most=lambda n: 100 * max(1, n)
    )
    watch.note(2)
    watch.note(1)
    assert group.bounds == [100, 200]
    watch.start()
    group.come()
    assert told.wait(PATIENCE)
    assert ended == [(found, 200)]


TAKES = """
import os, sys
from driver.service.engine_group import EngineGroups
print(flush=True)
sys.stdin.readline()
group = EngineGroups.of_this_process().begin()
if not (pid := os.fork()):
    group.close()
    sys.stdin.readline()
    held = bytearray(1 << 30)
    held[:: 4096] = bytes([1]) * len(held[:: 4096])
    os._exit(0)
group.take(pid)
group.bound(64 << 20)
while not (group.held() > 64 << 20 or group.has_ended_one()):
    group.wait()
print("held", flush=True)
os.kill(pid, 9)
print(os.waitpid(pid, 0)[1], flush=True)
"""


def writable_top():
    """The group of all processes, of version 2 and with memory, if this machine has it and lets us divide it."""
    top = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        if "memory" in (top / "cgroup.subtree_control").read_text().split() and os.access(top, os.W_OK):
            return top
    return None


@pytest.mark.integration
@pytest.mark.skipif(not writable_top(), reason="no control groups of version 2 with memory that may be written to")
def test_the_kernel_holds_it():
    """A process of a real group that takes more is stopped, or ended, by the kernel before it has what it asks for."""
    path = writable_top() / "burst-test"
    path.mkdir()
    try:
        os.setxattr(path, "user.delegate", b"1")
        with subprocess.Popen(
            [sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()
            (path / "cgroup.procs").write_text(str(process.pid))
            said, _ = process.communicate("\n\n\n", PATIENCE)
        assert said.split() == ["held", "9"]
    finally:
        for below in (*path.iterdir(), path):
            if below.is_dir():
                below.rmdir()


def test_no_group_no_figure():
    """A process that has no group of an engine has no limit there."""
    assert most_of(os.getpid()) is None
