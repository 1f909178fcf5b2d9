"""What a client is told when it does not get what it asked for: one error, in gRPC's words and in HTTP's."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from burst import PeerDied
from burst.errors import (
    Busy,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    Malformed,
    OutputInsufficientSize,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from driver.errors import DriverError, ImportFailed, InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable


class RefusalCode(Enum):
    """Name of gRPC's status code; its number and HTTP's status."""

    INVALID_ARGUMENT = (3, 400)
    DEADLINE_EXCEEDED = (4, 504)
    NOT_FOUND = (5, 404)
    ALREADY_EXISTS = (6, 409)
    RESOURCE_EXHAUSTED = (8, 429)
    FAILED_PRECONDITION = (9, 409)
    UNIMPLEMENTED = (12, 501)
    INTERNAL = (13, 500)
    UNAVAILABLE = (14, 503)

    @property
    def http(self) -> int:
        """HTTP's status."""
        return self.value[1]


class Refusal(Exception):
    """A request that is not answered otherwise. The text is for the client."""

    def __init__(self, code: RefusalCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def invalid(text: str) -> Refusal:
    """Return a refusal for the client's own mistake."""
    return Refusal(RefusalCode.INVALID_ARGUMENT, text)


def not_found(text: str) -> Refusal:
    """There is no such model, version or region."""
    return Refusal(RefusalCode.NOT_FOUND, text)


_OF_ERRORS: tuple[tuple[type[Exception], RefusalCode], ...] = (
    (TimeoutError, RefusalCode.DEADLINE_EXCEEDED),
    (Busy, RefusalCode.RESOURCE_EXHAUSTED),
    (ResourceExhaustedTransient, RefusalCode.RESOURCE_EXHAUSTED),
    (ResourceExhaustedPersistent, RefusalCode.RESOURCE_EXHAUSTED),
    (DeviceUnavailable, RefusalCode.UNAVAILABLE),
    (PeerDied, RefusalCode.UNAVAILABLE),
    (OutputInsufficientSize, RefusalCode.INVALID_ARGUMENT),
    (InvalidArgument, RefusalCode.INVALID_ARGUMENT),
    (GeneralFailure, RefusalCode.INTERNAL),  # in the words of the model's runtime
    (Malformed, RefusalCode.INVALID_ARGUMENT),
    (ImportFailed, RefusalCode.INVALID_ARGUMENT),
    (InvalidModel, RefusalCode.INVALID_ARGUMENT),
    (ValueError, RefusalCode.INVALID_ARGUMENT),
    (DriverError, RefusalCode.UNAVAILABLE),
)


def refusal_of(error: Exception, note: Callable[[Exception], object]) -> Refusal:
    """Return what a client is told of an error. `note` gets errors whose text is not for clients: our bugs.

    Never `error` itself: a caller that keeps it in a variable makes a cycle of its frame, the error and the traceback,
    and the frames in there keep a client's shared memory mapped until Python collects garbage.
    """
    if isinstance(error, Refusal):
        return Refusal(error.code, error.text)
    for kind, code in _OF_ERRORS:
        if isinstance(error, kind):
            return Refusal(code, str(error))
    note(error)
    return Refusal(RefusalCode.INTERNAL, f"the server failed over this request ({type(error).__name__}); see its log")
