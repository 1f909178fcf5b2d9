"""The driver of examples/device-cuda on a CUDA that is none: its host part, and tests/devices/c/cuda_stub."""

import subprocess
from pathlib import Path

from driver.devices import library

ROOT = Path(__file__).parents[1]
EXAMPLE, STUB = ROOT / "examples/device-cuda", ROOT / "tests/devices/c/cuda_stub"
CONTRACT = Path(library.__file__).parent
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


def built(folder, *options):
    """The path of the library, in this folder."""
    path = folder / "libburst_cuda_example.so"
    sources = EXAMPLE / "device.c", STUB / "stub.c", CONTRACT / "burst_device.c"
    folders = [f"-I{place}" for place in (STUB, EXAMPLE, CONTRACT)]
    command = ["cc", *WARNINGS, "-O1", "-shared", "-fPIC", "-fvisibility=hidden", *options, *folders, *sources]
    subprocess.run([*command, "-o", path], check=True)
    return path
