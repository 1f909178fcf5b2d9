"""What a device inherits from the client that starts it, and what it undoes."""

import os
from pathlib import Path

import pytest
from limited_clients import CPU, DEVICE_NICE, NICE, NICE_WORDS, limited, limits_of
from waiting import until

import driver
from driver.client.launch import kept
from driver.doctor import running

SOFT = """
limits = {"CPU": 3600, "AS": 1 << 40, "DATA": 1 << 40, "FSIZE": 1 << 30, "STACK": 1 << 18, "NPROC": 5000}
for name, soft in limits.items():
    number = getattr(resource, "RLIMIT_" + name)
    resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
open("/proc/self/oom_score_adj", "w").write("300")
libc = ctypes.CDLL(None)
libc.prctl(29, 10**9, 0, 0, 0)  # timer slack: a second
libc.prctl(41, 1, 0, 0, 0)  # no huge pages
for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""


_IGNORED = 1 << 12 | 1 << 24 | 3 << 31  # Python ignores PIPE and XFSZ; the C library keeps its own two


@pytest.mark.integration
def test_soft_limits_of_the_first_client_are_reset(place, kit):
    """What a client has restricted for itself, and a process may undo, the device undoes: for all of its threads."""
    with limited(SOFT) as client:
        for pid in map(int, client.stdout.readline().split()):
            limits, proc = limits_of(pid), Path(f"/proc/{pid}")
            for name in ("Max cpu time", "Max address space", "Max data size", "Max file size"):
                assert limits[name] == ("unlimited", "unlimited"), name
            assert limits["Max processes"][0] == limits["Max processes"][1]
            assert int(limits["Max stack size"][0]) == 8 << 20
            assert (proc / "oom_score_adj").read_text() == "0\n"
            status = dict(line.split(":\t") for line in (proc / "status").read_text().splitlines())
            assert int(status["SigIgn"], 16) & ~_IGNORED == 0
            assert status.get("THP_enabled", "1") == "1"
            for task in (proc / "task").iterdir():
                assert os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER
                assert os.sched_getaffinity(int(task.name)) == os.sched_getaffinity(0)
            until(lambda pid=pid: stack_of_threads(pid) >= 8 << 20)  # of one that sleeps; some of ours ask for less
        client.stdin.write(b".")


def stack_of_threads(pid):
    """Bytes, of the largest mapping in which a thread's stack pointer lies, but for the main thread's."""
    pointers = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        words = (task / "syscall").read_text().split()
        if int(task.name) != pid and len(words) > 2:
            pointers.append(int(words[-2], 16))
    spans = [line.split()[0].split("-") for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    spans = [(int(begin, 16), int(end, 16)) for begin, end in spans]
    return max(end - begin for begin, end in spans for pointer in pointers if begin <= pointer < end)


@pytest.fixture(autouse=True)
def no_manager(tmp_path, monkeypatch):
    """No manager of systemd's starts devices here: `test_user_manager.py` is about that."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


SPACE = "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
IDLE = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"


@pytest.mark.parametrize(
    ("how", "word"),
    [
        (CPU, "RLIMIT_CPU 60"),
        *(pytest.param(*case, marks=pytest.mark.integration) for case in ((NICE, NICE_WORDS), (IDLE, "SCHED_IDLE"))),
    ],
)
def test_a_client_with_limits_starts_no_device_for_others(place, kit, how, word):
    """A client whose limits a device would keep starts one for itself, and is told; others get one without."""
    with limited(how) as client:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        with driver.connect() as device:
            assert {device.service_pid, device.engine_pid}.isdisjoint(pids)
            for pid in (device.service_pid, device.engine_pid):
                assert limits_of(pid)["Max cpu time"] == ("unlimited", "unlimited")
                assert os.getpriority(os.PRIO_PROCESS, pid) == DEVICE_NICE
                assert os.sched_getscheduler(pid) == os.SCHED_OTHER
        _, said = client.communicate(b".")
        assert "device 'reference' is started for this program and those with the same limits alone" in said.decode()
        assert word in said.decode()
    assert client.returncode == 0


@pytest.mark.integration
def test_a_client_with_limits_uses_the_device_of_all(place, kit):
    """A client with limits uses a device that runs already."""
    with driver.connect() as device, limited(CPU + "\n" + NICE) as client:
        assert [int(pid) for pid in client.stdout.readline().split()] == [device.service_pid, device.engine_pid]
        client.stdin.write(b".")


@pytest.mark.integration
def test_clients_with_the_same_limits(place, kit):
    """Programs with the same limits share a device; one with limited processor time has its own: time is used up."""
    with limited(SPACE) as one, limited(SPACE) as two:
        assert one.stdout.readline() == two.stdout.readline() != b""
        one.stdin.write(b".")
        two.stdin.write(b".")
    with limited(CPU) as one, limited(CPU) as two:
        pids = one.stdout.readline().split(), two.stdout.readline().split()
        assert set(pids[0]).isdisjoint(pids[1])
        assert all(map(len, pids))
        one.stdin.write(b".")
        two.stdin.write(b".")


@pytest.mark.integration
def test_doctor_tells_what_a_device_has_inherited(place, kit):
    """`burst doctor` names the limits that a running device keeps, and whose control group it is in."""
    with limited(NICE) as client:
        assert client.stdout.readline()
        with driver.connect():
            findings = list(running.devices())
        client.stdin.write(b".")
    found = {finding.subject.partition(",")[0]: finding for finding in findings if "process" in finding.subject}
    apart = next(name for name in found if name.startswith("reference.limited-"))
    assert (found["reference"].state, found[apart].state) == ("ok", "note")
    assert f"has inherited {NICE_WORDS}" in found[apart].found
    assert [finding.state for finding in findings if finding.subject.endswith("control group")] == ["ok", "ok"]


def test_ordinary_processes_pass_nothing_on():
    """A process without limits of its own shares its device."""
    assert kept() == {}
