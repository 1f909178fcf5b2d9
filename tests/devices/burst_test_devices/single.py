"""Devices that stand for a thing that exists once: `burst serve --group` gives them one engine for all accounts.

Connect to "burst_test_devices.single:Accelerator".
"""

from __future__ import annotations

from burst_test_devices.filer import Filer as FilerDevice
from driver.devices.reference import ReferenceDevice


class Accelerator(ReferenceDevice):
    """The reference device, of another type."""

    name, type = "accelerator", "ACCELERATOR"


class Apart(Accelerator):
    """One that is asked in a process of its own what it supports, as the driver of a shared library is."""

    asked_apart = True


class Filer(FilerDevice):
    """The device that does what its files say, with one engine."""

    needs = FilerDevice.needs._replace(one_engine=True)
