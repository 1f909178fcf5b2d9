"""Wherever a program runs, the first use of devices gives what is right, or an error of ours with the remedy."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import places
import pytest

import driver
from driver import config, interpreter

PAGE = Path(__file__).resolve().parents[2] / "docs/howto/containers.md"
OURS = ("burst", "driver", "fmq")


def check(place, folder):
    """Each step is right, or says what the table says; the device must be used where the table says nothing."""
    if why := places.unavailable(place):
        pytest.skip(why)
    told = places.answers(place, folder)
    wrong = {step: words for step, words in told.items() if words}
    for step, (module, kind, text, trace) in wrong.items():
        assert module.partition(".")[0] in OURS, f"{step}: {kind}: {text}\n{trace}"
        assert place.says, f"{step}: {kind}: {text}"
        assert place.says in text, f"{step}: {text}"
    if place.says:
        assert wrong, "nothing was refused"


@pytest.fixture
def folder():
    """A new folder of a short path."""

    with tempfile.TemporaryDirectory(prefix="burst-p-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.mark.integration
@pytest.mark.parametrize("place", places.USUAL, ids=lambda place: place.title)
def test_first_use(place, folder):
    """No raw error of the system comes out of the library."""
    check(place, folder)


@pytest.mark.integration
@pytest.mark.parametrize("place", places.RARE, ids=lambda place: place.title)
def test_first_use_in_rare_places(place, folder):
    """The same, in places that take longer to make, or are seldom met."""
    check(place, folder)


def test_the_page_lists_the_places():
    """The page on containers has each place of the table, what it says there, and no other."""
    rows = re.findall(r"^\| (.+?) \| (works|says .+?) \|$", PAGE.read_text(), re.MULTILINE)
    table = (*places.USUAL, *places.RARE)
    assert rows == [(each.title, f"says `{each.says}`" if each.says else "works") for each in table]


@pytest.mark.parametrize("which", ["service_pid", pytest.param("engine_pid", marks=pytest.mark.integration)])
def test_a_stopped_device_is_named(place, which):
    """Who connects to a device of which a process is stopped is told which, and goes on when that does."""
    with driver.connect() as device:
        pid = getattr(device, which)
        with driver.connect():
            os.kill(pid, signal.SIGSTOP)
            try:
                with pytest.raises(
                    driver.DeviceFailed, match=rf"'reference'.* process {pid} .* stopped; .*kill -CONT {pid}"
                ):
                    driver.connect()
                assert f"process {pid} " in {d.name: d.status.reason for d in driver.devices()}["reference"]
            finally:
                os.kill(pid, signal.SIGCONT)
        with driver.connect() as again:
            assert again.service_pid == device.service_pid


def test_another_time_namespace_is_refused(place):
    """A client whose clock counts from another beginning than the device's is told; one of its own works there."""
    words = ("unshare", "--time", "--monotonic", "1000", "--fork")
    if why := places.refusal(words):
        pytest.skip(why)
    with driver.connect():
        code = "import driver\ntry:\n driver.connect()\nexcept driver.DeviceFailed as error:\n print(error)"
        done = subprocess.run([*words, sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "another time namespace: its CLOCK_MONOTONIC is -1000." in done.stdout
        assert "BURST_RUNTIME_DIR" in done.stdout


def test_a_fault_of_the_runtime_directory_is_told_once(place, caplog):
    """Not for each of the devices that cannot be started for it."""
    place.path.chmod(0o755)
    m = driver.ModelBuilder()
    m.output(m.operation("ADD", m.input("float32", (1,)), np.ones(1, np.float32), 0))
    with driver.compile(m.build(), ["reference", "onnxruntime", "litert", "cpu"]) as compiled:
        assert compiled.run([1])[0] == 2
    told = [record.getMessage() for record in caplog.records if "0700" in record.getMessage()]
    assert len(told) == 1
    assert "reference, onnxruntime, litert" in told[0]
    place.path.chmod(0o700)


@pytest.mark.parametrize("path", ["python", "/nonexistent/python", "/etc/passwd", "/", b"", Path("bin/python")])
def test_what_cannot_be_a_python_is_refused(path):
    """set_executable takes the absolute path of a program, and nothing else."""
    with pytest.raises(ValueError, match="give the absolute path of a Python"):
        driver.set_executable(path)


def test_a_frozen_application_is_no_python(monkeypatch):
    """It is neither taken nor accepted, and the remedy is told."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ValueError, match="would start itself"):
        driver.set_executable(sys.executable)
    with pytest.raises(driver.DeviceFailed, match=r"frozen application.*driver\.set_executable"):
        interpreter.executable()


@pytest.mark.parametrize("value", [None, "", "relative/python", "/usr/bin/uwsgi", "/bin/false"])
def test_the_python_of_the_environment_is_found(monkeypatch, value):
    """Where sys.executable is no Python, or none at all."""
    monkeypatch.setattr(sys, "executable", value)
    found = Path(interpreter.executable())
    assert found.parent == Path(sys.prefix, "bin")
    assert found.name.startswith("python")


def test_a_home_of_another_account_is_not_used(monkeypatch, tmp_path):
    """The table of accounts counts where HOME is missing, relative or another account's; a home to be made is used."""
    listed = config.listed_home()
    for value in ("", "relative", "~", "/etc/passwd/below"):
        monkeypatch.setenv("HOME", value)
        assert config.home() == listed
    monkeypatch.delenv("HOME")
    assert config.home() == listed
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    assert config.in_home("~/.config") == tmp_path / "new/.config"
    if not os.getuid():
        (tmp_path / "other").mkdir()
        os.chown(tmp_path / "other", places.STRANGER, places.STRANGER)
        monkeypatch.setenv("HOME", str(tmp_path / "other"))
        assert config.home() == listed


@pytest.mark.usefixtures("home", "connect")
def test_shared_devices_remember_in_a_folder_that_stays(shared):
    """Also in a file whose tests have a home of their own: its end would take the folder from devices that go on."""
    assert os.environ["HOME"] == f"{shared.path}-home"
