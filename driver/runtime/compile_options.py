"""The terms of a call of `driver.compile`, checked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from driver.options import Preference, PrepareOptions, Priority, check_application
from driver.runtime.cache.device import CompilationCache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from driver.client.device import RemoteDevice
    from driver.nn import Model
    from driver.runtime.local import LocalDevice
    from driver.runtime.progress import CompilationClock

Fallback: TypeAlias = Literal["cpu", "next"]
"""The place where a model goes whose preparation has failed: the CPU in this process, or the next best device."""


def name_of(device: str | RemoteDevice | LocalDevice) -> str:
    """Return the name by which a device was asked for."""
    return device if isinstance(device, str) else device.address


def only(
    device: str | RemoteDevice | None, devices: Sequence[str | RemoteDevice] | None, required: str | None
) -> Sequence[str | RemoteDevice] | None:
    """Return the devices, which are that one if it is given. Raise ValueError where others are, too."""
    if device is None:
        return devices
    if devices is not None or required is not None:
        raise ValueError(f"device={name_of(device)!r}: give it alone, without devices and require_device")
    return [device]


def check_words(preference: Preference, priority: Priority, fallback: Fallback) -> None:
    """Raise ValueError for a word that is not allowed."""
    words = ("preference", preference, Preference), ("priority", priority, Priority), ("fallback", fallback, Fallback)
    for name, value, allowed in words:
        if value not in get_args(allowed):
            raise ValueError(f"{name}={value!r}: one of {', '.join(map(repr, get_args(allowed)))}")


def check_connected(application: str | None, devices: Sequence[str | RemoteDevice]) -> None:
    """Raise InvalidArgument for what is no name, ValueError where there are connections of another."""
    if application is None:
        return
    check_application(application)
    if connected := [device.address for device in devices if not isinstance(device, str)]:
        raise ValueError(
            f"application={application!r}: device {connected[0]!r} is connected already; give the application to "
            "driver.connect, or name the device"
        )


class CompileOptions(NamedTuple):
    """The terms of a call of `compile`."""

    model: Model
    prepare: PrepareOptions  #: of each step; its deadline is the clock's
    names: tuple[str, ...]
    required: str | None
    may_fall_back: bool
    takes_any: bool  #: that is installed, and works
    cache_dir: str | Path | None = None
    cache_token: bytes | None = None
    application: str | None = None
    fallback: Fallback = "cpu"

    @property
    def how(self) -> list[str]:
        """The terms that change how fast it runs."""
        return [self.prepare.preference, self.prepare.priority]

    @property
    def may_try_others(self) -> bool:
        """True if another device may get what one has failed to prepare."""
        return self.may_fall_back or (self.fallback == "next" and self.required is None)

    def cache(self, clock: CompilationClock) -> CompilationCache | None:
        """Return the cache where compilations are kept. Raise ValueError."""
        if self.cache_dir is None:
            if self.cache_token is not None:
                raise ValueError("cache_token needs a cache_dir; give both or neither")
            return None
        wait = partial(clock.note, "wait for another process that compiles the same")
        return CompilationCache.of(
            self.cache_dir, self.cache_token, self.model, self.prepare, wait=wait, patience=clock.left
        )
