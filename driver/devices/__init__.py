"""Finds device classes. Installed devices, ours too, come from the entry-point group `burst.devices`.

A device under development needs no wheel: wherever a name is expected, "module:Class" names its class.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from driver.errors import DeviceNotFound
from driver.interface import Device
from driver.nn.errors import did_you_mean

GROUP = "burst.devices"


def names() -> list[str]:
    """The names of all installed devices. Their code is not loaded."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def device_class(name: str) -> type[Device]:
    """The class behind a device's name, or behind "module:Class". Raises DeviceNotFound."""
    installed = ", ".join(names()) or "none"
    found = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
    if found is None and ":" not in name:
        raise DeviceNotFound(f"name={name!r}: no such device; installed are {installed}{did_you_mean(name, names())}")
    try:
        return load(found or EntryPoint(name, name, GROUP))
    except (ImportError, AttributeError) as error:
        raise DeviceNotFound(f"name={name!r}: {error}; installed are {installed}") from error


def lacks_library(name: str) -> bool:
    """Whether a device of ours is installed without the library it needs: its extra was left out."""
    try:
        needed = device_class(name).library
    except DeviceNotFound:
        return False
    return needed is not None and find_spec(needed) is None


def load(entry: EntryPoint) -> type[Device]:
    """The class that an entry point names. Raises ImportError, AttributeError, DeviceNotFound."""
    importlib.invalidate_caches()
    found = entry.load()
    if not (isinstance(found, type) and issubclass(found, Device)):
        raise DeviceNotFound(f"name={entry.name!r}: {entry.value} is not a device; make it a subclass of driver.Device")
    return found
