"""burst moves one execution: a request through a message queue to a listener thread, and its result back."""

from burst.controller import Controller, NotSent, Offer
from burst.errors import (
    BuffersLost,
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
    Quarantined,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
    ResultsHeld,
    StatusError,
    Timeout,
)
from burst.images import HardwareBuffer
from burst.memory import DeviceBuffer, Memory, Usage
from burst.messages import ErrorStatus, OutputShape, Request, RequestArgument, Result, Timing
from burst.server import BurstServer, Terms
from burst.trace import Trace

__all__ = [
    "BuffersLost",
    "BurstError",
    "BurstServer",
    "Busy",
    "Controller",
    "DeviceBuffer",
    "DeviceUnavailable",
    "ErrorStatus",
    "GeneralFailure",
    "HardwareBuffer",
    "InternalError",
    "InvalidArgument",
    "Malformed",
    "Memory",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "NotSent",
    "Offer",
    "OutputInsufficientSize",
    "OutputShape",
    "PeerDied",
    "Quarantined",
    "Request",
    "RequestArgument",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "Result",
    "ResultsHeld",
    "StatusError",
    "Terms",
    "Timeout",
    "Timing",
    "Trace",
    "Usage",
]
