"""The driver of examples/device-c, built once in a run of the tests, as its README says."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from needed_tools import give_up

EXAMPLE = Path(__file__).parents[1] / "examples/device-c"


def built(folder, *options, compiler="cc"):
    """The path of the library, built in this folder."""
    if remedy := missing():
        give_up(remedy)
    where = [sys.executable, "-m", "driver.devices.library", "--cmake"]
    found = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    make("-S", EXAMPLE, "-B", folder, f"-DBurstDevice_DIR={found}", f"-DCMAKE_C_COMPILER={compiler}", *options)
    make("--build", folder)
    return folder / "libburst_xnnpack.so"


def make(*arguments):
    """Runs CMake."""
    done = subprocess.run(["cmake", *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def missing():
    """What installs what this machine lacks; "": nothing."""
    if not shutil.which("cmake"):
        return "cmake is missing; install it (Debian: apt install cmake)"
    program = "#include <xnnpack.h>\nint main(void) { return xnn_initialize(0); }"
    command = ["cc", "-x", "c", "-", "-o", "/dev/null", "-lXNNPACK"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
    remedy = "XNNPACK is missing; install it (Debian: apt install libxnnpack-dev libpthreadpool-dev)"
    return remedy if done.returncode else ""
