"""Places where a program may run: what each takes away from the first use of devices, and what it may say.

`test_places.py` runs `first_use.py` in each; docs/howto/containers.md lists them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import accounts

FIRST_USE = Path(__file__).with_name("first_use.py")
ALL = "devices,reference,onnxruntime,default,burst devices,burst doctor"
STRANGER = 54_321  # a uid without an entry


class Situation(NamedTuple):
    """A way to start a program.

    preparation: Python code that the program runs first. words: the command that starts it. shell: commands before it,
    in a mount namespace of its own; RUN is the runtime directory, which is there from before. environment: changes;
    None removes. says: what the error has to have in it where a device cannot be used; "": it has to be right.
    """

    title: str
    preparation: str = "pass"
    words: tuple[str, ...] = ()
    shell: str = ""
    flags: tuple[str, ...] = ()
    environment: dict[str, str | None] = {}  # noqa: RUF012 (of a NamedTuple)
    says: str = ""
    uid: int = 0
    steps: str = "devices,reference"
    needs_root: bool = False


def _limit(name: str, most: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_{name}, ({most}, {most}))"


def _refusing(*calls: str) -> str:
    """Return a program's first lines, by which system calls fail: each of these has an errno and the numbers."""
    lines = "import errno, platform, sys", f"sys.path.append({str(FIRST_USE.parents[1])!r})"
    return "\n".join((*lines, "from refused_calls import refuse", *(f"refuse(errno.{each})" for each in calls)))


def _streams(*closed: str) -> tuple[str, ...]:
    return ("sh", "-c", f'exec "$@" {" ".join(closed)}', "sh")


_OWN = "mount --make-rprivate / && "
_CLONE3 = 435
_NEWER = 424, 434, _CLONE3, 436, 444, 445, 446, 449  # pidfd_open, landlock, futex_waitv
_NEWER_BUT_CLONE3 = tuple(number for number in _NEWER if number != _CLONE3)  # without which no thread starts
# unshare, setns, mount, umount2, pivot_root, keyctl, add_key, request_key, bpf, perf_event_open, userfaultfd, kcmp,
# move_pages, mbind, set_mempolicy, get_mempolicy, syslog, open_by_handle_at, pidfd_getfd; clone3 as if there were none
_REFUSED = {
    "x86_64": (272, 308, 165, 166, 155, 250, 248, 249, 321, 298, 323, 312, 279, 237, 238, 239, 103, 304, 438),
    "aarch64": (97, 268, 40, 39, 41, 219, 217, 218, 280, 241, 282, 272, 239, 235, 237, 236, 116, 265, 438),
}
_OF_CONTAINERS = f"EPERM, *{_REFUSED}[platform.machine()]", f"ENOSYS, {_CLONE3}"
_READ_ONLY = (
    "touch RUN/reference.lock && mount --bind RUN/.. RUN/.. && mount --bind RUN RUN "
    "&& mount -o remount,bind,ro RUN && mount -o remount,bind,ro /"
)
_FROZEN = "import sys; sys.frozen = True; sys.executable = '/bin/true'"

USUAL = (
    Situation("no standard streams: descriptors 0, 1 and 2 are closed", words=_streams("<&-", ">&-", "2>&-")),
    Situation("`sys.executable` is no Python, or none: uWSGI, embedding", "import sys; sys.executable = None"),
    Situation("a frozen application without a Python", _FROZEN, says="driver.set_executable"),
    Situation("23 descriptors", _limit("NOFILE", 23), says="descriptors"),
    Situation("RLIMIT_CORE of 0, soft and hard", _limit("CORE", 0)),
    Situation(
        "a runtime directory of mode 0755",
        "import os; os.chmod(os.environ['BURST_RUNTIME_DIR'], 0o755)",
        says="BURST_RUNTIME_DIR",
    ),
)

