"""burst moves one execution: a request through a message queue to a listener thread, and its result back."""

from burst.controller import Controller, NotSent
from burst.errors import (
    BurstError,
    Busy,
    DeviceUnavailable,
    GeneralFailure,
    InternalError,
    InvalidArgument,
    Malformed,
    MissedDeadlinePersistent,
    MissedDeadlineTransient,
    OutputInsufficientSize,
    PeerDied,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
    StatusError,
    Timeout,
)
from burst.memory import Memory
from burst.messages import ErrorStatus, OutputShape, Request, RequestArgument, Result, Timing
from burst.server import BurstServer

__all__ = [
    "BurstError",
    "BurstServer",
    "Busy",
    "Controller",
    "DeviceUnavailable",
    "ErrorStatus",
    "GeneralFailure",
    "InternalError",
    "InvalidArgument",
    "Malformed",
    "Memory",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "NotSent",
    "OutputInsufficientSize",
    "OutputShape",
    "PeerDied",
    "Request",
    "RequestArgument",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "Result",
    "StatusError",
    "Timeout",
    "Timing",
]
