"""What is built can be installed alone, and works."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

pytestmark = pytest.mark.integration

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ["burst_device.h", "burst_device.c", "BurstDeviceConfig.cmake"]
EXTENSIONS = ["burst/_core.abi3.so", "burst/_hot.abi3.so", "fmq/_core.abi3.so", "fmq/_hot.abi3.so"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True, capture_output=True, timeout=240)
    return out


def test_the_wheel_holds_the_packages_and_their_extensions(built):
    """One abi3 wheel with the three packages, their type marks and the extensions; and no device of the tests."""
    (wheel,) = built.glob("*-cp311-abi3-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "burst_engine",
        "fmq",
        "burst",
        "driver",
    }
    assert sorted(name for name in names if name.endswith(".so")) == EXTENSIONS
    assert {"driver/demos/detector.npz", "driver/demos/audio_net.npz", "driver/demos/edges.onnx"} <= set(names)
    assert {f"driver/demos/web/page/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert {f"{package}/py.typed" for package in ("fmq", "burst", "driver")} <= set(names)
    assert {name.replace(".abi3.so", ".pyi") for name in EXTENSIONS} <= set(names)
    assert "driver/service/burst@.service" in names
    assert {f"driver/devices/library/{file}" for file in LIBRARY} <= set(names)
    assert not [name for name in names if "burst_test_devices" in name]


def test_the_sdist_holds_the_sources_and_nothing_generated(built):
    """Everything that a build needs, and no file that cffi or a compiler made."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "csrc/fmq/api.h",
        "csrc/burst/api.h",
        "csrc/CMakeLists.txt",
        "pyproject.toml",
        "LICENSE",
        "tests/test_packaging.py",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".o", "_core.c"))]


def installed(wheel, folder):
    """An empty environment with that wheel, extras included: its folder of programs."""
    venv.create(folder)  # our pip fills it: a pip of its own takes longer than all the rest
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, wheel], check=True, capture_output=True, timeout=240)
    return folder / "bin"


def run_alone(command, folder):
    """What a program prints, away from the sources."""
    environment = {"PATH": "/usr/bin:/bin", "BURST_RUNTIME_DIR": str(folder / "run")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_alone_runs_a_model(built, tmp_path):
    """In an empty environment, away from the sources, the wheel runs the guide's program that needs no file."""
    (wheel,) = built.glob("*.whl")
    programs = installed(wheel, tmp_path / "empty")
    program = tmp_path / "block.py"
    program.write_text((ROOT / "docs/start.md").read_text().split("```python\n")[2].split("```")[0])
    assert "[[3. 3. 3. 3.]]" in run_alone([programs / "python", "-W", "error", program], tmp_path)
    for name in ("burst", "burst-engine"):  # the command works without an extra
        assert '"reference"' in run_alone([programs / name, "devices", "--json"], tmp_path)
    doctor = [programs / "burst", "doctor", "--quiet"]
    done = subprocess.run(doctor, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert re.search(r"^\d+ warnings?, \d+ notes?, \d+ ok$", done.stdout, re.MULTILINE)
    assert done.stderr == ""


@pytest.mark.stress
def test_the_wheel_with_its_extra_runs_the_demos(built, tmp_path):
    """In an empty environment, `burst-engine[demo]` is all that both demos need; what they leave is here."""
    (wheel,) = built.glob("*.whl")
    burst = installed(f"{wheel}[demo]", tmp_path / "empty") / "burst"
    camera = json.loads(run_alone([burst, "demo", "camera", "--frames", "5", "--fps", "0", "--json"], tmp_path))
    audio = json.loads(run_alone([burst, "demo", "audio", "--seconds", "2", "--fast", "--json"], tmp_path))
    assert camera["frames"] == 5
    assert audio["keys"]["network"]["wrong"] == 0
    left = {str(path.relative_to(tmp_path)) for path in (tmp_path / "burst-demo").iterdir()}
    assert left == {*camera["files"], *audio["files"]}


@pytest.mark.stress
def test_a_device_from_outside_is_installed_and_passes(built, tmp_path):
    """The wheels of Burst and of examples/device-plugin, in an empty environment: its entry point brings a device that
    `burst vts` finds nothing wrong with, and its own tests pass."""
    plugin = ROOT / "examples/device-plugin"
    run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, plugin])
    (wheel,), (ours,) = tmp_path.glob("burst_blocks-*.whl"), built.glob("*.whl")
    venv.create(tmp_path / "empty")
    python = tmp_path / "empty/bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*install, f"{ours}[cli,vts]", f"{wheel}[test]", "--find-links", built])
    alone = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "BURST_RUNTIME_DIR": str(tmp_path / "run")}}
    named = run([python, "-c", "import driver; print(*(device.name for device in driver.devices()))"], **alone)
    assert "blocks" in named.split()
    assert '"failed": 0' in run([tmp_path / "empty/bin/burst", "vts", "blocks", "--json"], **alone)
    run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", plugin, plugin], **alone)


def run(command, **how):
    """What it prints; its complaints are the test's failure."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def free_threaded():
    """A free-threaded CPython 3.14 or later, with pip and headers."""
    python = os.environ.get("BURST_FREE_THREADED_PYTHON") or shutil.which("python3.14t")
    if not python:
        pytest.skip(
            "no free-threaded Python: set BURST_FREE_THREADED_PYTHON, or put python3.14t on PATH (`uv python install"
            " 3.14t`, or CPython's sources with `./configure --disable-gil && make && make install`)"
        )
    return python


@pytest.mark.stress
def test_free_threaded_python_gets_a_wheel_of_its_own(free_threaded, tmp_path):
    """A cp314t wheel, whose threads do what tests/fmq/test_threads.py claims, and which leaves the global lock off."""

    def run(*command, **how):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    run(free_threaded, "-m", "venv", tmp_path / "empty")
    python, pip = tmp_path / "empty/bin/python", (tmp_path / "empty/bin/python", "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("burst_engine-*.whl")
    tag = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])")
    assert f"-{tag}-{tag}t-linux_" in wheel.name
    run(*pip, "install", wheel, "pytest")
    alone = tmp_path / "alone"  # away from the sources, which have no extension for this interpreter
    shutil.copytree(ROOT / "tests/fmq", alone / "fmq")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON_GIL"}
    told = "import sys, fmq; print(sys._is_gil_enabled())"
    assert run(python, "-W", "error", "-c", told, cwd=alone, env=environment) == "False"
    test = alone / "fmq/test_threads.py"
    environment["PYTHON_GIL"] = "0"
    run(python, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", test, cwd=alone, env=environment)
