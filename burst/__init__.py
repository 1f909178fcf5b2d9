"""burst moves one execution: a request through a message queue to a listener thread, and its result back."""

from burst import foundation  # noqa: F401 (it looks at what the next lines need)

# isort: split
from burst.controller import Accepted, Controller, NotSent, Offer
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
    Result,
    ResultsHeld,
    StatusError,
    Timeout,
)
from burst.execution_burst import BurstExecutorWithCache, BurstOffer, ExecutionBurst
from burst.memory import DeviceBuffer, HardwareBuffer, Memory, Usage
from burst.messages import ErrorStatus, OutputShape, Request, RequestArgument, Timing
from burst.server import ExecutionBurstServer
from burst.trace import Trace
from fmq.version import __version__ as __version__

__all__ = [
    "Accepted",
    "BuffersLost",
    "BurstError",
    "BurstExecutorWithCache",
    "BurstOffer",
    "Busy",
    "Controller",
    "DeviceBuffer",
    "DeviceUnavailable",
    "ErrorStatus",
    "ExecutionBurst",
    "ExecutionBurstServer",
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
    "Timeout",
    "Timing",
    "Trace",
    "Usage",
]
