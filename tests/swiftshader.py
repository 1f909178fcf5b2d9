"""A GPU in software, for tests of devices that need one: SwiftShader, which `make integration` fetches.

A machine without it, or without the provider, skips these tests, with the remedy. `make integration` sets
BURST_INTEGRATION: then they fail there.
"""

import os
import sys
from ctypes import CDLL
from pathlib import Path

import pytest

from driver.devices.onnxruntime import OrtWebGpuDevice

FOLDERS = Path(sys.prefix, "swiftshader/usr/lib/chromium"), Path("/usr/lib/chromium")
CONFIGURATION = ".config/burst/onnxruntime-webgpu.toml"


def driver_file():
    """Vulkan's description of the driver; None: it is not there."""
    return next((path for folder in FOLDERS if (path := folder / "vk_swiftshader_icd.json").exists()), None)


def configure(home, *lines):
    """Has devices of this home directory use it. Skips or fails where it is missing."""
    if remedy := missing():
        (pytest.fail if os.environ.get("BURST_INTEGRATION") else pytest.skip)(remedy)
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
