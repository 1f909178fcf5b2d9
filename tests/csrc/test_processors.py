"""What processors.c makes of a machine's files: machine.c, on folders that look like /proc and /sys.

The files are made up, as one machine has one topology and one version of control groups; tests/fmq/test_polling.py
has a real group.
"""

import os
import re
import subprocess

import pytest

THRIFTY, FREELY = 5000, 0  # ns of polling


@pytest.fixture
def files(tmp_path):
    """A function that writes files of the machine, by their paths."""

    def make(**texts):
        for path, text in texts.items():
            file = tmp_path / "machine" / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return tmp_path / "machine"

    return lambda texts: make(**texts)


@pytest.fixture
def look(build, files):
    """A function that returns what is found under the files."""

    def run(texts, mine=1, theirs=2):
        return read(build("machine.c", "fmq/processors.c")(files(texts), str(mine), str(theirs)))

    return run


def read(line):
    most, usable, siblings, quota = re.fullmatch(r"most (\d+) usable (\d+) siblings (\d) quota (.*)\n", line).groups()
    return int(most), int(usable), siblings == "1", quota


def grouped(path, files, version=2):
    """A process in a group of that path, and files beneath the place where groups are mounted."""
    mount = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/cpu,cpuacct"
    line = f"0::{path}" if version == 2 else f"7:memory:/else\n3:cpu,cpuacct:{path}\n0::/"
    return {"/proc/self/cgroup": line} | {f"{mount}{name}": text for name, text in files.items()}


def test_a_machine_without_files_forbids_nothing(look):
    """Also in a sandbox: no quota, no siblings, and as many processors as this process may use."""
    assert look({}) == (FREELY, len(os.sched_getaffinity(0)), False, "")


QUOTAS = {
    "none": ("/a", {"/a/cpu.max": "max 100000"}, 2, FREELY, ""),
    "half a processor": ("/a", {"/a/cpu.max": "50000 100000"}, 2, THRIFTY, "/a"),
    "two processors": ("/a", {"/a/cpu.max": "200000 100000"}, 2, FREELY, "/a"),
    "just below two": ("/a", {"/a/cpu.max": "199000 100000"}, 2, THRIFTY, "/a"),
    "of a group above": ("/a/b/c", {"/a/cpu.max": "90000 100000", "/a/b/c/cpu.max": "max 100000"}, 2, THRIFTY, "/a"),
    "the least of several": (
        "/a/b",
        {"/a/cpu.max": "300000 100000", "/a/b/cpu.max": "10000 20000"},
        2,
        THRIFTY,
        "/a/b",
    ),
    "in a container": ("/", {"/cpu.max": "50000 100000"}, 2, THRIFTY, ""),
    "above what is mounted": ("/docker/0123", {"/cpu.max": "50000 100000"}, 2, THRIFTY, ""),
    "version 1": ("/a", {"/a/cpu.cfs_quota_us": "50000", "/a/cpu.cfs_period_us": "100000"}, 1, THRIFTY, "/a"),
    "version 1, none": ("/a", {"/a/cpu.cfs_quota_us": "-1", "/a/cpu.cfs_period_us": "100000"}, 1, FREELY, ""),
    "of nonsense": ("/a", {"/a/cpu.max": "much"}, 2, FREELY, ""),
    "of an empty file": ("/a", {"/a/cpu.max": ""}, 2, FREELY, ""),
    "without a period": ("/a", {"/a/cpu.max": "50000 0"}, 2, FREELY, ""),
    "a path that is too long": ("/a" * 400, {"/cpu.max": "50000 100000"}, 2, THRIFTY, ""),
}


@pytest.mark.parametrize(("path", "files_of", "version", "most", "where"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_below_two_processors_shortens_polling(look, tmp_path, path, files_of, version, most, where):
    """The least of the group's and of those above it, in both versions of control groups."""
    found = look(grouped(path, files_of, version))
    mount = tmp_path / "machine/sys/fs/cgroup" / ("cpu,cpuacct" if version == 1 else "")
    has_quota = where or most == THRIFTY
    assert (found[0], found[3]) == (most, f"{str(mount).rstrip('/')}{where}" if has_quota else "")


@pytest.mark.parametrize(("throttled", "most"), [(3, FREELY), (4, THRIFTY)])
def test_a_group_that_was_throttled_since_the_last_look_polls_less(build, files, throttled, most):
    """A quota of many processors is short, too, once it was used up; and not because it was long ago."""
    group = {"/a/cpu.max": "800000 100000", "/a/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_usec 5"}
    folder = files(grouped("/a", group))
    binary = build("machine.c", "fmq/processors.c")(folder, "1", "2") and folder.parent / "program"
    with subprocess.Popen([binary, folder, "1", "2", "2"], stdin=-1, stdout=-1, text=True) as program:
        assert read(program.stdout.readline())[0] == FREELY
        files({"/sys/fs/cgroup/a/cpu.stat": f"nr_periods 9\nnr_throttled {throttled}"})
        said, _ = program.communicate("look\n", timeout=20)
    assert read(said)[0] == most


def topology(*lists):
    """Processors from 0 on, each with its list of siblings."""
    text = {f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": of for n, of in enumerate(lists)}
    return text | {"/sys/devices/system/cpu/smt/active": "1"}


@pytest.mark.parametrize(
    ("mine", "theirs", "siblings"),
    [(1, 3, True), (1, 2, False), (3, 1, True), (2, 2, True), (1, 0, False), (1, 9, False)],
)
def test_threads_of_one_core_are_known_by_their_list(look, mine, theirs, siblings):
    """0 and 2 are one core, 1 and 3 another; a processor without a file is a core of its own."""
    assert look(topology("0,2", "1,3", "0,2", "1,3"), mine, theirs)[2] == siblings


def test_a_list_may_be_a_range(look):
    """0-1 as 0,1."""
    assert look(topology("0-1", "0-1"))[2]


def test_cores_without_siblings_are_not_looked_up(look):
    """Where the kernel says that no core has several threads."""
    assert not look(topology("0-1", "0-1") | {"/sys/devices/system/cpu/smt/active": "0"})[2]
