"""What one look at devices and their bursts has found. Rates, percentiles and CPU are since the look before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Spread(NamedTuple):
    """Microseconds."""

    p50: float
    p99: float


class Queue(NamedTuple):
    """The bursts of one priority, and their turns on the device."""

    bursts: int
    waiting: int  #: now
    waits_per_s: float
    waited: float  #: seconds of waiting in one second, by all of them; without the first execution of a request


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """One burst. What its client counts, and the client's pid, are what the client says."""

    device: str
    number: int  #: the same for all who look at it, and while it is open no other's on this machine
    pid: int
    program: str  #: empty when it is not seen from here
    model: str
    priority: str  #: empty when it is not known
    depth: int
    rate: float  #: results in a second, of both paths
    latency: Spread | None  #: None: no results came
    stages: Mapping[str, Spread]  #: of the same results, or of a part of them if there were more than 256
    in_flight: int
    queued: int  #: requests that the device has not taken yet
    unread: int  #: results that the client has not taken yet
    is_waiting: bool  #: for its turn on the device
    results: int  #: since it began, as all that follows
    plain: int
    drops: int
    timeouts: int
    path: str  #: "burst", "plain", "both", or empty when no results came
    client_cpu: float  #: in its calls, of one processor
    device_cpu: float | None  #: of its listener; None where the kernel does not tell


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One device: as much of it as this account may see. None: the kernel does not tell."""

    address: str
    name: str
    version: str
    service_pid: int
    engine_pid: int
    clients: int
    bursts: int
    cpu: float | None  #: of one processor, both processes
    rss: int | None  #: bytes, both processes
    pss: int | None  #: the same, with what is shared divided among those who share it; looked up every ten seconds
    run_queue: Mapping[str, Queue]  #: by priority


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    at: float  #: seconds since the epoch
    seconds: float  #: since the last look
    devices: list[DeviceFigures] = field(default_factory=list)
    bursts: list[BurstFigures] = field(default_factory=list)
    absent: Mapping[str, str] = field(default_factory=dict)  #: devices that are missed, and why
