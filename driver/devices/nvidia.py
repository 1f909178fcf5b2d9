"""NVIDIA's GPUs as files tell of them: whether there is one, where CUDA's library lies, and what a device may open.

Nothing of CUDA is loaded here: clients look at devices that they do not use.
"""

from __future__ import annotations

from pathlib import Path

from driver.config import configured
from driver.devices.device_options import configuration_of
from driver.interface import Needs

LIBRARY = "libcuda.so.1"
NODES = "/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg"
"""Device files, one of which is there where a GPU is."""

_READ = "/sys/devices/system/cpu", "/sys/bus/pci/devices", "/proc/cpuinfo", "/sys/module", "/dev/nvidia-caps"
_WRITTEN = "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", *(f"/dev/nvidia{n}" for n in range(8)), "~/.nv"
_NOTHING_MORE = Needs()


def configuration() -> Path:
    """Return the file with the options of CUDA."""
    return configuration_of("cuda")


def library_path() -> str:
    """Return where the library lies, as the options say, else its name for the loader. Raise ValueError."""
    found = configured(configuration()).get("library", LIBRARY)
    if type(found) is not str or not found:
        raise ValueError(f"{configuration()}: library = {found!r} must be the path of {LIBRARY}")
    return found


def cuda_needs(more: Needs = _NOTHING_MORE) -> Needs:
    """Return what a device on CUDA needs of the system: the library where the options say, NVIDIA's device files, and
    `more`.
    """
    try:
        path = Path(library_path())
    except ValueError:  # told when the library is loaded
        path = Path(LIBRARY)
    folder = (str(path.parent),) if path.is_absolute() else ()
    read = str(configuration()), *_READ, *folder, *more.read_paths
    return Needs(read, (*_WRITTEN, *more.write_paths), ("ioctl", *more.system_calls))


def missing_gpu() -> str | None:
    """Return why there is no GPU on this machine, as far as files tell; None: there may be one."""
    try:
        library = library_path()
    except ValueError as error:
        return str(error)
    if library != LIBRARY:
        return None if Path(library).exists() else f"{configuration()}: library = {library!r} is not there"
    if any(Path(node).exists() for node in NODES):
        return None
    return f"there is no NVIDIA GPU: none of {', '.join(NODES)} exists"
