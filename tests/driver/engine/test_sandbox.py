"""What a device may ask of the kernel once it serves clients."""

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driver
from burst import GeneralFailure
from driver.client import discovery
from driver.doctor import running
from driver.engine.system_calls import ALLOWED, NUMBERS, REFUSED

INSIDE = """
import ctypes, errno, os, socket, subprocess, sys, threading
from driver.engine import sandbox, system_calls
column = 0 if os.uname().machine == "x86_64" else 1
libc = ctypes.CDLL(None, use_errno=True)
def called(number):
    return ctypes.get_errno() if libc.syscall(number, 0, 0, 0, 0, 0, 0) < 0 else 0
go_on, found = threading.Event(), []
def early():
    go_on.wait()
    found.append(called(system_calls.NUMBERS["unshare"][column]))
thread = threading.Thread(target=early)
thread.start()
assert sandbox.enter(sys.argv[1:])
go_on.set()
thread.join()
"""

LAYERS = ("seccomp", "no_new_privileges", "no_capabilities", "landlock_files", "landlock_signals")


def inside(code, *needed):
    """Runs code in a process that has entered the sandbox."""
    return subprocess.run(
        [sys.executable, "-c", INSIDE + code, *needed], capture_output=True, text=True, check=True
    ).stdout


def test_every_call_of_the_list_is_refused():
    """What only an intruder calls fails with EPERM, in a thread that was there before, too; what is on no list, as what
    a later kernel adds, does not exist."""
    code = """
calls = {name: system_calls.NUMBERS[name][column] for name in system_calls.REFUSED}
print([name for name, number in calls.items() if called(number) != errno.EPERM], found)
known = {numbers[column] for numbers in system_calls.ALLOWED.values()} | set(calls.values())
known |= {335, 336}  # uretprobe and uprobe: the kernel filters neither, and ends a process that was not probed
print([number for number in range(1000) if number not in known and called(number) != errno.ENOSYS])
"""
    assert inside(code) == f"[] [{errno.EPERM}]\n[]\n"


def test_what_is_needed_is_allowed():
    """A device may need a call of any list; the others stay refused."""
    code = """
print(called(system_calls.NUMBERS["vmsplice"][column]), called(system_calls.NUMBERS["tee"][column]))
"""
    assert inside(code, "vmsplice", "no such call") == f"0 {errno.ENOSYS}\n"


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
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
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
print(subprocess.run(["/bin/echo", "started"], capture_output=True).stdout, called(system_calls.NUMBERS["ptrace"][0]))
"""
    if os.uname().machine == "x86_64":
        assert inside(code, "execve") == f"{b'started' + bytes([10])!r} {errno.EPERM}\n"


def test_a_process_acts_on_itself_alone():
    """Of the calls that name a process, those pass that name the caller; and its children, where it may signal them."""
    code = """
from burst_test_devices.calls_on_others import failures_on_itself, on_a_process
from driver.engine.call_rules import Reach
child = os.fork() or __import__("signal").pause()
def tried(pid):
    refused = set()
    for name, call in on_a_process(pid).items():
        try:
            call()
        except PermissionError:
            refused.add(name)
    return refused
assert sandbox.enter((), Reach(os.getpid(), signals=[child]))
everything = {*on_a_process(0)}
signals = {name for name in everything if "kill" in name or "signal" in name}
print(failures_on_itself(), tried(child) == everything - signals, tried(os.getppid()) == everything)
os.kill(child, 9)
"""
    assert inside(code) == "[] True True\n"


@pytest.mark.integration
def test_what_starts_programs_may_end_them():
    """A device that needs `execve`, or names `kill`, signals processes; it still changes no others' limits."""
    code = """
import resource
from driver.engine.call_rules import Reach
print(sandbox.enter(sys.argv[1:], Reach(os.getpid())), os.kill(os.getppid(), 0))
try:
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
except PermissionError:
    print("refused")
"""
    for need in ("execve", "kill"):
        assert inside(code, need) == "True None\nrefused\n"


def test_a_device_with_sockets_gets_those_of_programs():
    """What needs `socket` gets Unix and Internet sockets, and none that configure the machine; and no namespace."""
    code = """
from burst_test_devices.calls_on_others import of_addresses, of_others
from driver.engine.call_rules import Reach
sandbox.enter(sys.argv[1:], Reach(os.getpid()))
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family).close()
attempts = {name: call for name, call in of_others(os.getppid()).items() if name.endswith((" socket", " namespace"))}
for name, call in attempts.items():
    try:
        call()
        print(name)
    except PermissionError:
        pass
print(len(attempts) > 11)
"""
    assert inside(code, "socket", "clone") == "True\n"


