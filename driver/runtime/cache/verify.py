"""A check of a cache folder: devices say whether they would still take what lies there. Only they have the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from burst import BurstError, StatusError
from driver.client.device import RemoteDevice, connect
from driver.errors import DriverError
from driver.options import Cache, PrepareOptions
from driver.runtime.cache.manifest import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.runtime.cache.entry import Compilation
    from driver.runtime.cache.folder import Folder

PLACEMENT = "(placement)"
"""What stands in the place of the device's name where the runtime remembers where a model's operations run."""


class Verdict(NamedTuple):
    """A verdict on one entry."""

    entry: Compilation
    state: Literal["good", "refused", "unknown"]
    reason: str = ""


def verify(folder: Folder) -> Iterator[Verdict]:
    """Yield a verdict on one entry after the other. Devices are started when they are first needed."""
    devices: dict[str, RemoteDevice | Exception] = {}
    try:
        for entry in folder.entries():
            if entry.device == PLACEMENT:
                yield Verdict(entry, "good")
            else:
                yield _verdict(folder, entry, devices)
    finally:
        for device in devices.values():
            if isinstance(device, RemoteDevice):
                device.close()


def _verdict(folder: Folder, entry: Compilation, devices: dict[str, RemoteDevice | Exception]) -> Verdict:
    try:
        if entry.device not in devices:
            devices[entry.device] = _connected(entry.device)
        device = devices[entry.device]
        if isinstance(device, Exception):
            return Verdict(entry, "unknown", str(device))
        token = bytes.fromhex(entry.token)
        with folder.entry(token).opened(Counts(*device.number_of_cache_files_needed())) as files:
            if files is None:
                return Verdict(entry, "refused", "the device needs other files now")
            home = device.restored_home(PrepareOptions(cache=Cache(token, *files)))
        home.connection.call("free", home.number)
    except StatusError as error:
        return Verdict(entry, "refused", str(error))
    except BurstError as error:
        return Verdict(entry, "unknown", str(error))
    return Verdict(entry, "good")


def _connected(name: str) -> RemoteDevice | Exception:
    try:
        return connect(name)
    except (BurstError, DriverError) as error:
        return error
