"""The upkeep of an engine: what it holds beyond what clients account for, how that grows, and when it is renewed.

A runtime keeps what no client has asked for: weights that it laid out anew, arenas, and what it leaks. The service
knows the engine's private pages, and asks the engine what it counts for clients; the rest is the runtime's. It looks
after every ten seconds in which the engine has worked, and whenever it has taken 64 MiB more: an idle engine grows by
nothing, and wakes nobody up.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import closing, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burst import BurstError
from driver.client.connection import Connection
from driver.errors import DriverError
from driver.protocol.ledger_report import LedgerReport

if TYPE_CHECKING:
    from driver.engine.limits import RenewWhen
    from driver.service.process import Service

_EVERY = 10.0  # seconds
_MUCH = 64 << 20  # bytes that it has taken since the last look: the next one is due then
_KEPT_EVERY, _MOST_KEPT, _FEWEST = 60.0, 64, 4  # seconds; samples for the slope
_HOUR = 3600.0
_WITHIN = 2.0  # seconds for the engine's answer
_AGAIN = 600.0  # seconds from a renewal that failed to the next attempt


class RuntimeMemory(NamedTuple):
    """The memory of an engine, in bytes: all that is private to it, and what no client accounts for.

    growth: of the latter in an hour, by the last hour; None: it has not worked long enough.
    """

    private: int
    runtime: int
    growth: float | None = None


class MemoryHistory:
    """Samples of the memory that no client accounts for, a minute apart or more."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_MOST_KEPT)

    def note(self, at: float, nbytes: int) -> None:
        """Keep a sample, unless there is one of the minute before. `at`: in seconds."""
        if not self._samples or at - self._samples[-1][0] >= _KEPT_EVERY:
            self._samples.append((at, nbytes))

    def growth(self) -> float | None:
        """Return the slope of the line that fits the samples best, in bytes an hour; None: there are too few."""
        if len(self._samples) < _FEWEST:
            return None
        at, nbytes = np.array(self._samples, np.float64).T
        return float(np.polyfit(at - at[0], nbytes, 1)[0] * _HOUR)


class InstalledCode:
    """The installed files of Burst and of a device's runtime: whether others have taken their place."""

    def __init__(self, library: str | None) -> None:
        """`library`: the module that the device is made of."""
        specs = [find_spec(name.partition(".")[0]) for name in ("driver", library) if name]
        self._files = [str(spec.origin) for spec in specs if spec and spec.origin]
        self._loaded = self._before = self._stamps()

    def _stamps(self) -> list[tuple[int, int]]:
        return [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, self._files)]

    def change(self) -> str:
        """Return which file is another than at the beginning, and the same as at the last call; "": none is. Raise
        OSError while one is missing.
        """
        before, self._before = self._before, self._stamps()
        changed = [
            path
            for path, now, then, loaded in zip(self._files, self._before, before, self._loaded, strict=True)
            if now == then != loaded
        ]
        return f"{changed[0]} was replaced" if changed else ""


class Upkeep:
    """The upkeep of one service's engine. Any thread."""

    def __init__(self, service: Service, when: RenewWhen, code: InstalledCode | None) -> None:
        """`code`: None where the next engine has the same code as this one whatever is installed."""
        self._service, self._when, self._code = service, when, code
        self._lock, self._history = threading.Lock(), MemoryHistory()
        self._began = self._tried = time.monotonic()
        self._next, self._most = self._began + _EVERY, _MUCH
        self._memory: RuntimeMemory | None = None

    def memory(self, private: int) -> RuntimeMemory:
        """Return what the engine has, after a look if one is due. `private`: its private memory now."""
        if self._memory is None:
            self._next = 0.0
        self.look(private)
        return self._memory._replace(private=private) if self._memory else RuntimeMemory(private, private)

    def look(self, private: int) -> None:
        """Look, if it is due, and renew the engine if that is, too."""
        now = time.monotonic()
        if (now < self._next and private < self._most) or not self._lock.acquire(blocking=False):
            return
        try:
            self._next, self._most = now + _EVERY, private + _MUCH
            with suppress(BurstError, DriverError, OSError, RuntimeError):  # the next look finds out
                runs = self._ask(now, private)
                self._renew_if_due(now, private, runs)
        finally:
            self._lock.release()

    def _ask(self, now: float, private: int) -> int:
        """Ask the engine what it counts for clients; return how many executions it has done."""
        with closing(Connection(self._service.own_client(), timeout=_WITHIN)) as connection:
            rows = LedgerReport.read(connection.call, "engine", timeout=_WITHIN).rows
            flows = connection.call("figures", timeout=_WITHIN)[0][2]
        counted = sum(row.held.get("bytes", 0) for row in rows if row.application is None)
        runtime = max(0, private - counted)
        self._history.note(now, runtime)
        self._memory = RuntimeMemory(private, runtime, self._history.growth())
        self._service.note_runtime(runtime)
        return int(sum(flow[0] for flow in flows))

    def _renew_if_due(self, now: float, private: int, runs: int) -> None:
        why = self._when.reason(private, now - self._began, runs) or (self._code.change() if self._code else "")
        if why and (self._tried == self._began or now - self._tried > _AGAIN):
            self._tried = now
            self._service.renew(why)