@pytest.mark.parametrize("name", ["reference", "litert"])
def test_devices_say_what_is_active(place, name):
    """Both processes of a device are confined; `device.stats()` and `burst doctor` say so."""
    with driver.connect(name) as device:
        active = dict.fromkeys(LAYERS, True)
        assert device.stats()["sandbox"] == {"service": active, "engine": active}
        finding = next(finding for finding in running.devices() if finding.subject == f"{name}, sandbox")
        assert finding.state == "ok"
        assert finding.found == ", ".join(f"{layer.replace('_', ' ')} active" for layer in LAYERS)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with a secret in it, and what an intruder is told."""
    monkeypatch.setenv("HOME", str(tmp_path))
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = tmp_path / ".config/burst"
    folder.mkdir(parents=True)
    name = f"burst-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as server:
        abstract.bind(f"\0{name}")
        abstract.listen()
        said = {"secret": str(secret), "client": os.getpid(), "abstract": name, "port": server.getsockname()[1]}
        said["socket"] = str(discovery.runtime_dir() / "reference.sock")
        (folder / "intruder.json").write_text(json.dumps(said))
        yield tmp_path


@pytest.mark.parametrize("name", ["Intruder", "IntruderApart"])
def test_what_takes_a_device_over_reaches_nothing_else(place, home, name):
    """In the service, in the process that is asked in its place, and in the engine: of an account's files, processes
    and sockets, the kernel leaves none but the device's own to code of the device itself."""
    builder, x = driver.ModelBuilder(), np.ones(4, np.float32)
    builder.output(builder.operation("MUL", builder.input("float32", (4,)), x, 0))
    other = driver.ModelBuilder()
    other.output(other.operation("ADD", other.input("float32", (4,)), x, 0))
    with driver.connect(f"burst_test_devices.intruder:{name}") as device:
        (reason,) = device.explain(builder.build())
        with pytest.raises(GeneralFailure) as failed:
            device.prepare(other.build())
        pids = [int(str(said).rpartition(": [")[0].rpartition(" ")[2]) for said in (reason, failed.value)]
        assert str(reason).endswith(": []")
        assert str(failed.value).endswith(": []")
        assert pids[1] == device.engine_pid
        assert (pids[0] == device.service_pid) == (name == "Intruder")
        score = Path(f"/proc/{pids[0]}/oom_score_adj").read_text()
        assert score == ("0\n" if name == "Intruder" else "1000\n")  # the first to end when memory runs out
    assert (home / "secret").read_text() == "secret"


