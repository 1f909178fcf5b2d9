"""What can go wrong on the way to a device.

::

    DriverError                        (driver.nn.errors)
    ├── InvalidModel (ValueError)      a model breaks a rule of the HAL; the operand or operation is named
    ├── ExecutionFailed                an operation could not be computed (inside a device)
    ├── LoopTimeout                    a WHILE went on for too long (inside a device)
    ├── OutputInsufficientSize         an output's memory was too small (inside a device)
    ├── ImportFailed (ValueError)      a model file is damaged, or holds what the HAL cannot say; the operator is named
    ├── DeviceNotFound (LookupError)   no device of that name is installed, or none is served at that path
    ├── DeviceFailed                   its process did not start, or ended while starting; its log is shown. Or a
    │                                  served device cannot be connected to, or must not be trusted
    ├── NotPlaced                      no device that was asked for may execute an operation
    └── CameraFailed                   a camera cannot be used as asked: absent, busy, without that format or without
        │                              exported buffers, or all its buffers are held
        └── CameraLost                 it was unplugged

An execution's own errors are burst's (`burst.StatusError` and its classes, `burst.PeerDied`, `burst.Timeout`).
"""

from __future__ import annotations

import signal

from driver.nn.errors import DriverError, ExecutionFailed, InvalidModel, LoopTimeout, OutputInsufficientSize


class ImportFailed(DriverError, ValueError):
    """A model file is damaged, of an unknown format, or holds what the HAL cannot say. Nothing was kept of it.

    operator, index: which one could not be mapped and its place in the file; None when it is about the file itself.
    reason, remedy: the parts of the message; remedy is None where nothing is known to help. others: how many further
    obstacles the file has.
    """

    def __init__(
        self,
        reason: str,
        operator: str | None = None,
        index: int | None = None,
        *,
        remedy: str | None = None,
        others: int = 0,
    ) -> None:
        where = "" if operator is None else f"operator {index} ({operator}): "
        more = f" (and {others} more obstacle{'s' * (others > 1)})" if others else ""
        super().__init__(where + reason + (f"; {remedy}" if remedy else "") + more)
        self.operator, self.index, self.reason, self.remedy, self.others = operator, index, reason, remedy, others


class DeviceNotFound(DriverError, LookupError):
    """No device of that name is installed, it lacks what it needs, or none is served at that path.

    Nothing was started. Where a device lacks something, the message says what, and what installs it.
    """


class DeviceFailed(DriverError):
    """The device's process could not be started or, where it is served, connected to.

    Nothing was left behind; trying again is allowed. The message has the last lines of the device's log.

    is_of_all: it is about the runtime directory, and so about every device that this account would start there.
    """

    is_of_all = False


class NotPlaced(DriverError):
    """None of the devices asked for can execute an operation, or the one that `require_device` names cannot.

    Nothing was prepared; the message names the operations.
    """


class CameraFailed(DriverError):
    """A camera cannot be used as asked. The message names the camera, what was asked, and the remedy."""


class CameraLost(CameraFailed):
    """The camera was unplugged. Frames that were taken before can still be read."""


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


__all__ = [
    "CameraFailed",
    "CameraLost",
    "DeviceFailed",
    "DeviceNotFound",
    "DriverError",
    "ExecutionFailed",
    "ImportFailed",
    "InvalidModel",
    "LoopTimeout",
    "NotPlaced",
    "OutputInsufficientSize",
]
