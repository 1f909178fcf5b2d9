"""Watches a served device: its self test, systemd's watchdog, and whether it answers.

Status messages go to systemd as sd_notify(3) says: datagrams to the socket that NOTIFY_SOCKET names, from the main
process alone. The service of a cell, and that of a driver in a shared library, tell it through a pipe to that process,
which believes nothing but these messages: else what takes over any process of the unit could have systemd end it. The
health check uses the device as a client does, over a connection of the service's own.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from burst import BurstError, Timeout
from burst.channel import close_all
from driver.client.connection import Connection
from driver.client.device import RemoteDevice
from driver.errors import DeviceFailed, DriverError
from driver.nn import ModelBuilder

if TYPE_CHECKING:
    from driver.service.process import Service


VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""The variables by which systemd configures this."""

_PIPE, _STATES = "pipe:", {b"READY=1", b"WATCHDOG=1"}


def notify(**fields: object) -> None:
    """Tell systemd: `notify(READY=1, STATUS="…")`. Does nothing without systemd, and ignores errors."""
    _tell("\n".join(f"{name}={' '.join(str(value).split())}" for name, value in fields.items()).encode())


def _tell(raw: bytes) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    with suppress(OSError):
        if address.startswith(_PIPE):
            os.write(int(address.removeprefix(_PIPE)), raw[: select.PIPE_BUF])
        elif sock := _to_systemd():
            with sock:
                sock.send(raw)


def _to_systemd() -> socket.socket | None:
    """Return a socket by which systemd takes messages, and nobody waits for it; None where it takes none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
    except OSError:
        sock.close()
        return None
    return sock


class NotifyPipe:
    """A pipe by which a child's status messages reach systemd, through the main process.

    That connects to systemd now: it may be confined later.
    """

    def __init__(self) -> None:
        systemd = _to_systemd()
        self.systemd = systemd.detach() if systemd else -1
        self.readable, self.writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK | os.O_DIRECT)  # a message a read

    def enter(self) -> None:
        """Have `notify` write to the pipe, in the child."""
        if "NOTIFY_SOCKET" in os.environ:
            os.environ["NOTIFY_SOCKET"] = f"{_PIPE}{self.writable}"

    def forward(self) -> None:
        """Send systemd what one message says of the device's state, and nothing else."""
        with suppress(OSError):
            lines = os.read(self.readable, select.PIPE_BUF).split(b"\n")
            if said := [line for line in lines if line in _STATES or line.startswith(b"STATUS=")]:
                os.write(self.systemd, b"\n".join(said))


def watchdog_seconds() -> float | None:
    """Return the longest interval between two WATCHDOG=1 messages that systemd accepts; None if it wants none."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(usec) / 1e6 if is_ours and usec.isdecimal() and int(usec) else None


_log = logging.getLogger(__name__)
WITHIN = 2.0
"""Seconds within which a healthy device answers."""

_TEST_WITHIN = 60.0
_NO_CELL = 2**31  # a number that none has


class HealthMonitor:
    """Watches one service, in the service's process."""

    def __init__(self, service: Service, address: str, is_quiet: bool = False) -> None:
        self.service, self._is_quiet = service, is_quiet
        self._address, self._socket = address, os.stat(address)
        self.device = RemoteDevice(Connection(service.own_client()), address)
        self.device.connection.is_watched = True  # it stays with this service whatever other clients do
        self._untested = "its self test is not finished"

    def trouble(self, within: float = WITHIN) -> str:
        """Say why the device is not healthy; empty if it is."""
        try:
            self.device.call("turns", timeout=within)
            close_all(self.device.call("cells", _NO_CELL, timeout=within)[1])  # the broker answers, if there is one
        except Timeout:
            return f"it did not answer within {within:g} s"
        except BurstError as error:
            return f"it fails to answer: {error}"
        return self._untested or self._missing()

    def _missing(self) -> str:
        """Say that no client finds the device's socket any more; empty if clients do."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self._address), self._socket):
                return ""
        return f"its socket {self._address} is no longer there, so no new client can connect: start the device again"

    def begin(self) -> bool:
        """Run the self test, then start the watchdog's thread. False: the test failed, and the engine is ended."""
        begin, device = time.monotonic(), self.device
        try:
            found = self_test(device)
        except (BurstError, DriverError) as error:
            notify(STATUS=f"its self test failed: {error}")
            _log.error("the self test failed, so the device ends: %s", error)
            self.service.kill()
            return False
        self._untested = ""
        took = (time.monotonic() - begin) * 1e3
        if not self._is_quiet:
            with suppress(OSError):  # the reader of our output may be gone
                print(f"{device.name}, version {device.version}, is ready after {took:.0f} ms: {found}", flush=True)
        notify(READY=1, STATUS=f"ready: {found}")
        if every := watchdog_seconds():
            threading.Thread(target=self._watch, args=(every / 2,), name="watchdog", daemon=True).start()
        return True

    def _watch(self, every: float) -> None:
        """Report to systemd only while the device answers, so that systemd restarts a device that hangs."""
        pause = threading.Event()
        while not pause.wait(every):
            if trouble := self.trouble(every):
                notify(STATUS=trouble)
                _log.error("%s", trouble)
            else:
                clients, _ = self.service.counts()
                notify(WATCHDOG=1, STATUS=f"answers; {clients} client{'s' * (clients != 1)}")


def self_test(device: RemoteDevice) -> str:
    """Add two vectors on both paths; return the finding as text. Raise DeviceFailed, BurstError."""
    builder, x = ModelBuilder(), np.arange(4, dtype=np.float32)
    builder.output(builder.operation("ADD", builder.input("float32", (4,)), x, 0))
    model = builder.build()
    if not all(device.supported_operations(model)):
        return "it answers; it was not tested further because it does not support ADD of float32"
    with device.prepare(model, deadline=time.monotonic() + _TEST_WITHIN) as prepared:
        sums = [prepared.run(x, timeout=_TEST_WITHIN)[0]]
        with prepared.burst() as burst:
            sums.append(burst.run(x, timeout=_TEST_WITHIN).outputs[0].copy())
    for found in sums:
        if not np.allclose(found, x + x, rtol=1e-2):
            raise DeviceFailed(f"the device computed {x.tolist()} + {x.tolist()} = {found.tolist()}")
    return "its self test passed"


def begin_monitoring(service: Service, address: str, metrics_fd: int, is_quiet: bool) -> bool:
    """Start the monitor, test the device, and return True if it passed.

    `metrics_fd`: a listening socket for metrics and health, or -1. `is_quiet`: prints nothing.
    """
    monitor = HealthMonitor(service, address, is_quiet)
    if metrics_fd >= 0:
        from driver.service.metrics_server import expose

        expose(monitor, metrics_fd, service.close_socket)
    return monitor.begin()