def test_files_that_a_device_needs(tmp_path):
    """What a device says that it needs is left to it, and nothing beside it: neither to it nor to its children."""
    for name in ("read", "written", "neither"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    code = f"""
from driver.devices.reference import ReferenceDevice
from driver.interface import Needs
class Needing(ReferenceDevice):
    needs = Needs(({str(tmp_path / "read")!r}, "/nowhere"), ({str(tmp_path / "written")!r},))
assert sandbox.enter_files(Needing)
def works(path, mode):
    try:
        open(path, mode).close()
    except PermissionError:
        return False
    return True
def tried(*_):
    return [works(f"{tmp_path}/{{name}}/file", mode) for name in ("read", "written", "neither") for mode in "ra"]
print(tried())
import socket
try:
    socket.socket(socket.AF_UNIX).bind("{tmp_path}/written/socket")
except PermissionError:
    print("no socket")
import wave, statistics  # modules that were not loaded before
if not os.fork():
    print(tried(), flush=True)
    os._exit(0)
os.wait()
"""
    expected = [True, False, True, True, False, False]
    assert files(code) == f"{expected}\nno socket\n{expected}\n"


def files(code, **environment):
    """What code prints in a process that may use the sandbox, and all processors: numpy looks when it is imported."""
    head = "import os\nos.sched_setaffinity(0, range(os.cpu_count()))\nfrom driver.engine import sandbox\n"
    command = [sys.executable, "-c", head + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return done.stdout


@pytest.mark.integration
@pytest.mark.parametrize("path", ["/", "data", ""])
def test_a_need_that_no_device_can_mean(path):
    """A relative path, or that of all files, is an error of the device's, which says so when it starts."""
    code = f"""
from driver.devices.reference import ReferenceDevice
from driver.interface import Needs
class Needing(ReferenceDevice):
    needs = Needs(({path!r},))
try:
    sandbox.enter_files(Needing)
except ValueError as error:
    print(error)
"""
    assert files(code) == f'needs: {path!r} must be an absolute path of a file or a folder, or one from "~/"\n'


def test_threads_of_libraries_end_before():
    """numpy has threads when a device enters the sandbox: they are ended, and those that come later are confined."""
    code = """
import numpy as np
from driver.devices.reference import ReferenceDevice
print(len(os.listdir("/proc/self/task")) > 1, sandbox.enter_files(ReferenceDevice))
x = np.ones((600, 600))
print((x @ x)[0, 0], sandbox.active()["landlock_files"])
"""
    assert files(code, OPENBLAS_NUM_THREADS="4") == "True True\n600.0 True\n"


def test_a_thread_that_stays_is_told():
    """Where a library's thread cannot be confined, the sandbox does not say that it is active."""
    code = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
from driver.devices.reference import ReferenceDevice
print(sandbox.enter_files(ReferenceDevice), sandbox.active()["landlock_files"], flush=True)
os._exit(0)
"""
    assert files(code) == "False False\n"


def test_without_landlock():
    """A kernel that has none: the device runs, and says that its files are not confined."""
    code = """
from driver.devices.reference import ReferenceDevice
from driver.engine import landlock
landlock.abi = lambda: 0
print(sandbox.enter_files(ReferenceDevice), sandbox.active()["landlock_files"], sandbox.active()["landlock_signals"])
print(open("/etc/hostname").read() != "")
"""
    assert files(code) == "False False False\nTrue\n"


@pytest.mark.integration
def test_an_older_landlock():
    """With the rules of the first ABI, and of those between, files are confined; signals with the sixth."""
    code = """
import sys
from driver.devices.reference import ReferenceDevice
from driver.engine import landlock
landlock.abi = lambda: int(sys.argv[1])
print(sandbox.enter_files(ReferenceDevice), sandbox.active()["landlock_signals"])
try:
    open("/etc/hostname")
except PermissionError:
    print("refused")
"""
    for version in range(1, 8):
        command = [sys.executable, "-c", "import os\nfrom driver.engine import sandbox\n" + code, str(version)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said == f"True {version > 5}\nrefused\n"


def test_limits_of_a_device(place):
    """A device locks no memory and leaves no core dump behind, whatever the client that starts it may do."""
    with driver.connect() as device:
        for pid in (device.service_pid, device.engine_pid):
            assert resource.prlimit(pid, resource.RLIMIT_MEMLOCK) == (0, 0)
            assert resource.prlimit(pid, resource.RLIMIT_CORE) in ((1, 1), (0, 0))


def test_the_numbers_are_those_of_the_kernel():
    """The numbers are those of the kernel's headers, where these are installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")
    for column, path in enumerate(header):
        if not path.exists():
            pytest.skip(f"{path} is not installed")
        found = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", path.read_text()))
        found["newfstatat"] = found.pop("fstatat", found.get("newfstatat"))
        ours = {name: numbers[column] for name, numbers in NUMBERS.items() if numbers[column] is not None}
        assert {name: int(found[name]) for name in ours if name in found} == {
            name: number for name, number in ours.items() if name in found
        }
        assert len(ours.keys() & found.keys()) > len(ours) - 5
    assert NUMBERS.keys() > {*ALLOWED, *REFUSED}
    assert not ALLOWED.keys() & set(REFUSED)


def test_what_the_sandbox_keeps_from_a_device_is_told_with_the_remedy(place, kit):
    """A device that opens a file which it has not named is told how to name it, by the error of its client."""
    with driver.connect("burst_test_devices.odd:Curious") as device:
        if not device.stats()["sandbox"]["engine"]["landlock_files"]:
            pytest.skip("files are not confined here")
        with pytest.raises(GeneralFailure, match=r"the sandbox: .* needs = Needs\(read_paths=\('/etc/hosts',\)\)"):
            device.prepare(kit.add_model())
    with pytest.raises(driver.DeviceFailed, match=r"needs = Needs\(read_paths=\('/etc/hosts',\)\)"):
        driver.connect("burst_test_devices.odd:Prying")
