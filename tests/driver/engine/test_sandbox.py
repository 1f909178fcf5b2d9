"""What a device may ask of the kernel once it serves clients."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import driver
from driver.doctor import running
from driver.engine.sandbox import REFUSED

INSIDE = """
import ctypes, errno, os, socket, subprocess, sys, threading
from driver.engine import sandbox
libc = ctypes.CDLL(None, use_errno=True)
def called(number):
    return ctypes.get_errno() if libc.syscall(number, 0, 0, 0, 0, 0, 0) < 0 else 0
go_on, found = threading.Event(), []
def early():
    go_on.wait()
    found.append(called(sandbox.REFUSED["unshare"][0 if os.uname().machine == "x86_64" else 1]))
thread = threading.Thread(target=early)
thread.start()
assert sandbox.enter(sys.argv[1:])
go_on.set()
thread.join()
"""


def inside(code, *needed):
    """Runs code in a process that has entered the sandbox."""
    return subprocess.run(
        [sys.executable, "-c", INSIDE + code, *needed], capture_output=True, text=True, check=True
    ).stdout


def test_every_call_of_the_list_is_refused():
    """Each call that is named fails with EPERM, in a thread that was there before, too."""
    code = """
column = 0 if os.uname().machine == "x86_64" else 1
calls = {name: numbers[column] for name, numbers in sandbox.REFUSED.items() if name != "vhangup"}
print([name for name, number in calls.items() if called(number) != errno.EPERM], found)
"""
    assert inside(code) == f"[] [{errno.EPERM}]\n"


def test_what_an_intruder_would_do_is_refused():
    """No program is started, no other process is read, no network is reached, with the C library's own functions."""
    code = """
def refused(call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        return True
print(refused(subprocess.run, ["/bin/true"]), refused(socket.socket), refused(socket.socket, socket.AF_INET6))
print(refused(os.execv, sys.executable, ["python", "-c", ""]), refused(os.setuid, 1))
"""
    assert set(inside(code).split()) == {"True"}


def test_what_devices_do_works():
    """Threads, children, memory, Unix sockets and files are as before."""
    code = """
threading.Thread(target=print, args=("thread",)).start()
near, far = socket.socketpair()
os.close(os.memfd_create("x"))
child = os.fork()
if not child:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), open("/proc/self/comm").read() != "")
"""
    assert sorted(inside(code).split()) == ["7", "True", "thread"]


def test_calls_that_a_device_needs():
    """What a device says that it needs is left to it, and nothing else is."""
    code = """
print(subprocess.run(["/bin/echo", "started"], capture_output=True).stdout, called(sandbox.REFUSED["ptrace"][0]))
"""
    if os.uname().machine == "x86_64":
        assert inside(code, "execve") == f"{b'started' + bytes([10])!r} {errno.EPERM}\n"


@pytest.mark.parametrize("name", ["reference", "litert"])
def test_devices_say_what_is_active(place, name):
    """Both processes of a device are confined; `device.stats()` and `burst doctor` say so."""
    with driver.connect(name) as device:
        active = {"seccomp": True, "no_new_privileges": True}
        assert device.stats()["sandbox"] == {"service": active, "engine": active}
        finding = next(finding for finding in running.devices() if finding.subject == f"{name}, sandbox")
        assert (finding.state, finding.found) == ("ok", "seccomp active, no new privileges active")


def test_the_numbers_are_those_of_the_kernel():
    """The numbers are those of the kernel's headers, where these are installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")
    for column, path in enumerate(header):
        if not path.exists():
            pytest.skip(f"{path} is not installed")
        found = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", path.read_text()))
        assert {name: int(found[name]) for name in REFUSED if name in found} == {
            name: numbers[column] for name, numbers in REFUSED.items() if name in found
        }
        assert len(set(REFUSED) & set(found)) > len(REFUSED) - 5
