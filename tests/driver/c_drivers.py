"""Drivers in C, compiled for tests."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES, HEADERS = ROOT / "tests/devices/c", ROOT / "driver/devices/library"
STRICT = ("-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fPIC", f"-I{HEADERS}")


def compiled(out, *sources, compiler=("cc", "-std=c11"), flags=()):
    """A shared library of these sources and burst_device.c."""
    files = [*(SOURCES / source for source in sources), HEADERS / "burst_device.c"]
    subprocess.run([*compiler, *STRICT, *flags, "-shared", *files, "-lm", "-o", out], check=True)
    return out
