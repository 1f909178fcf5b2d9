"""`burst doctor`: what it finds, on ordinary machines and on odd ones, and how it ends."""

import errno
import json
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import refused_calls

from burst_engine.names import install_command
from driver import doctor
from driver.devices import Missing, missing, names
from driver.devices.litert import LiteRtDevice
from driver.doctor import examination, installation, latency_hint, machine
from driver.finding import examined
from driver.interface import Needs

MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}

FILTERED = """
import errno, sys
sys.path.insert(0, sys.argv[2])
from refused_calls import refuse
refuse(errno.EPERM, *map(int, sys.argv[1].split(",")))
from driver.cli import main
sys.argv[1:] = ["doctor", "--json"]
main()
"""


def found(check):
    """By subject."""
    return {finding.subject: finding for finding in check()}


@pytest.fixture
def root(monkeypatch, tmp_path):
    """A file system of its own for what the kernel says; writes a file there."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(latency_hint, "ROOT", tmp_path)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write


def burst(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", "from driver.cli import main; main()", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


class TestCommand:
    """What is printed, and the exit status."""

    @pytest.mark.integration
    def test_quiet_and_the_summary(self, place):
        """--quiet leaves out what is ok; the last line counts all; figures without a limit say so."""
        quiet = burst("--quiet").stdout.splitlines()
        assert not any(line.startswith("ok ") for line in quiet)
        warnings, notes, ok = (int(word.split()[0]) for word in quiet[-1].split(", "))
        assert (warnings, notes) == tuple(sum(line.startswith(word) for line in quiet) for word in ("warning", "note"))
        assert ok > 20

    @pytest.mark.integration
    def test_json(self, place):
        """Every finding has its fields; the limits in force are there; a machine on which tests run has no warning."""
        done = burst("--json")
        findings = json.loads(done.stdout)
        assert all(entry.keys() == {"subject", "state", "found", "why", "remedy"} for entry in findings)
        subjects = {entry["subject"]: entry for entry in findings}
        assert subjects["client_bursts"]["found"] == "256"
        assert subjects["fmq._core"]["state"] == subjects["burst._core"]["state"] == "ok"
        assert subjects["device reference"]["found"].endswith("; needs: nothing")
        assert "; needs: reads ~/.config/burst/litert.toml, " in subjects["device litert"]["found"]
        assert {"device reference", "kernel", "futex_waitv", "/dev/shm", "RLIMIT_FSIZE"} <= subjects.keys()
        assert [entry for entry in findings if entry["state"] == "warning"] == []
        assert done.returncode == 0
        assert place.files() == []  # nothing was started

    @pytest.mark.integration
    def test_warning(self, place, tmp_path):
        """A file of limits that no device can start with is a warning, with what to do, and the status 1."""
        file = tmp_path / ".config/burst/limits.toml"
        file.parent.mkdir(parents=True)
        file.write_text("client_burst = 3\n")
        done = burst(env={**os.environ, "HOME": str(tmp_path)})
        assert done.returncode == 1
        lines = done.stdout.splitlines()
        (n,) = [n for n, line in enumerate(lines) if line.startswith("warning")]
        assert "client_burst = 3: the limits are" in lines[n]
        assert [line.strip() for line in lines[n + 1 : n + 3]] == [
            "no device starts",
            "correct that line, or remove the file",
        ]

    @pytest.mark.integration
    def test_start(self, place):
        """With --start, each installed device whose libraries are there is started and named with its processes."""
        findings = json.loads(burst("--json", "--start").stdout)
        starts = {entry["subject"]: entry for entry in findings if entry["subject"].startswith("start of ")}
        assert set(starts) == {f"start of {name}" for name in names() if not missing(name)}
        assert all(entry["state"] == "ok" for entry in starts.values())
        assert "reference.sock" in place.files()

    @pytest.mark.integration
    @pytest.mark.skipif(platform.machine() not in MEMFD_CREATE, reason="whose numbers of system calls are not known")
    def test_filter(self, place):
        """In a sandbox that refuses memfd_create and futex_waitv, the one is a warning and the other a note."""
        refused = f"{MEMFD_CREATE[platform.machine()]},{refused_calls.FUTEX_WAITV}"
        done = subprocess.run(
            [sys.executable, "-c", FILTERED, refused, Path(refused_calls.__file__).parent],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        states = {entry["subject"]: (entry["state"], entry["found"]) for entry in json.loads(done.stdout)}
        assert states["memfd_create and seals"] == ("warning", "refused with EPERM")
        assert states["futex_waitv"] == ("note", "refused with EPERM")
        assert states["seccomp"][1].startswith("a filter")


class TestOddSystems:
    """Nothing that cannot be read is more than unknown."""

    @pytest.mark.integration
    def test_nothing_to_read(self, root, monkeypatch):
        """On a machine without /proc, /sys and /dev/shm every check of it still ends, with "unknown"."""
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="plan9"))
        for check in (machine.kernel, machine.container, machine.processors, machine.memory, machine.shared_memory):
            assert "unknown" in " ".join(finding.found for finding in check())
        assert [finding.found for finding in machine.huge_pages()] == ["unknown", "unknown"]
        assert all(finding.state != "warning" for finding in doctor.examine())

    def test_a_check_that_fails(self, monkeypatch):
        """A check that raises is a note, and those after it are made."""

        def broken():
            raise RuntimeError("odd")

        assert [(f.state, f.found) for f in examined("it", broken)] == [("note", "unknown: RuntimeError: odd")]
        monkeypatch.setattr(examination, "CHECKS", {"one": broken, "two": machine.tried})
        monkeypatch.setattr(examination, "installed_gateways", list)
        assert len(doctor.examine()) == 1 + len(machine.CALLS)

    @pytest.mark.parametrize(
        ("release", "state"),
        [("4.19.0-generic", "warning"), ("5.5", "warning"), ("5.6.1", "note"), ("5.16.0-1", "ok"), ("6.1", "ok")],
    )
    def test_kernels(self, monkeypatch, release, state):
        """Before 5.6 nothing works, and before 5.16 something is slower."""
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
        assert found(machine.kernel)["kernel"].state == state

    @pytest.mark.parametrize(("version", "state"), [(0, "note"), (3, "note"), (6, "ok"), (7, "ok")])
    def test_landlock(self, monkeypatch, version, state):
        """Without Landlock, or with one that does not confine signals, a note says what is not confined."""
        monkeypatch.setattr(machine.landlock, "abi", lambda: version)
        finding = found(machine.container)["Landlock"]
        assert (finding.state, bool(finding.remedy)) == (state, state == "note")

    @pytest.mark.parametrize(
        ("path", "text", "subject", "check"),
        [
            ("sys/fs/cgroup/cpu.max", "150000 100000", "CPU quota", machine.processors),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave", "governor", machine.processors),
            ("proc/meminfo", "MemAvailable:   1000 kB\n", "memory", machine.memory),
        ],
    )
    def test_notes(self, root, path, text, subject, check):
        """A CPU quota, a slow governor and little memory are notes, with why and what to do."""
        root(path, text)
        finding = found(check)[subject]
        assert finding.state == "note"
        assert finding.why
        assert finding.remedy

    def test_one_processor(self, monkeypatch):
        """Where client and device share one, nobody polls: a note."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        assert found(machine.processors)["CPUs"].state == "note"

    @pytest.mark.parametrize(
        ("has_file", "latencies", "state", "words"),
        [
            (True, "0 1 133", "ok", "keeps processors out of the deeper of them: the deepest idle state takes 133 us"),
            (True, "0 1", "ok", "may be opened; no effect: the deepest idle state takes 1 us"),
            (True, "", "ok", "which states there are is unknown"),
            (False, "0 1 133", "note", "refused with ENOENT"),
            (False, "0 1", "ok", "it would change nothing"),
        ],
    )
    def test_idle_states_of_open_bursts(self, root, has_file, latencies, state, words):
        """Bursts keep processors from deep idle states: if there are any, and the file may be opened."""
        for n, latency in enumerate(latencies.split()):
            root(f"sys/devices/system/cpu/cpu0/cpuidle/state{n}/latency", latency)
        if has_file:
            root("dev/cpu_dma_latency", "")
        finding = found(latency_hint.hint)["open bursts, idle states"]
        assert (finding.state, bool(finding.remedy)) == (state, state == "note")
        assert words in finding.found

    @pytest.mark.parametrize(
        ("governor", "words"),
        [
            ("schedutil", "schedutil goes by that"),
            ("powersave", "chosen by the governor"),
            (None, "no effect on clocks"),
        ],
    )
    def test_clock_of_open_bursts(self, root, monkeypatch, governor, words):
        """Where the kernel has clamps, the governor decides; where it has none, that is a note."""
        monkeypatch.setattr(latency_hint, "set_least", lambda value: None)
        if governor:
            root("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", governor)
        finding = found(latency_hint.hint)["open bursts, clock"]
        assert (finding.state, words in finding.found) == ("ok", True)

        def refuse(value):
            raise OSError(errno.EOPNOTSUPP, "no")

        monkeypatch.setattr(latency_hint, "set_least", refuse)
        assert found(latency_hint.hint)["open bursts, clock"].state == "note"

    def test_refused_calls(self, monkeypatch):
        """A call that is refused is told by the error's name."""

        def refuse():
            raise OSError(errno.ENOSYS, "no")

        monkeypatch.setattr(machine, "CALLS", [machine.CALLS[0]._replace(attempt=refuse)])
        (finding,) = machine.tried()
        assert (finding.state, finding.found) == ("warning", "refused with ENOSYS")

    def test_missing_package(self, monkeypatch):
        """A package that cannot be loaded is a warning."""
        monkeypatch.setitem(sys.modules, "blake3", None)
        finding = found(installation.packages)["blake3"]
        assert finding.state == "warning"
        assert "blake3" in finding.found

    def test_no_posix_ipc(self, monkeypatch):
        """Nothing is amiss: fmq opens named memory itself."""

        def absent(name):
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", absent)
        finding = found(installation.packages)["posix_ipc"]
        assert finding.state == "ok"
        assert finding.found.startswith("not installed")

    @pytest.mark.parametrize(("limit", "state"), [(2**10, "warning"), (2**25, "note"), (2**40, "ok")])
    def test_size_of_files(self, monkeypatch, limit, state):
        """RLIMIT_FSIZE bounds shared memory, too."""
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        assert found(machine.limits_of_the_process)["RLIMIT_FSIZE"].state == state

    def test_few_descriptors(self, monkeypatch):
        """A thousand descriptors are few for bursts: a note."""
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
        assert found(machine.limits_of_the_process)["RLIMIT_NOFILE"].state == "note"


