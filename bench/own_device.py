"""A device of the bench's own: no other program's work is in the figures, and no other program's device is pinned."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from measure import DEVICE_CPU, HERE, NotMeasured, scratch

import driver
from driver.client import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from measure import Block

# A device's processes see installed packages only. These look here, too, after all else: "native_device:Native".
_LAUNCH = f"import runpy, sys; sys.path.append({str(HERE)!r}); runpy.run_path({launch.__file__!r}, run_name='__main__')"


@contextmanager
def own_device(name: str = "reference") -> Iterator[driver.RemoteDevice]:
    """`driver.connect(name)` in a runtime directory of its own; both processes end with the block."""
    with scratch() as directory:
        script, before = directory / "launch.py", launch.__file__
        script.write_text(_LAUNCH)
        os.environ["BURST_RUNTIME_DIR"] = str(directory)
        try:
            launch.__file__ = str(script)
            device = driver.connect(name)
        finally:
            launch.__file__ = before
        try:
            yield device
        finally:
            device.close()
            with suppress(ProcessLookupError):
                os.kill(device.service_pid, signal.SIGTERM)  # the engine ends with it


def c_driver(folder: Path) -> Path:
    """The driver of examples/device-c, built in this folder. Raises NotMeasured where it cannot be."""
    if not shutil.which("cmake"):
        raise NotMeasured("cmake is missing; install it (Debian: apt install cmake)")
    source, define = HERE.parent / "examples/device-c", f"-DBurstDevice_DIR={HERE.parent / 'driver/devices/library'}"
    commands = ["cmake", "-S", source, "-B", folder, define], ["cmake", "--build", folder]
    for command in commands:
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise NotMeasured("XNNPACK is missing; install it (Debian: apt install libxnnpack-dev libpthreadpool-dev)")
    return folder / "libburst_xnnpack.so"


def installed(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those devices that are, and those that are not."""
    known = {device.name for device in driver.devices() if not device.missing}
    return [name for name in names if name in known], [name for name in names if name not in known]


def pin(device: driver.RemoteDevice) -> None:
    """Every thread of both processes on the device's CPU. Threads inherit it, but call again when some were started."""
    for pid in (device.service_pid, device.engine_pid):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {DEVICE_CPU})


def pinned(device: driver.RemoteDevice, block: Callable[[], Block]) -> Callable[[], Block]:
    """Pins again first: the device starts threads when it likes."""

    def run() -> Block:
        pin(device)
        return block()

    return run
