"""Watches all running devices, or chosen ones. Never starts a device, and never keeps one alive."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from burst import BurstError
from driver.client import discovery, served_sockets
from driver.errors import DeviceNotFound, DriverError
from driver.monitor.device import WatchedDevice
from driver.monitor.figures import BurstFigures, DeviceFigures, Sample
from driver.monitor.gpus import GpuReader
from fmq import FmqError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ERRORS = (BurstError, DriverError, FmqError, OSError)
_GLANCES, _GLANCED = 10, 32  # at most, between two looks; at one burst each: what 64 bursts cost then is 1 % of a CPU
_AGAIN = 1.0  # seconds until a device that did not answer is asked again


class Watcher:
    """Samples devices; finds new ones and forgets ended ones at each sample."""

    def __init__(self, addresses: Sequence[str] = (), with_accounts: bool = False) -> None:
        """`addresses`: names or socket paths; default: all running devices of this account. `with_accounts`: samples
        what accounts hold, too, which costs a connection to each device. Raise DriverError.
        """
        for name in addresses:
            if not served_sockets.is_path(name):
                discovery.Place(discovery.runtime_dir(), name)
        self._with_accounts = with_accounts
        self._addresses = list(dict.fromkeys(addresses))
        self._devices: dict[str, WatchedDevice] = {}
        self._absent: dict[str, Exception] = {}
        self._not_before: dict[str, float] = {}
        self._gpus = GpuReader()
        self._find()
        self._at = time.monotonic()

    def sample_after(self, seconds: float) -> Sample:
        """Return a sample after so many seconds. With few bursts, glance in between to see more results."""
        glances = min(_GLANCES, max(1, _GLANCED // max(1, sum(len(d.bursts) for d in self.devices))))
        for _ in range(glances - 1):
            time.sleep(seconds / glances)
            for device in self.devices:
                device.glance()
        time.sleep(seconds / glances)
        return self.sample()

    def sample(self) -> Sample:
        """Return a sample of all devices and bursts."""
        now = time.monotonic()
        seconds, self._at = now - self._at, now
        self.refresh()
        devices, bursts, gpus = list[DeviceFigures](), list[BurstFigures](), self._gpus.read()
        for device in self.devices:
            figures, found = device.look(gpus)
            devices.append(figures)
            bursts += found
        return Sample(time.time(), seconds, devices, bursts, absent=self.absent, gpus=gpus)

    def refresh(self) -> None:
        """Find new devices and bursts, and forget ended ones."""
        self._find()
        for device in self.devices:
            try:
                device.refresh()
            except _ERRORS as error:
                self._lose(device.address, error)

    @property
    def absent(self) -> dict[str, str]:
        """Requested devices that are not running, and devices that do not answer properly; with the reason."""
        return {
            name: str(error) or type(error).__name__
            for name, error in self._absent.items()
            if name in self._addresses or not isinstance(error, DeviceNotFound)
        }

    @property
    def devices(self) -> list[WatchedDevice]:
        """The devices known to be running."""
        return list(self._devices.values())

    def _find(self) -> None:
        for address, device in list(self._devices.items()):
            if device.has_ended:
                del self._devices[address]
        addresses = self._addresses or _running()
        self._absent = {name: error for name, error in self._absent.items() if name in addresses}
        for address in addresses:
            if address not in self._devices and time.monotonic() >= self._not_before.get(address, 0.0):
                self._look_for(address)

    def _look_for(self, address: str) -> None:
        try:
            self._devices[address] = WatchedDevice(address, self._with_accounts)
        except _ERRORS as error:
            self._lose(address, error)
        else:
            self._absent.pop(address, None)

    def _lose(self, address: str, error: Exception) -> None:
        self._devices.pop(address, None)
        self._absent[address] = error
        self._not_before[address] = time.monotonic() + _AGAIN


def _running() -> list[str]:
    """Return the names of devices of this account whose sockets are there."""
    return sorted(path.stem for path in discovery.runtime_dir().glob("*.sock"))
