"""The outcome of one execution: a `Result`, or one of these errors.

::

    BurstError
    ├── PeerDied                            also fmq's PeerDied, so also ConnectionError
    │   ├── BuffersLost
    │   ├── Quarantined
    │   └── EngineEnded                     for the memory that it took
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
        │   └── EndedForNow                 also EngineEnded
        └── ResourceExhaustedPersistent     RESOURCE_EXHAUSTED_PERSISTENT
            └── EndedForGood                also EngineEnded

`TimeoutError` therefore catches both a caller whose `timeout` passed and a deadline that was missed. The device is done
with the request unless the error's `phase` is "waiting for the answer". Transient errors have a `retry_after`, for
`driver.retry`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from burst.messages import NO_CAUSE, NO_TIMING, Cause, ErrorStatus, OutputShape, Timing
from fmq.errors import PeerDied as _QueuePeerDied

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from burst.messages import Phase


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

    The execution may still be running and writing to its outputs: they mean nothing until the next result has come. A
    device that has not begun it will not, and one that can be interrupted gives it up.

    Attributes:
        phase: "waiting for the answer", or None where nothing was sent.
        late_by: seconds since the time was up, where they are known.
    """

    def __init__(self, message: str = "", phase: Phase | None = None, late_by: float | None = None) -> None:
        super().__init__(message)
        self.phase, self.late_by = phase, late_by


def timed_out(timeout: float | None, phase: Phase | None = None, late_by: float | None = None) -> Timeout:
    """Return the error of a call whose own timeout has passed, in the same words on every way. None: it was
    a deadline.
    """
    within = "by its deadline" if timeout is None else f"within {timeout} s"
    return Timeout(f"no result {within}; it is dropped when it comes", phase, late_by)


class Busy(BurstError):
    """A second request was made while one is in flight. The first goes on undisturbed; ask again after its result."""


class ResultsHeld(BurstError, BufferError):
    """All output buffers of a burst belong to results that the program still holds; the message names them. Nothing was
    sent.

    The burst stays usable: drop results, or copy what must be kept.
    """


class BuffersLost(PeerDied):
    """The device died, and with it buffers that this burst was bound to; the message names them.

    Their contents cannot be had again, so the burst is not recovered: make new buffers, and open another.
    """


class Quarantined(PeerDied):
    """A model has crashed its device again and again, and is not run on it any more by this process.

    The message says the signal, the model and the last request. Other models, and other processes, are served.
    """


class InternalError(BurstError):
    """A bug of Burst: please report it. Close the burst and trust nothing that it returned."""


_MOST_SHOWN = 16  # elements of an array that `repr` shows


def brief(arrays: Iterable[Any], names: Sequence[str] = ()) -> str:
    """Return arrays in one line, as far as they are small: the others by their dtypes and shapes."""
    found = list(arrays)
    shown = [_brief(array) for array in found]
    if len(names) == len(found):
        return f"({', '.join(f'{name}: {words}' for name, words in zip(names, shown, strict=True))})"
    return f"({', '.join(shown)})"


def _brief(array: Any) -> str:
    if not hasattr(array, "tolist"):  # what stands for an input has a dtype, too
        return f"{array!r:.400}"
    form = f"{array.dtype}{list(array.shape)}"
    return form if array.size > _MOST_SHOWN or array.dtype.kind == "V" else f"{form} {array.tolist()!r:.400}"


class _Result(NamedTuple):
    status: ErrorStatus
    outputs: tuple[NDArray[Any], ...] = ()
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""
    cause: Cause = NO_CAUSE


