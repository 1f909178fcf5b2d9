"""A watch on the private memory of an engine: what its runtime takes is in no ledger before it is taken.

Weights that a runtime lays out anew, its arenas and temporaries, outputs whose size follows from a value: the kernel
knows them, as the engine's private pages. The service looks at these whenever the engine has used so much processor
time, which no page comes without. An engine that has more than it may is ended: it is its account's own. Where it has
a control group of its own (`driver.service.engine_group`), the kernel holds it meanwhile.
"""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from burst.serving_thread import ServingThread
from driver.libc import function
from driver.service.process_figures import private_bytes
from fmq._core import ffi

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.engine.ledger import Account
    from driver.engine.limits import Limits
    from driver.service.engine_group import EngineGroup

_EVERY = 0.02  # seconds of processor time
_PAUSE = 0.1  # seconds, where there are no timers of another process's time
_SIGNAL = signal.SIGRTMIN + 7
_TO_THREAD, _PROCESS_TIME = 4, 2  # SIGEV_THREAD_ID; the clock that counts all time of a process

_timer_create = function("timer_create", "int(*)(int clock, void *event, void **timer)")
_timer_settime = function("timer_settime", "int(*)(void *timer, int flags, int64_t *every, void *before)")


class EngineWatch:
    """A watch on one engine."""

    def __init__(
        self,
        pid: int,
        limits: Limits,
        account: Account,
        end: Callable[[int, int], object] | None,
        look: Callable[[int], object] = abs,
        group: EngineGroup | None = None,
        group_most: Callable[[int], int] = abs,
    ) -> None:
        """Start no thread yet. `account`: in whose row of the ledger the memory is. `end`: called with what the engine
        has and what it may have; None: it is only measured. `look`: called with what it has at each look. `group`: that
        it is in. `group_most`: returns what that may have, for so many clients.
        """
        self._tell = look
        self._pid, self._limits, self._account, self._end = pid, limits, account, end
        self._most_clients, self._group, self._group_most = 0, group, group_most
        self._bound()

    def start(self) -> None:
        """Begin to look. Raise RuntimeError if no thread can be started."""
        ServingThread(self._look, name="engine memory").start()
        if self._group:
            ServingThread(self._watch_group, self._group, name="engine group").start()

    def note(self, clients: int) -> None:
        """Note how many clients there are. What the engine has taken for those that have left, it may keep."""
        if clients > self._most_clients:
            self._most_clients = clients
            self._bound()

    def _bound(self) -> None:
        if self._group:
            self._group.bound(self._group_most(self._most_clients))

    def _watch_group(self, group: EngineGroup) -> None:
        while True:
            group.wait()
            found, most = group.held(), self._group_most(self._most_clients)
            if self._end and (found > most or group.has_ended_one()):
                self._end(max(found, most), most)
                return

    def measure(self) -> int:
        """Return what the engine has now, and write it into the ledger."""
        found = private_bytes(self._pid)
        self._account.note("engine_bytes", found)
        return found

    def _look(self) -> None:
        wait = _uses_of(self._pid)
        while True:
            found, most = self.measure(), self._limits.engine_most(self._most_clients)
            if found > most and self._end:
                self._end(found, most)
                return
            self._tell(found)
            wait()


def _uses_of(pid: int) -> Callable[[], object]:
    """Return a function that waits, in this thread alone, until the process has used _EVERY more of its time; for
    _PAUSE where there are no such timers.
    """
    if not (_timer_create and _timer_settime):
        return partial(time.sleep, _PAUSE)
    signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})
    event, timer = ffi.new("int32_t[16]"), ffi.new("void **")  # struct sigevent: 64 bytes
    event[2], event[3], event[4] = _SIGNAL, _TO_THREAD, threading.get_native_id()
    every = ffi.new("int64_t[4]", [0, int(_EVERY * 1e9)] * 2)  # struct itimerspec
    if _timer_create(~pid << 3 | _PROCESS_TIME, event, timer) or _timer_settime(timer[0], 0, every, ffi.NULL):
        return partial(time.sleep, _PAUSE)
    return partial(signal.sigwait, {_SIGNAL})
