"""The vocabulary of one execution: what a client asks, and what a device answers.

Nothing here knows how it travels (`burst.wire`) or what a model is (`driver`). Everything here is an immutable tuple
with names: cheap to make, safe to remember, compared by value. `Result` is in `burst.errors`, beside the errors that it
raises.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence


class ErrorStatus(IntEnum):
    """How an execution, or any other call to a device, ended. The numbers are those of the NN HAL 1.3.

    It prints as its name, and compares as its number.
    """

    NONE = 0
    DEVICE_UNAVAILABLE = 1
    GENERAL_FAILURE = 2
    OUTPUT_INSUFFICIENT_SIZE = 3
    INVALID_ARGUMENT = 4
    MISSED_DEADLINE_TRANSIENT = 5
    MISSED_DEADLINE_PERSISTENT = 6
    RESOURCE_EXHAUSTED_TRANSIENT = 7
    RESOURCE_EXHAUSTED_PERSISTENT = 8

    def __str__(self) -> str:
        return self.name

    def __format__(self, form: str) -> str:
        """Format as its name, unless the form is one of numbers, such as "d"."""
        return int.__format__(self, form) if form[-1:].isalpha() and form[-1:] != "s" else format(str(self), form)


class _Times(NamedTuple):
    time_on_device: int | None = None
    time_in_driver: int | None = None


class Timing(_Times):
    """How long an execution took, in whole microseconds; None where it was not measured.

    `time_on_device` is spent computing; `time_in_driver` runs from the arrival of the request to the departure of the
    result and includes it, so it is never the smaller of the two.
    """

    joined: int | None = None
    """The number of requests that were one run, of a measured request in a burst: 1 for one that ran alone."""


NO_TIMING = Timing()


Phase = Literal["before start", "queued", "executing", "preparing", "waiting for the answer"]
"""Where something was when it went wrong.

before start: nothing was done for it, because the time that was left when it came did not suffice. queued: nothing was
done for it either, because others took the time. executing, preparing: it was given up on the way. waiting for the
answer: we stopped waiting, and do not know what the device does.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Cause(NamedTuple):
    """A record of what is known about an error besides its status; None for what is not known.

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
