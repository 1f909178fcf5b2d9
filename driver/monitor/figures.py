"""The figures of one sample of devices and bursts. Rates, percentiles and CPU cover the time since the last one."""

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
    """The bursts of one priority in a device's run queue."""

    bursts: int
    waiting: int  #: now
    waits_per_s: float
    waited: float  #: seconds of waiting in one second, by all of them; without the first execution of a request
    joined_per_s: float  #: executions that others shared a run with


@dataclass(frozen=True, slots=True)
class BurstFigures:
    """One burst. The client itself claims its counts and its pid."""

    device: str
    number: int  #: the same for every observer; unique on this machine while the burst is open
    pid: int
    program: str  #: empty if it is not visible from here
    model: str
    application: str  #: that it declares, or its control group; empty for none but its account
    priority: str  #: empty if unknown
    depth: int
    rate: float  #: results in a second, of both paths
    latency: Spread | None  #: None: no results came
    stages: Mapping[str, Spread]  #: of the same results, or of a part of them if there were more than 256
    in_flight: int
    queued: int  #: requests that the device has not taken yet
    unread: int  #: results that the client has not taken yet
    is_waiting: bool  #: for its turn on the device
    results: int  #: since the burst began, like the four counts below
    plain: int
    drops: int
    timeouts: int
    path: str  #: "burst", "plain", "both", or empty when no results came
    client_cpu: float  #: share of one CPU, in the client's calls
    device_cpu: float | None  #: share of one CPU, of the listener; None if the kernel does not tell
    late: Mapping[str, int] = field(default_factory=dict)  #: frames of a stream that came late, by source


class Holding(NamedTuple):
    """The amount that is held of one figure of the ledger, such as threads, and how much of it may be."""

    held: int
    most: int


@dataclass(frozen=True, slots=True)
class AccountFigures:
    """The holdings of an account, or of one application of it, in a process of a device."""

    process: str  #: "engine" or "service"
    uid: int
    application: str | None  #: None: all of the account's together
    holdings: Mapping[str, Holding]  #: by figure, those nearest to their limits first
    spent: Mapping[str, float]  #: seconds and bytes that are gone


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """One device, as far as this account may see it. None: the kernel does not tell."""

    address: str
    name: str
    version: str
    service_pid: int
    engine_pid: int
    engines: int  #: more than one: each of an account, all of which we see; the pids are those of our own
    clients: int
    bursts: int
    cpu: float | None  #: share of one CPU, all processes
    rss: int | None  #: bytes, all processes
    pss: int | None  #: the same, with shared pages divided among their users; read every ten seconds
    run_queue: Mapping[str, Queue]  #: by priority
    accounts: list[AccountFigures] = field(default_factory=list)  #: empty unless they were asked for
    engine_memory: int | None = None  #: bytes, private to its engines; read every ten seconds, as the next two
    runtime_memory: int | None = None  #: bytes of that which no client accounts for: what its runtime keeps
    runtime_growth: float | None = None  #: bytes of that in an hour; None: it has not worked for long
    gpu_memory: int | None = None  #: bytes on all GPUs, its processes that we see; None: NVML tells nothing of them


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """One GPU of this machine, with what all programs use. None: NVML does not tell."""

    index: int
    name: str
    memory_used: int | None = None  #: bytes
    memory_total: int | None = None
    utilisation: float | None = None  #: share of the driver's last sampling period in which a kernel ran
    memory_of: Mapping[int, int] = field(default_factory=dict)  #: bytes by process


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of all watched devices."""

    at: float  #: seconds since the epoch
    seconds: float  #: since the sample before
    devices: list[DeviceFigures] = field(default_factory=list)
    bursts: list[BurstFigures] = field(default_factory=list)
    absent: Mapping[str, str] = field(default_factory=dict)  #: missing devices, and why
    gpus: list[GpuFigures] = field(default_factory=list)  #: empty without NVML