class Result(_Result):
    """The result of one execution. It is compared by identity, because comparing arrays has no one answer.

    Attributes:
        status: NONE, or why there is no result.
        outputs: one array per output, empty unless `status` is NONE; None where it is in a buffer of the device.
        output_shapes: one per output when `status` is OUTPUT_INSUFFICIENT_SIZE, and when it is NONE and the model
            leaves a shape open; may be empty when all shapes are known beforehand, and is for any other status.
        timing: in microseconds; known only if asked for, and only when `status` is NONE.
        message: what the device says about an error, for people.
        cause: what is known about an error.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        if self.status:
            return f"Result({self.status}: {self.message})" if self.message else f"Result({self.status})"
        timing = "" if self.timing == NO_TIMING else f", {self.timing}"
        return f"Result({self.status}, {brief(self.outputs, getattr(self.outputs, 'names', ()))}{timing})"

    def raise_for_status(self) -> None:
        """Return if the status is NONE.

        Raises:
            StatusError: otherwise; the subclass for this status, with this result as its `result`.
        """
        if self.status != ErrorStatus.NONE:
            error = status_error(self.status, self.message, self.cause)
            error.result = self
            try:
                raise error
            finally:
                del error  # it knows this frame, and those of callers that hold memory


class StatusError(BurstError):
    """The device answered with an error status. The burst and the device stay usable unless a subclass says otherwise.

    Attributes:
        status: the `ErrorStatus` of the answer.
        result: the whole answer where there is one, with its output shapes; otherwise None.
        phase: where the request was, as `burst.messages.Phase` has it; None where that makes no sense.
        late_by: seconds from its deadline to when the miss was found out; None where it is not known.
        retry_after: seconds after which to try again, by the device's hint or this class's own; None for all but
            transient errors.
    """

    status: ClassVar[ErrorStatus]
    remedy: ClassVar[str] = ""  #: the end of the text
    retry_default: ClassVar[float | None] = None  #: `retry_after` without a hint

    def __init__(self, message: str = "", result: Result | None = None, cause: Cause = NO_CAUSE) -> None:
        words = message or _words(self.status, cause)
        # A message about an argument says itself how it should have been.
        is_complete = self.remedy in words or (message and self.status <= ErrorStatus.INVALID_ARGUMENT)
        super().__init__(words if is_complete else f"{words}; {self.remedy}")
        self.result = result
        self.phase, self.late_by = cause.phase, cause.late_by
        hint = cause.retry_after if self.retry_default is not None else None
        self.retry_after = self.retry_default if hint is None else hint

    def as_result(self) -> Result:
        """Return the answer that it stands for, as `execute` returns it."""
        result = self.result or Result(self.status, cause=self.as_cause())
        return result if result.message else result._replace(message=str(self))

    def as_cause(self) -> Cause:
        """Return what is known about the error, as one record. (No attribute `cause`: Ray sets one of that name.)"""
        return Cause(self.phase, self.late_by, self.retry_after)


def _words(status: ErrorStatus, cause: Cause) -> str:
    words = status.name
    if cause.phase:
        words += f" ({cause.phase})"
    return words if cause.late_by is None else f"{words}, late by {cause.late_by * 1e3:.3g} ms"


class DeviceUnavailable(StatusError):
    """The device is offline or in use. Nothing was executed; try later, or another device."""

    status = ErrorStatus.DEVICE_UNAVAILABLE
    remedy = "try later, or another device"


class GeneralFailure(StatusError):
    """The device failed and does not say why. The outputs mean nothing; the same request may fail again."""

    status = ErrorStatus.GENERAL_FAILURE
    remedy = "its log may say more; try another device"


class OutputInsufficientSize(StatusError, BufferError):
    """An output is larger than the memory given for it. `result.output_shapes` says which, and how large it must be.

    The outputs mean nothing; the same request with larger outputs succeeds.
    """

    status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
    remedy = "make the outputs as large as its output shapes"


class InvalidArgument(StatusError, ValueError):
    """The request does not fit the model or its memory. Nothing was executed, and it will not succeed unchanged."""

    status = ErrorStatus.INVALID_ARGUMENT
    remedy = "change the request"


class MissedDeadlineTransient(StatusError, TimeoutError):
    """The deadline passed because the device was busy, and it stopped. The same request may succeed if made again."""

    status = ErrorStatus.MISSED_DEADLINE_TRANSIENT
    remedy = "try again, or give it more time"
    retry_default = 0.01


class MissedDeadlinePersistent(StatusError, TimeoutError):
    """The deadline cannot be met by this device at all. Give the request more time, or give it to another device."""

    status = ErrorStatus.MISSED_DEADLINE_PERSISTENT
    remedy = "give it more time, or another device"


class ResourceExhaustedTransient(StatusError):
    """The device ran out of something, such as memory, for now. The same request may succeed if made again."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
    remedy = "try again later"
    retry_default = 0.1


class ResourceExhaustedPersistent(StatusError):
    """The request needs more than this device has. Make a smaller request, or give it to another device."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT
    remedy = "make it smaller, or give it to another device"


class EngineEnded(PeerDied, StatusError):
    """The engine took more memory than it may, and so was ended; another one serves from the next call on.

    Its class is also ResourceExhaustedTransient or ResourceExhaustedPersistent.
    """


class EndedForNow(ResourceExhaustedTransient, EngineEnded):
    """The engine took too much memory for several clients: the same request may succeed on the next one."""


class EndedForGood(ResourceExhaustedPersistent, EngineEnded):
    """The engine took too much memory for the only client that it had."""


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


def status_error(status: ErrorStatus | int, message: str = "", cause: Cause = NO_CAUSE) -> StatusError:
    """Return the exception, not yet raised, that stands for `status`; without a message it says the status and its
    cause.

    Raises:
        ValueError: `status` is NONE, or is no ErrorStatus.
    """
    if status == ErrorStatus.NONE:
        raise ValueError("status NONE is a success and has no exception")
    return _CLASSES[ErrorStatus(status)](message, cause=cause)


class DeviceEnd(NamedTuple):
    """The end of a device's process, as its service has told it."""

    words: str = ""  #: "": it has told nothing
    status: int = ErrorStatus.NONE  #: RESOURCE_EXHAUSTED_* of an engine that took too much memory

    def error(self) -> PeerDied:
        """Return the error of this end."""
        match self.status:
            case ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT:
                return EndedForNow(self.words)
            case ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT:
                return EndedForGood(self.words)
        return PeerDied(f"the device's process is gone{self.words and f': {self.words}'}")
