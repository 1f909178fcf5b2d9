"""A GPU in software, for tests of devices that need one: SwiftShader, which `make integration` fetches."""

import sys
from ctypes import CDLL
from pathlib import Path

from needed_tools import give_up

from driver.devices.onnxruntime import OrtWebGpuDevice

FOLDERS = Path(sys.prefix, "swiftshader/usr/lib/chromium"), Path("/usr/lib/chromium")
CONFIGURATION = ".config/burst/onnxruntime-webgpu.toml"


def driver_file():
    """Vulkan's description of the driver; None: it is not there."""
    return next((path for folder in FOLDERS if (path := folder / "vk_swiftshader_icd.json").exists()), None)


def configure(home, *lines):
    """Has devices of this home directory use it."""
    if remedy := missing():
        give_up(remedy)
    path = Path(home, CONFIGURATION)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f'driver = "{driver_file()}"', *lines]))


def missing():
    """What installs what this machine lacks; "": nothing."""
    if OrtWebGpuDevice.kind.package is None:
        return OrtWebGpuDevice.remedy()
    try:
        CDLL("libvulkan.so.1")
    except OSError:
        return "there is no loader of Vulkan; install it (Debian: apt install libvulkan1)"
    return "" if driver_file() else "there is no SwiftShader; make integration fetches it"
