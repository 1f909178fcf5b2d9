"""The C sources with another C library: compiled against Debian's musl, without a warning, and run."""

import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import libburst_by_ctypes
import pytest
from core_sources import CORE
from needed_tools import give_up

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
COMPILER = "musl-gcc"


@pytest.fixture(scope="session")
def kernel_headers(tmp_path_factory):
    """The option for a folder with the kernel's headers alone: beside them in /usr/include lie those of glibc."""
    if not shutil.which(COMPILER):
        give_up(f"no '{COMPILER}'; install it (Debian: apt install musl-tools)")
    folder, here = tmp_path_factory.mktemp("kernel"), Path("/usr/include")
    for name in ("linux", "asm-generic"):
        (folder / name).symlink_to(here / name)
    (folder / "asm").symlink_to(here / sysconfig.get_config_var("MULTIARCH") / "asm")
    return "-isystem", str(folder)


@pytest.fixture(scope="session")
def prefix(kernel_headers, tmp_path_factory):
    """Both libraries as `make install` leaves them."""
    flags = ("CC=" + " ".join((COMPILER, *kernel_headers)), "CFLAGS=-O2 -Werror")
    return libburst_by_ctypes.install_libraries(tmp_path_factory.mktemp("musl"), *flags)


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("ring_race.c", ("1000",), r"stream: [1-9].*exchange: [1-9].*stop: [1-9].*busy: [1-9]"),
        ("hostile.c", ("1000",), r"\d+ calls, [1-9]\d* ends lost"),
        ("kills.c", ("100", "0"), r"100 kills: told [1-9]"),
    ],
)
def test_a_test_program_holds_with_musl(build, kernel_headers, program, arguments, expected):
    """Ends race, a peer lies, and processes are killed at random moments: the kernel marks the deaths as with glibc."""
    sources = CORE
    binary = build(program, *sources, flags=("-static", *kernel_headers), cc=COMPILER)
    assert re.search(expected, out := binary(str(random.randrange(2**32)), *arguments), re.DOTALL), out


def test_a_client_with_musl_talks_to_a_device(kernel_headers, prefix, tmp_path):
    """examples/client.c, linked with libburst.a and no shared library, starts a device, whose Python uses glibc,
    and gets its sums."""
    archive, target = prefix / "lib/libburst.a", tmp_path / "client"
    command = [COMPILER, *kernel_headers, "-static", f"-I{prefix}/include", ROOT / "examples/client.c", archive]
    subprocess.run([*command, "-Wall", "-Wextra", "-Werror", "-o", target], check=True)
    (tmp_path / "run").mkdir(mode=0o700)
    place = {"BURST_RUNTIME_DIR": str(tmp_path / "run"), "BURST_PYTHON": sys.executable}
    done = subprocess.run([target], env=os.environ | place, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "1: 11 22 33 44\n" in done.stdout


def test_the_shared_libraries_need_musl_alone(prefix):
    """Whatever loads them, no glibc comes along."""
    for name in ("libburst.so.0", "libfmq.so.0"):
        shown = subprocess.run(["readelf", "-d", prefix / "lib" / name], capture_output=True, text=True, check=True)
        assert re.findall(r"NEEDED.*\[(.*)\]", shown.stdout) == ["libc.so"]
