"""fmq moves bytes: a lock-free message queue in shared memory whose ends can sleep, and cannot be left waiting."""

from fmq.descriptor import Descriptor, Flavour
from fmq.errors import (
    Busy,
    Closed,
    Corrupt,
    FmqError,
    InvalidDescriptor,
    NoSpace,
    PeerDied,
    RoleTaken,
    Timeout,
)
from fmq.event import EventFlag
from fmq.life import LifePage, Watch
from fmq.queue import Exchange, MessageQueue, MessageQueueReader, MessageQueueWriter
from fmq.region import Region, unlink

__all__ = [
    "Busy",
    "Closed",
    "Corrupt",
    "Descriptor",
    "EventFlag",
    "Exchange",
    "Flavour",
    "FmqError",
    "InvalidDescriptor",
    "LifePage",
    "MessageQueue",
    "MessageQueueReader",
    "MessageQueueWriter",
    "NoSpace",
    "PeerDied",
    "Region",
    "RoleTaken",
    "Timeout",
    "Watch",
    "unlink",
]