RARE = (
    Situation("no standard input", words=_streams("<&-")),
    Situation("no standard output", words=_streams(">&-"), steps=ALL),
    Situation("no standard error", words=_streams("2>&-"), steps=ALL),
    Situation("`sys.stderr` is closed", "import sys; sys.stderr.close()"),
    Situation("`sys.executable` is empty", "import sys; sys.executable = ''"),
    Situation("`sys.executable` is gone", "import sys; sys.executable = '/nonexistent/uwsgi'"),
    Situation(
        "a frozen application that names its Python",
        "import sys; python = sys.executable\n" + _FROZEN + "\nimport driver; driver.set_executable(python)\n"
        "import driver.client.launch as launch; launch.__file__ = '/archive/launch.py'",
    ),
    Situation(
        "a Python that lacks burst-engine (PYTHONPATH, `pip install --target`)",
        "import driver; driver.set_executable('/usr/bin/python3')",
        says="PYTHONPATH",
    ),
    Situation(
        "a program that is named as the Python, and is none",
        "import driver; driver.set_executable('/bin/true')",
        says="/bin/true",
    ),
    *(Situation(f"{n} descriptors", _limit("NOFILE", n), says="descriptors") for n in (6, 8, 10, 12, 16, 20, 22)),
    Situation("HOME does not exist", environment={"HOME": "/nonexistent/home"}),
    Situation("HOME is relative", environment={"HOME": "relative"}),
    Situation("HOME is empty", environment={"HOME": ""}),
    Situation("HOME is ~", environment={"HOME": "~"}, steps=ALL),
    Situation("HOME is a file", environment={"HOME": "/etc/passwd"}),
    Situation(
        "no environment at all",
        environment=dict.fromkeys(
            ("HOME", "PATH", "USER", "LOGNAME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")
        ),
        steps=ALL,
    ),
    Situation("a uid without an entry", uid=STRANGER, needs_root=True),
    Situation(
        "a uid without an entry and without HOME", uid=STRANGER, environment={"HOME": None}, needs_root=True, steps=ALL
    ),
    Situation("HOME of another account", uid=STRANGER, environment={"HOME": "/root"}, needs_root=True),
    Situation(
        "XDG_RUNTIME_DIR and HOME of another account",
        uid=65_534,
        environment={"HOME": "/root", "XDG_RUNTIME_DIR": "/root", "BURST_RUNTIME_DIR": None},
        needs_root=True,
        steps=ALL,
    ),
    Situation(
        "no capabilities, no new privileges",
        words=("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"),
    ),
    Situation(
        "the working directory is gone",
        "import os, tempfile; there = tempfile.mkdtemp(); os.chdir(there); os.rmdir(there)",
    ),
    Situation("umask 777", "import os; os.umask(0o777)"),
    Situation("TMPDIR does not exist", environment={"TMPDIR": "/nonexistent/tmp"}),
    Situation(
        "LC_ALL=C, ASCII streams",
        environment={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        steps=ALL,
    ),
    Situation("python -I -O", flags=("-I", "-O")),
    Situation("python -E -OO", flags=("-E", "-OO")),
    Situation("SIGCHLD is ignored", "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"),
    Situation("RLIMIT_AS of 700 MB", _limit("AS", 700 << 20)),
    Situation("RLIMIT_FSIZE of 64 kB", _limit("FSIZE", 64 << 10), says="RLIMIT_FSIZE"),
    Situation("RLIMIT_STACK of 128 kB", _limit("STACK", 128 << 10)),
    Situation(
        "no more processes or threads (RLIMIT_NPROC)",
        "import numpy; " + _limit("NPROC", 1),
        uid=STRANGER,
        says="run out of resources",
        needs_root=True,
    ),
    Situation("a filter that does not know newer system calls", _refusing(f"ENOSYS, *{_NEWER}")),
    Situation("a filter that refuses newer system calls with EPERM", _refusing(f"EPERM, *{_NEWER_BUT_CLONE3}")),
    Situation("what Docker, Podman and Kubernetes refuse by default", _refusing(*_OF_CONTAINERS)),
    Situation("RLIMIT_MEMLOCK of 0", _limit("MEMLOCK", 0)),
    Situation("RLIMIT_CPU of 30 s", _limit("CPU", 30), steps=ALL),
    Situation("nice -n 19", words=("nice", "-n", "19"), steps=ALL),
    Situation(
        "BURST_RUNTIME_DIR is a file",
        environment={"BURST_RUNTIME_DIR": "/etc/passwd"},
        says="BURST_RUNTIME_DIR",
        steps=ALL,
    ),
    Situation(
        "BURST_RUNTIME_DIR cannot be made", environment={"BURST_RUNTIME_DIR": "/proc/none"}, says="BURST_RUNTIME_DIR"
    ),
    Situation(
        "BURST_RUNTIME_DIR is too long",
        environment={"BURST_RUNTIME_DIR": "/tmp/" + 100 * "x"},
        says="BURST_RUNTIME_DIR",
    ),
    Situation(
        "a lock of another account",
        uid=STRANGER,
        shell="renice 0 $$ >/dev/null; umask 077; touch RUN/reference.lock",  # below `nice` the lock has another name
        says="BURST_RUNTIME_DIR",
        needs_root=True,
    ),
    Situation(
        "a full disk",
        shell=_OWN + "mount -t tmpfs -o size=4k,nr_inodes=2,mode=700 none RUN",
        says="No space left",
        needs_root=True,
    ),
    Situation(
        "everything is read-only, runtime directory and locks are there from before",
        shell=_OWN + _READ_ONLY,
        says="BURST_RUNTIME_DIR",
        needs_root=True,
        steps=ALL,
    ),
    Situation(
        "`ProcSubset=pid`: no /proc/cpuinfo, meminfo, sys",
        words=("unshare", "--pid", "--fork"),
        shell=_OWN + "mount -t proc -o subset=pid proc /proc",
        steps=ALL,
        needs_root=True,
    ),
    Situation(
        "`ProtectProc=invisible` (hidepid=2)",
        words=("unshare", "--pid", "--fork"),
        shell=_OWN + "mount -t proc -o hidepid=2 proc /proc",
        needs_root=True,
    ),
    Situation("no /proc", shell=_OWN + "mount -t tmpfs none /proc", says="mount -t proc", needs_root=True, steps=ALL),
    Situation("no /sys", shell=_OWN + "mount -t tmpfs none /sys", needs_root=True, steps=ALL),
    Situation("no /dev/shm", shell=_OWN + "mount -t tmpfs -o ro none /dev/shm", needs_root=True),
    Situation("no /dev/null", shell=_OWN + "mount -t tmpfs none /dev", says="/dev/null", needs_root=True),
    Situation("process 1 of a PID namespace", words=("unshare", "--pid", "--fork", "--mount-proc"), needs_root=True),
    Situation("a user namespace", words=("unshare", "--user", "--map-root-user"), needs_root=True),
    Situation("an unmapped user namespace", words=("unshare", "--user"), needs_root=True, steps=ALL),
    Situation(
        "network, IPC and UTS namespaces",
        words=("unshare", "--net", "--ipc", "--uts"),
        needs_root=True,
    ),
    Situation(
        "a time namespace of its own",
        words=("unshare", "--time", "--monotonic", "1000", "--fork"),
        needs_root=True,
    ),
)


@cache
def refusal(words: tuple[str, ...]) -> str:
    """Why that command cannot start programs here; "": it can."""
    try:
        done = subprocess.run([*words, "true"], capture_output=True, text=True, check=False, timeout=20)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or f"{words[0]} ended with {done.returncode}" if done.returncode else ""


def unavailable(place: Situation) -> str:
    """Why a program cannot be brought there; "": it can."""
    if place.needs_root and os.geteuid():
        return "only root can make this place"
    if place.uid and accounts.missing():
        return accounts.missing()
    mounts = ("unshare", "--mount") if place.shell else ()
    return (mounts and refusal(mounts)) or (place.words and refusal(place.words)) or ""


def answers(place: Situation, folder: Path) -> dict[str, list[str] | None]:
    """What comes of each step there, as `first_use.py` tells it. `folder`: a new one, of a short path."""
    run, told = folder / "run", folder / "answers"
    for each in (run, folder / "home"):
        each.mkdir(mode=0o700)
        if place.uid:
            os.chown(each, place.uid, place.uid)
    if place.uid:
        os.chown(folder, place.uid, place.uid)
    words = [sys.executable, *place.flags, str(FIRST_USE), str(told), place.preparation, place.steps]
    if place.uid:
        words = accounts.words_as(place.uid, (), words)
    if place.shell:
        commands = place.shell.replace("RUN", str(run)) + ' && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", commands, "sh", *words]
    own = {"BURST_RUNTIME_DIR": str(run), "HOME": str(folder / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    variables = {name: value for name, value in (os.environ | own | place.environment).items() if value is not None}
    done = subprocess.run(
        [*place.words, *words], env=variables, cwd="/", capture_output=True, text=True, timeout=100, check=False
    )
    lines = told.read_text().splitlines() if told.exists() else []
    found = dict(map(json.loads, lines))
    assert list(found) == place.steps.split(","), f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr, done.stderr
    return found
