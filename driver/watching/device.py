"""One device that runs: asked for its traces when the set of its bursts has changed, and otherwise only read.

No connection stays open, for a device without clients ends, and who looks on is none.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from burst import Memory, Trace
from driver.client import discovery, served
from driver.client.connection import Connection
from driver.errors import DeviceNotFound
from driver.options import PRIORITIES
from driver.protocol.census import Census, CensusCounts
from driver.watching.figures import BurstFigures, DeviceFigures, Queue
from driver.watching.processes import Processes
from driver.watching.watched import WatchedBurst
from fmq._core import lib
from fmq.life import PAGE
from fmq.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE = 5.0  # seconds for a service to answer
_EVERY = 0.5  # seconds between two questions, whatever comes and goes


class WatchedDevice:
    """What can be seen of it until it ends."""

    def __init__(self, address: str) -> None:
        """Finds it. Raises DeviceNotFound when it does not run, DriverError, BurstError."""
        self.address, self.bursts = address, dict[int, WatchedBurst]()
        with _connected(address) as connection:
            self.name, self.version = str(connection.name), str(connection.version)
            self._pids = connection.service_pid, connection.engine_pid
            _, fds = connection.call("census", timeout=_PATIENCE)
            memory, self._life = _mapped(fds[0], Census.nbytes), _mapped(fds[1], PAGE)
            self._census, self._processes = CensusCounts(memory), Processes(*self._pids)
            self._ask(connection)
        self._cpu, self._cpu_at = self._processes.cpu_seconds(), time.monotonic()

    @property
    def has_ended(self) -> bool:
        """Whether it is gone; its life word says so."""
        return bool(lib.fmq_life_state(self._life.base) != lib.FMQ_ALIVE)

    def glance(self) -> None:
        """Notes what came, for the next look."""
        for burst in self.bursts.values():
            burst.glance()

    def look(self) -> tuple[DeviceFigures, list[BurstFigures]]:
        """As it is now, with the bursts that the last `refresh` has found."""
        found = [burst.look() for burst in self.bursts.values()]
        return self._figures(found), found

    def refresh(self) -> None:
        """Finds bursts that have come, and forgets those that are gone. Raises as the constructor does."""
        if self._census.changes != self._seen and time.monotonic() - self._asked_at > _EVERY:
            with _connected(self.address) as connection:
                if (connection.service_pid, connection.engine_pid) != self._pids:
                    raise DeviceNotFound(f"{self.address}: it was started again")
                self._ask(connection)

    def _ask(self, connection: Connection) -> None:
        """For traces. A burst is known by the number of its memory, which no other has while we hold that."""
        self._asked_at, self._seen = time.monotonic(), self._census.changes
        fds: list[int] = []
        while True:
            (total,), more = connection.call("traces", len(fds), timeout=_PATIENCE)
            fds += more
            if not more or len(fds) >= total:
                break
        self.bursts = {number: burst for fd in fds for number, burst in self._burst(fd)}

    def _burst(self, fd: int) -> Iterator[tuple[int, WatchedBurst]]:
        number = os.fstat(fd).st_ino
        if known := self.bursts.get(number):
            os.close(fd)
            yield number, known
        else:
            memory = Memory.adopt(fd, Trace.nbytes, writable=False)
            memory.close()  # what is mapped stays
            yield number, WatchedBurst(Trace(memory), self.address, number)

    def _figures(self, bursts: list[BurstFigures]) -> DeviceFigures:
        return DeviceFigures(
            address=self.address,
            name=self.name,
            version=self.version,
            service_pid=self._pids[0],
            engine_pid=self._pids[1],
            clients=self._census.clients,
            bursts=self._census.bursts,
            cpu=self._cpu_share(),
            rss=self._processes.rss(),
            pss=self._processes.pss(),
            run_queue={name: self._queue(name, bursts) for name in reversed(PRIORITIES)},
        )

    def _cpu_share(self) -> float | None:
        before, then = self._cpu, self._cpu_at
        self._cpu, self._cpu_at = self._processes.cpu_seconds(), time.monotonic()
        if before is None or self._cpu is None:
            return None
        return max(0.0, self._cpu - before) / max(1e-9, self._cpu_at - then)

    def _queue(self, priority: str, bursts: list[BurstFigures]) -> Queue:
        """Of what was seen just now."""
        found = [burst for burst in self.bursts.values() if burst.priority == priority]
        waiting = sum(burst.is_waiting for burst in bursts if burst.priority == priority)
        return Queue(len(found), waiting, sum(b.waits_per_s for b in found), sum(b.waited for b in found))


@contextmanager
def _connected(address: str) -> Iterator[Connection]:
    channel = served.connect(address) if served.is_path(address) else None
    channel = channel or discovery.find(discovery.Place(discovery.runtime_dir(), address))
    if channel is None:
        raise DeviceNotFound(f"name={address!r}: that device does not run; it starts with its first client")
    try:
        connection = Connection(channel, _PATIENCE)
        yield connection
    finally:
        channel.close()


def _mapped(fd: int, nbytes: int) -> Region:
    region = Region.from_fd(fd, nbytes, writable=False)
    region.close()  # what is mapped stays
    return region
