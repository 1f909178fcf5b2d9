"""Each wheel where it is meant to run: x86-64 in an empty environment of each CPython, aarch64 in an emulator.

A CPython that this system lacks is taken from Debian's next release.
"""

import os
import platform
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import debian_files
import emulated_machine
import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
EMULATOR = "qemu-aarch64-static"

# Another process answers a thousand numbers, each plus one.
EXCHANGE = """
import os, platform
import burst, driver, fmq
there, back = fmq.MessageQueue.create("int64", 8), fmq.MessageQueue.create("int64", 8)
pid = os.fork()
if not pid:
    with there.reader() as reader, back.writer() as writer:
        for _ in range(1000):
            writer.write(reader.read(1, timeout=30) + 1, timeout=30)
    os._exit(0)
with there.writer() as writer, back.reader() as reader:
    for number in range(1000):
        writer.write([number], timeout=30)
        assert reader.read(1, timeout=30)[0] == number + 1
assert os.waitpid(pid, 0)[1] == 0
print("exchanged 1000 on", platform.machine(), platform.python_version())
"""
# The process that holds the other end is killed.
DEATH = """
import os, signal
import fmq
queue, (read_end, write_end) = fmq.MessageQueue.create("int64", 8), os.pipe()
pid = os.fork()
if not pid:
    with queue.writer() as writer:
        os.write(write_end, b"!")
        signal.pause()
os.read(read_end, 1)
os.kill(pid, signal.SIGKILL)
with queue.reader() as reader:
    try:
        reader.read(1, timeout=30)
    except fmq.PeerDied:
        print("saw the death of its peer")
os.waitpid(pid, 0)
"""


def told(*command, **how):
    """What a program printed; its complaints are the test's failure."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreter(version):
    """A CPython of that version that starts and has pip for environments: on PATH, of pyenv, or of uv."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # other tests leave another HOME in the environment
    folders = [
        *home.glob(f".pyenv/versions/{version}.*/bin"),
        *home.glob(f".local/share/uv/python/cpython-{version}.*/bin"),
    ]
    known = shutil.which(f"python{version}"), *(folder / f"python{version}" for folder in folders)
    for program in filter(None, known):
        if not subprocess.run([program, "-c", "import ensurepip"], capture_output=True, check=False).returncode:
            return program
    return None


@pytest.fixture(params=PYTHONS)
def anew(request, wheels, tmp_path):
    """The version, and a command that runs this Python in an empty environment, where pip has installed the wheel."""
    start, version = (), request.param
    if not (python := interpreter(version)):
        packages = ("base-files", "coreutils", "libstdc++6", f"python{version}-venv")
        try:
            root = debian_files.unpacked(tmp_path / "debian", packages, processor="amd64", release="testing")
        except debian_files.Absent as why:
            pytest.skip(f"no CPython {version} on PATH, of pyenv or of uv, the wheel is untested there: {why}")
        start, python = debian_files.inside(root, wheels, tmp_path), f"/usr/bin/python{version}"
    told(*start, python, "-m", "venv", tmp_path / "empty")
    inside = (*start, tmp_path / "empty/bin/python")
    (wheel,) = wheels.glob("*x86_64.whl")
    told(*inside, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:", f"{wheel}[cli]")
    return version, inside


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the x86-64 wheel needs an x86-64 processor")
def test_the_wheel_works_on_that_python(anew, tmp_path):
    """In an empty environment, away from the sources: another process answers, a kill -9 ends a wait, a model runs in a
    device's process, and the command says its version. pip compiles nothing."""
    version, python = anew
    alone = {"cwd": tmp_path, "env": {"PATH": "/usr/sbin:/usr/bin:/bin", "BURST_RUNTIME_DIR": str(tmp_path / "run")}}
    assert f"exchanged 1000 on x86_64 {version}." in told(*python, "-W", "error", "-c", EXCHANGE, **alone)
    assert "saw the death of its peer" in told(*python, "-W", "error", "-c", DEATH, **alone)
    model = (ROOT / "docs/start.md").read_text().split("```python\n")[2].split("```")[0]
    assert "[[3. 3. 3. 3.]]" in told(*python, "-W", "error", "-c", model, **alone)
    assert "burst" in told(*python, "-m", "burst_engine", "--version", **alone)


@pytest.fixture(scope="session")
def aarch64(tmp_path_factory):
    """Debian's Python for aarch64 with what it needs, run by the emulator."""
    if not shutil.which(EMULATOR):
        pytest.skip(f"no '{EMULATOR}', the wheel is untested (Debian: apt install qemu-user-static)")
    packages = ("python3", "libstdc++6", "libgcc-s1")
    try:
        root = debian_files.unpacked(tmp_path_factory.mktemp("aarch64"), packages, processor="arm64")
    except debian_files.Absent as why:
        pytest.skip(f"the wheel is untested on aarch64: {why}")
    (python,) = root.glob("usr/bin/python3.[0-9][0-9]")
    return EMULATOR, "-L", root, python


@pytest.fixture(scope="session")
def aarch64_site(wheels, aarch64, tmp_path_factory):
    """What pip installs with the wheel for that processor."""
    (wheel,) = wheels.glob("*aarch64.whl")
    version, site = aarch64[-1].name.removeprefix("python"), tmp_path_factory.mktemp("site")
    platforms = [word for minor in (17, 27, 28) for word in ("--platform", f"manylinux_2_{minor}_aarch64")]
    abis = ("--abi", f"cp{version.replace('.', '')}", "--abi", "abi3", "--abi", "none")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
    wanted = [*platforms, "--python-version", version, "--implementation", "cp", *abis]
    told(*pip, "--target", site, *wanted, wheel)
    return site


def test_the_aarch64_wheel_exchanges_in_an_emulator(aarch64, aarch64_site, tmp_path):
    """pip takes the wheel for that processor, its extensions load there, and another process answers. In user mode the
    emulator has no robust lists and no futex_waitv, so no process dies here."""
    said = told(*aarch64, "-c", EXCHANGE, env=os.environ | {"PYTHONPATH": str(aarch64_site)}, cwd=tmp_path)
    assert f"exchanged 1000 on aarch64 {aarch64[-1].name.removeprefix('python')}." in said


def test_the_aarch64_wheel_is_told_of_deaths_in_an_emulated_machine(aarch64, aarch64_site, tmp_path):
    """On a kernel for that processor a kill -9 ends a wait; there are the system calls that user mode lacks."""
    if lacks := emulated_machine.absence():
        pytest.skip(f"{lacks}; deaths are untested on aarch64")
    *_, debian, python = aarch64
    root = shutil.copytree(debian, tmp_path / "root", symlinks=True)
    shutil.copytree(aarch64_site, root / "site")
    code = "import sys; sys.path.append('/site')\n" + EXCHANGE + DEATH
    init, command = emulated_machine.compiled_init(tmp_path), (f"/usr/bin/{python.name}", "-c", code)
    status, said = emulated_machine.run(init, root, *command, timeout=500)
    assert status == 0, said
    assert "exchanged 1000 on aarch64" in said
    assert "saw the death of its peer" in said
