"""The vocabulary of one execution: what a client asks, and what a device answers.

Nothing here knows how it travels (`burst.wire`) or what a model is (`driver`). Everything but `Result` is an immutable
tuple with names: cheap to make, safe to remember, compared by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class ErrorStatus(IntEnum):
    """How an execution, or any other call to a device, ended. The numbers are those of the NN HAL 1.3."""

    NONE = 0
    DEVICE_UNAVAILABLE = 1
    GENERAL_FAILURE = 2
    OUTPUT_INSUFFICIENT_SIZE = 3
    INVALID_ARGUMENT = 4
    MISSED_DEADLINE_TRANSIENT = 5
    MISSED_DEADLINE_PERSISTENT = 6
    RESOURCE_EXHAUSTED_TRANSIENT = 7
    RESOURCE_EXHAUSTED_PERSISTENT = 8


class Timing(NamedTuple):
    """How long an execution took, in whole microseconds; None where it was not measured.

    `time_on_device` is spent computing; `time_in_driver` runs from the arrival of the request to the departure of the
    result and includes it, so it is never the smaller of the two.
    """

    time_on_device: int | None = None
    time_in_driver: int | None = None


NO_TIMING = Timing()


Phase = Literal["before start", "queued", "executing", "preparing", "waiting for the answer"]
"""Where something was when it went wrong.

before start: nothing was done for it, because the time that was left when it came did not suffice. queued: nothing was
done for it either, because others took the time. executing, preparing: it was given up on the way. waiting for the
answer: we stopped waiting, and do not know what the device does.
"""


class Cause(NamedTuple):
    """What is known about an error status besides it; None for what is not.

    `late_by`: seconds from the deadline to when it was found to have passed. `retry_after`: seconds after which the
    same may succeed, where that depends on others.
    """

    phase: Phase | None = None
    late_by: float | None = None
    retry_after: float | None = None


NO_CAUSE = Cause()


class OutputShape(NamedTuple):
    """The shape that one output has, or would have had: `is_sufficient` is False when its memory was too small.

    `dimensions` counts elements along each axis; () is a scalar, or a shape that the device does not know.
    """

    dimensions: tuple[int, ...] = ()
    is_sufficient: bool = True


class RequestArgument(NamedTuple):
    """Where one input or output of a request lies.

    Attributes:
        has_no_value: the argument is omitted; everything else keeps its default.
        pool: which of the request's pools it lies in, from 0.
        offset: its first byte in that pool.
        length: its size in bytes.
        dimensions: its shape in elements, where the model leaves it open; () means "as in the model".
    """

    has_no_value: bool = False
    pool: int = 0
    offset: int = 0
    length: int = 0
    dimensions: tuple[int, ...] = ()


class Request(NamedTuple):
    """One execution: an argument for each input and output of the model, in its order, and the memory they lie in.

    `pools` holds memory objects; arguments name them by position. Give tuples: a request that cannot change can be
    sent again without being encoded again. `loop_timeout`: nanoseconds that each WHILE may take; None is the device's
    own choice.
    """

    inputs: Sequence[RequestArgument]
    outputs: Sequence[RequestArgument]
    pools: Sequence[Any] = ()
    loop_timeout: int | None = None


@dataclass(slots=True, eq=False)
class Result:
    """What came of one execution. It is compared by identity, because comparing arrays has no one answer.

    Attributes:
        status: NONE, or why there is no result.
        outputs: one array per output, empty unless `status` is NONE; None where it is in a buffer of the device.
        output_shapes: one per output when `status` is OUTPUT_INSUFFICIENT_SIZE, and when it is NONE and the model
            leaves a shape open; may be empty when all shapes are known beforehand, and is for any other status.
        message: what the device says about an error, for people; a burst has no room for it.
        timing: in microseconds; known only if asked for, and only when `status` is NONE.
        cause: what is known about an error.
    """

    status: ErrorStatus
    outputs: tuple[NDArray[Any], ...] = ()
    output_shapes: tuple[OutputShape, ...] = ()
    timing: Timing = NO_TIMING
    message: str = ""
    cause: Cause = NO_CAUSE

    def raise_for_status(self) -> None:
        """Return if the status is NONE.

        Raises:
            StatusError: otherwise; the subclass for this status, with this result as its `result`.
        """
        if self.status != ErrorStatus.NONE:
            from burst.errors import status_error  # which needs ErrorStatus from here

            error = status_error(self.status, self.message, self.cause)
            error.result = self
            raise error
