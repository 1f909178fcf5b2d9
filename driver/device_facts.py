"""The facts about a device: its state, its speed, its needs of the system. Drivers use them by `driver.interface`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

State = Literal["available", "busy", "offline", "unknown"]


class DeviceStatus(NamedTuple):
    """The state of a device: it takes work, or is "busy" for now, or "offline" until something is done about it.

    "unknown" is no refusal: a device that cannot tell is asked all the same, and so is one that does not run yet.
    """

    state: State = "available"
    reason: str = ""  #: for people; "" where there is none

    @property
    def takes_work(self) -> bool:
        """True if it prepares and executes."""
        return self.state in {"available", "unknown"}

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


_UNKNOWN = DeviceStatus("unknown")
Source = Literal["stated", "measured"]


class Performance(NamedTuple):
    """The time or power that something takes on a device, relative to the CPU in the client's process: lower is better,
    1.0 the same.
    """

    exec_time: float
    power_usage: float | None = None  #: None where it is not known


class Capabilities(NamedTuple):
    """How fast a device is on this machine. What is missing, or None, it cannot do.

    source: whether the driver has stated all of it, or Burst has measured all of it. Burst sets it.
    """

    operands: Mapping[str, Performance]  #: by HAL name of the type of an operation's first input
    relaxed_scalar: Performance | None = None  #: FLOAT32 in models that allow the precision of float16
    relaxed_tensor: Performance | None = None  #: TENSOR_FLOAT32 in those
    if_performance: Performance | None = None
    while_performance: Performance | None = None
    source: Source = "stated"


_ONE_OF_A_KIND = {"GPU", "ACCELERATOR"}


class Needs(NamedTuple):
    """The needs of a device beyond those of every program that computes: a sandbox leaves it these.

    Paths are absolute, or begin with "~/"; a folder stands for all that is in it. One that is not there when the device
    starts gives nothing. Shared libraries of the system and Python's own files are no needs.
    """

    read_paths: tuple[str, ...] = ()
    write_paths: tuple[str, ...] = ()  #: these are also read
    system_calls: tuple[str, ...] = ()  #: by name, such as "ioctl"
    one_engine: bool | None = None
    """True if all accounts of `burst serve --group` share an engine, because the device stands for a thing that exists
    once. None: devices of type GPU and ACCELERATOR do.
    """

    def is_one_of_a_kind(self, of_type: str) -> bool:
        """Return True if one engine has the device of that type, because it exists once."""
        return self.one_engine or (self.one_engine is None and of_type in _ONE_OF_A_KIND)

    def __str__(self) -> str:
        parts = zip(("reads", "writes", "calls"), self[:3], strict=True)
        words = [f"{verb} {', '.join(names)}" for verb, names in parts if names]
        return "; ".join([*words, *(["one engine for all accounts"] if self.one_engine else [])]) or "nothing"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts about an installed device that are known without starting it."""

    name: str
    version: str
    type: str
    capabilities: Capabilities | None = None  #: None until `driver.compile` has asked for them, once per version
    missing: str = ""  #: what keeps it from being used, and the remedy; "": nothing
    status: DeviceStatus = _UNKNOWN  #: of one that runs; nothing is started by asking
