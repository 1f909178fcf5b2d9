"""Finds device classes. Installed devices, ours too, come from the entry-point group `burst.devices`.

A device under development needs no wheel: wherever a name is expected, "module:Class" names its class, and the path of
a shared library, "./libmydevice.so", the driver in it. An entry point may name a library, too: by an object that is the
library's path.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, NamedTuple

from burst_engine.names import DISTRIBUTION
from driver.errors import DeviceNotFound
from driver.nn.errors import did_you_mean
from driver.plugins import own_entry, remedy_for

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

    from driver.interface import Device

GROUP = "burst.devices"
_LOOKS = {"litert": "driver.devices.litert.wheel", "onnxruntime": "driver.devices.onnxruntime.library", "reference": ""}
"""Devices of ours -> the modules whose `missing` says what they lack, as their classes do, which take a tenth of a
second to load; "": they lack nothing.
"""


def names() -> list[str]:
    """Return the names of all installed devices. Their code is not loaded."""
    return sorted(entry.name for entry in entries())


def entries() -> EntryPoints:
    """Return the entry points of all installed devices."""
    from importlib.metadata import entry_points  # takes 15 ms

    return entry_points(group=GROUP)


def device_class(name: str) -> type[Device]:
    """Return the class behind a device's name, behind "module:Class", or of a shared library. Raise DeviceNotFound."""
    from driver.devices.library.description import is_library

    if is_library(name):
        return _of_library(name)
    value = name if ":" in name else own_entry(DISTRIBUTION, GROUP, name) or _value_of(name)
    if value is None:
        raise DeviceNotFound(f"name={name!r}: no such device; {_known()}{did_you_mean(name, names())}")
    try:
        return load(name, value)
    except ModuleNotFoundError as error:
        raise DeviceNotFound(f"name={name!r} is not installed: {error}; {_remedy(name)}") from error
    except (ImportError, AttributeError) as error:
        raise DeviceNotFound(f"name={name!r} cannot be loaded: {error}; {_known()}") from error


class Missing(NamedTuple):
    """A need of a device that this machine lacks, and what installs it."""

    what: str
    remedy: str


def lacking(name: str, kind: type[Device]) -> Missing | None:
    """Return what the device of this name and class lacks; None: nothing."""
    what = kind.missing()
    return Missing(what, kind.remedy() or _remedy(name)) if what else None


def missing(name: str) -> Missing | None:
    """Return what an installed device lacks: its extra was left out. None: nothing, or its class cannot be loaded."""
    try:
        return lacking(name, device_class(name))
    except DeviceNotFound:
        return None


def usable_class(name: str) -> type[Device]:
    """Return the class of a device that lacks nothing. Raise DeviceNotFound with the remedy."""
    found = device_class(name)
    if lacks := lacking(name, found):
        raise not_installed(name, lacks)
    return found


def check_usable(name: str) -> None:
    """Raise what `usable_class` does, and load the class only of a device that nothing smaller knows."""
    if name not in _LOOKS or own_entry(DISTRIBUTION, GROUP, name) is None:
        usable_class(name)
    elif (module := _LOOKS[name]) and (what := importlib.import_module(module).missing()):
        raise not_installed(name, Missing(what, _remedy(name)))


def not_installed(name: str, lacks: Missing) -> DeviceNotFound:
    """Return the error for a device that lacks something."""
    return DeviceNotFound(f"name={name!r} is not installed: {lacks.what}; {lacks.remedy}")


def _known() -> str:
    return f"the devices are {', '.join(names()) or 'none'} (`burst devices` says what each lacks)"


def _entry(name: str) -> EntryPoint | None:
    return next((entry for entry in entries() if entry.name == name), None)


def _value_of(name: str) -> str | None:
    entry = _entry(name)
    return entry.value if entry else None


def _remedy(name: str) -> str:
    """Return what installs a device's needs: the extra of its name, if its distribution has one."""
    entry = _entry(name)
    if entry is None or entry.dist is None:
        return "install it"
    return remedy_for(entry) or f"pip install it, or pip uninstall {entry.dist.name}, which provides the device"


def _of_library(path: str) -> type[Device]:
    from driver.devices.library.description import absolute
    from driver.devices.library.device import library_class  # takes a tenth of a second

    return library_class(absolute(path))


def load(name: str, value: str) -> type[Device]:
    """Return the class of the device of that name. `value`: of its entry point, "module:Class".

    Raise ImportError, AttributeError, DeviceNotFound.
    """
    from driver.interface import Device

    importlib.invalidate_caches()
    module, _, attribute = value.partition("[")[0].partition(":")
    found: object = importlib.import_module(module.strip())
    for part in attribute.split("."):
        found = getattr(found, part.strip())
    if isinstance(found, str | os.PathLike):
        return _of_library(os.fspath(found))
    if not (isinstance(found, type) and issubclass(found, Device)):
        raise DeviceNotFound(f"name={name!r}: {value} is not a device; make it a subclass of driver.Device")
    return found
