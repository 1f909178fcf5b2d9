"""The adapters that Vulkan's drivers offer: what they are called, and whether they are processors or software.

This file imports nothing of ours, so that it can also run as a program: `python vulkan.py` prints the adapters as JSON.
A driver runs code in the process that asks, which may crash or keep threads. So it is asked in a process that is thrown
away.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any, NamedTuple

from cffi import FFI

LOADER = "libvulkan.so.1"
_DECLARATIONS = """
typedef struct { int type; const void *next; unsigned flags; const void *application; unsigned layers;
                 const void *layer_names; unsigned extensions; const void *extension_names; } create_info;
int vkCreateInstance(const create_info *info, const void *allocator, void **instance);
void vkDestroyInstance(void *instance, const void *allocator);
int vkEnumeratePhysicalDevices(void *instance, uint32_t *count, void **devices);
void vkGetPhysicalDeviceProperties(void *device, void *properties);
"""
_CREATE_INSTANCE = 1  # of the types of structs
_KINDS = {1: "integrated", 2: "discrete", 3: "virtual", 4: "software"}
_MOST, _PROPERTIES, _KIND, _NAME, _NAME_BYTES = 64, 4096, 16, 20, 256


class Adapter(NamedTuple):
    """A device that runs shaders."""

    name: str
    kind: str  #: integrated, discrete, virtual, software or other

    @property
    def is_software(self) -> bool:
        """True if the CPU does the work."""
        return self.kind == "software"


def adapters() -> list[Adapter]:
    """Return all adapters. Raise OSError if there is no loader of Vulkan, or no driver that works."""
    ffi: Any = FFI()
    ffi.cdef(_DECLARATIONS)
    library: Any = ffi.dlopen(LOADER)
    info = ffi.new("create_info *")
    info.type = _CREATE_INSTANCE
    instance, count = ffi.new("void **"), ffi.new("uint32_t *", _MOST)
    if code := library.vkCreateInstance(info, ffi.NULL, instance):
        raise OSError(f"vkCreateInstance returned {code}: no Vulkan driver is installed, or none works here")
    try:
        devices = ffi.new("void *[]", _MOST)
        library.vkEnumeratePhysicalDevices(instance[0], count, devices)
        return [_adapter(ffi, library, devices[n]) for n in range(count[0])]
    finally:
        library.vkDestroyInstance(instance[0], ffi.NULL)


def _adapter(ffi: Any, library: Any, device: Any) -> Adapter:
    properties = ffi.new("char[]", _PROPERTIES)
    library.vkGetPhysicalDeviceProperties(device, properties)
    raw = bytes(ffi.buffer(properties))
    (kind,) = struct.unpack_from("i", raw, _KIND)
    name = raw[_NAME : _NAME + _NAME_BYTES].split(b"\0")[0].decode(errors="replace")
    return Adapter(name, _KINDS.get(kind, "other"))


if __name__ == "__main__":
    try:
        print(json.dumps({"adapters": adapters()}))
    except OSError as error:
        print(json.dumps({"fault": str(error)}))
        sys.exit(1)