class TestFolders:
    """Where sockets lie, and where something is kept."""

    def test_runtime_directory(self, monkeypatch, tmp_path):
        """One that others may enter, or whose path is too long for a socket, is a warning."""
        open_to_all = tmp_path / "open"
        open_to_all.mkdir(mode=0o755)
        for path in (open_to_all, tmp_path / ("x" * 100)):
            monkeypatch.setenv("BURST_RUNTIME_DIR", str(path))
            finding = found(machine.runtime)["runtime directory"]
            assert finding.state == "warning"
            assert str(path) in finding.found

    def test_kept(self, monkeypatch, tmp_path):
        """Folders that are not made yet are looked for where they would be made."""
        monkeypatch.setenv("HOME", str(tmp_path / "new"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        findings = found(machine.kept)
        assert {finding.state for finding in findings.values()} == {"ok"}
        assert "not created yet" in findings["state folder"].found
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert {finding.state for finding in found(machine.kept).values()} == {"note"}


def test_a_device_that_is_not_installed(monkeypatch, place):
    """An extra that was left out is a note with what installs it, and the device is not started."""
    monkeypatch.setattr(LiteRtDevice, "missing", lambda: "a part is missing")
    monkeypatch.setattr(installation, "names", lambda: ["litert"])
    (finding,) = installation.installed()
    assert (finding.state, finding.found) == ("note", "not installed: a part is missing")
    assert finding.remedy == install_command("litert")
    assert list(installation.started()) == []
    assert place.pids() == []


@pytest.mark.parametrize(("node", "state"), [("/dev/null", "note"), ("/dev/no-such-gpu", "ok")])
def test_a_device_for_hardware_that_is_not_there(monkeypatch, node, state):
    """A GPU's device that is not installed is a note where there is a GPU, and else nothing that --quiet would show."""
    kind = SimpleNamespace(type="GPU", needs=Needs(write_paths=(node,)))
    monkeypatch.setattr(installation, "names", lambda: ["other-gpu"])
    monkeypatch.setattr(installation, "device_class", lambda _: kind)
    monkeypatch.setattr(installation, "missing", lambda _: Missing("a part is missing", "install it"))
    monkeypatch.setattr(installation, "NODES", ())
    (finding,) = installation.installed()
    assert (finding.state, finding.remedy) == (state, "install it" if state == "note" else "")


def test_a_device_that_cannot_be_loaded(monkeypatch):
    """Vendors' code may fail in any way when it is loaded: a warning that names the device."""

    def load(name):
        raise RuntimeError(f"no {name} here")

    monkeypatch.setattr(installation, "device_class", load)
    findings = found(installation.installed)
    assert {finding.state for finding in findings.values()} == {"warning"}
    assert findings["device litert"].found == "cannot be loaded: no litert here"
