"""fmq moves bytes: a lock-free message queue in shared memory whose ends can sleep, and cannot be left waiting."""

from fmq import foundation  # noqa: F401 (it looks at what the next lines need)

# isort: split
from fmq.descriptor import Descriptor, Grantor
from fmq.end import MessageQueueReader, MessageQueueWriter
from fmq.errors import (
    Busy,
    Closed,
    Corrupt,
    Evicted,
    FmqError,
    InvalidDescriptor,
    NoSpace,
    Overrun,
    PeerDied,
    RoleTaken,
    Timeout,
    TooLong,
)
from fmq.event import EventFlag
from fmq.exchange import Exchange
from fmq.geometry import Flavour
from fmq.inspection import QueueInfo, inspect, queues
from fmq.life import LifePage, Watch
from fmq.queue import MessageQueue
from fmq.readers import ReaderState
from fmq.records import RecordReader, RecordWriter
from fmq.region import Region, unlink
from fmq.version import __version__ as __version__
from fmq.wait import wait_any

__all__ = [
    "Busy",
    "Closed",
    "Corrupt",
    "Descriptor",
    "EventFlag",
    "Evicted",
    "Exchange",
    "Flavour",
    "FmqError",
    "Grantor",
    "InvalidDescriptor",
    "LifePage",
    "MessageQueue",
    "MessageQueueReader",
    "MessageQueueWriter",
    "NoSpace",
    "Overrun",
    "PeerDied",
    "QueueInfo",
    "ReaderState",
    "RecordReader",
    "RecordWriter",
    "Region",
    "RoleTaken",
    "Timeout",
    "TooLong",
    "Watch",
    "inspect",
    "queues",
    "unlink",
    "wait_any",
]
