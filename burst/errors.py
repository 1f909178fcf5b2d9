"""What can go wrong with one execution.

    BurstError
    ├── PeerDied                            also fmq's PeerDied, so also ConnectionError
    │   ├── BuffersLost
    │   └── Quarantined
    ├── Malformed                           also ValueError
    ├── Timeout                             also TimeoutError
    ├── Busy
    ├── ResultsHeld                         also BufferError
    ├── InternalError                       our bug
    └── StatusError                         the device answered, and the answer is an error status
        ├── DeviceUnavailable               DEVICE_UNAVAILABLE
        ├── GeneralFailure                  GENERAL_FAILURE
        ├── OutputInsufficientSize          OUTPUT_INSUFFICIENT_SIZE, also BufferError
        ├── InvalidArgument                 INVALID_ARGUMENT, also ValueError
        ├── MissedDeadlineTransient         MISSED_DEADLINE_TRANSIENT, also TimeoutError
        ├── MissedDeadlinePersistent        MISSED_DEADLINE_PERSISTENT, also TimeoutError
        ├── ResourceExhaustedTransient      RESOURCE_EXHAUSTED_TRANSIENT
        └── ResourceExhaustedPersistent     RESOURCE_EXHAUSTED_PERSISTENT

`TimeoutError` therefore catches both a caller who stopped waiting and a device that gave up; only the second is a
`StatusError`, and only after the second is the device known to be idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from burst.messages import ErrorStatus
from fmq.errors import PeerDied as _QueuePeerDied

if TYPE_CHECKING:
    from burst.messages import Result


class BurstError(Exception):
    """Base of every error raised by this package; never raised itself."""


class PeerDied(BurstError, _QueuePeerDied):
    """The process at the other end is gone. The burst is finished: close it and open another.

    Memory that both ends had mapped stays readable here, but an output may be half written.
    """


class Malformed(BurstError, ValueError):
    """A packet is not one that the encoder emits, or a request cannot be encoded; the message names the element.

    Nothing was executed. A server refuses the packet and the burst stays usable; a client that receives one cannot
    trust the channel any more and closes it.
    """


class Timeout(BurstError, TimeoutError):
    """The caller's own timeout passed before the result came. The burst stays usable; the late result is dropped.

    The execution may still be running and writing to its outputs: they mean nothing until the next result has come.
    """


class Busy(BurstError):
    """A second request was made while one is in flight. The first goes on undisturbed; ask again after its result."""


class ResultsHeld(BurstError, BufferError):
    """All output buffers of a burst belong to results that somebody holds; the message names them. Nothing was sent.

    The burst stays usable: let results go, or copy what must be kept.
    """


class BuffersLost(PeerDied):
    """The device died, and with it buffers that this burst was bound to; the message names them.

    Their contents cannot be had again, so the burst is not recovered: make new buffers, and open another.
    """


class Quarantined(PeerDied):
    """This model has crashed its device again and again, and is not run on it any more by this process.

    The message says the signal, the model and the last request. Other models, and other processes, are served.
    """


class InternalError(BurstError):
    """An invariant of ours does not hold: our bug, please report it. Close the burst and trust nothing it returned."""


class StatusError(BurstError):
    """The device answered with an error status. The burst and the device stay usable unless a subclass says otherwise.

    Attributes:
        status: the `ErrorStatus` of the answer.
        result: the whole answer where there is one, with its output shapes; otherwise None.
    """

    status: ClassVar[ErrorStatus]

    def __init__(self, message: str = "", result: Result | None = None) -> None:
        super().__init__(message or self.status.name)
        self.result = result


class DeviceUnavailable(StatusError):
    """The device is offline or taken by somebody else. Nothing was executed; try later, or another device."""

    status = ErrorStatus.DEVICE_UNAVAILABLE


class GeneralFailure(StatusError):
    """The device failed and does not say why. The outputs mean nothing; the same request may fail again."""

    status = ErrorStatus.GENERAL_FAILURE


class OutputInsufficientSize(StatusError, BufferError):
    """An output is larger than the memory given for it. `result.output_shapes` says which, and how large it must be.

    The outputs mean nothing; the same request with larger outputs succeeds.
    """

    status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE


class InvalidArgument(StatusError, ValueError):
    """The request does not fit the model or its memory. Nothing was executed, and it will not succeed unchanged."""

    status = ErrorStatus.INVALID_ARGUMENT


class MissedDeadlineTransient(StatusError, TimeoutError):
    """The deadline passed because the device was busy, and it stopped. The same request may succeed if made again."""

    status = ErrorStatus.MISSED_DEADLINE_TRANSIENT


class MissedDeadlinePersistent(StatusError, TimeoutError):
    """The deadline cannot be met by this device at all. Give the request more time, or give it to another device."""

    status = ErrorStatus.MISSED_DEADLINE_PERSISTENT


class ResourceExhaustedTransient(StatusError):
    """The device ran out of something, such as memory, for now. The same request may succeed if made again."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


class ResourceExhaustedPersistent(StatusError):
    """The request needs more than this device has. Make a smaller request, or give it to another device."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT


_CLASSES: dict[ErrorStatus, type[StatusError]] = {
    cls.status: cls
    for cls in (
        DeviceUnavailable,
        GeneralFailure,
        OutputInsufficientSize,
        InvalidArgument,
        MissedDeadlineTransient,
        MissedDeadlinePersistent,
        ResourceExhaustedTransient,
        ResourceExhaustedPersistent,
    )
}


def status_error(status: ErrorStatus | int, message: str = "") -> StatusError:
    """The exception, not yet raised, that stands for `status`; without a message it carries the status's name.

    Raises:
        ValueError: `status` is NONE, or is no ErrorStatus.
    """
    if status == ErrorStatus.NONE:
        raise ValueError("status NONE is a success and has no exception")
    return _CLASSES[ErrorStatus(status)](message)
