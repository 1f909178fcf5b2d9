"""Which model files run in the engine, in memory that the service reads when the engine has died.

Each thread that executes files has a slot: the digest of the file that it runs, and the signal that hits the thread,
which the handler of fatal signals notes there. So the service knows which file to quarantine. A run that goes on a
second after its deadline, or after its client gave it up, cannot be stopped: it is noted, too, and the engine ends.

Executions in C (`BoundExecution.native`) are not noted: that would take Python.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from burst._core import ffi, lib
from driver.interface import BoundExecution, PreparedModel
from fmq.clock import FOREVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import BurstOffer, ErrorStatus, ExecutionBurst
    from driver.interface import BindOptions, Preparation, Saved
    from driver.options import Preference

    Array = np.ndarray[Any, Any]

_log = logging.getLogger(__name__)
GRACE = 1.0
"""Seconds that a run may go on after it was told to end."""

OVERDUE = 0xFFFF
"""In the place of a signal: the engine ended itself, because a run could not be stopped."""

_SLOTS, _SLOT = 256, np.dtype([("signal", np.uint64), ("digest", "V32"), ("unused", "V24")])
_SIGNAL = ffi.offsetof("burst_trace", "device", "signal")
_LOOK = 0.25  # seconds
_NONE = bytes(32)


class FileEnd(NamedTuple):
    """A file that was running when the engine died."""

    digest: bytes
    signal: int  #: that its thread got, OVERDUE, or 0


class RunningFiles:
    """The slots. Both processes have them from one fork."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _SLOTS * _SLOT.itemsize)
        self.slots: Array = np.frombuffer(self._map, _SLOT)
        self._free = list(range(_SLOTS))
        self._local = threading.local()
        self._watch = OverdueWatch(self._end)

    def ends(self) -> list[FileEnd]:
        """The files that were running, or whose thread got a signal."""
        found = [FileEnd(row["digest"].tobytes(), int(row["signal"])) for row in self.slots]
        return [each for each in found if each.digest != _NONE]

    def guarded(self, prepared: PreparedModel, digest: bytes) -> PreparedModel:
        """The model of a file with that digest; its runs are noted."""
        return GuardedModel(prepared, digest, self)

    def slot(self) -> Slot | None:
        """Of this thread; None where all are taken."""
        try:
            return self._local.slot  # type: ignore[no-any-return]
        except AttributeError:
            with suppress(IndexError):
                self._local.slot = Slot(self._map, self.slots, self._free)
                return self._local.slot  # type: ignore[no-any-return]
        return None

    def watch(self, run: object, slot: Slot, end: int) -> None:
        """The run must end by `end`, CLOCK_MONOTONIC ns, and GRACE seconds more."""
        self._watch.add(run, slot, end)

    def unwatch(self, run: object) -> None:
        """It has ended."""
        self._watch.remove(run)

    def _end(self, slot: Slot) -> NoReturn:
        slot.note(OVERDUE)
        _log.error("a run of the model file %s cannot be stopped; the engine ends", slot.digest.hex()[:12])
        os._exit(1)


class Slot:
    """One thread's. It is given back when the thread has ended."""

    def __init__(self, memory: mmap.mmap, slots: Array, free: list[int]) -> None:
        """Raises IndexError when none is free."""
        self._number, self._free = free.pop(), free
        self._row = slots[self._number : self._number + 1]
        begin = self._number * _SLOT.itemsize + _SLOT.fields["digest"][1]  # type: ignore[index]
        self._bytes = memoryview(memory)[begin : begin + len(_NONE)]
        # `burst_blame_on` wants a trace, of which it uses the address of this field.
        self._place = ffi.cast("burst_trace *", self._row.ctypes.data - _SIGNAL)

    @property
    def digest(self) -> bytes:
        """Of the file that runs."""
        return bytes(self._bytes)

    def begin(self, digest: bytes) -> None:
        """This thread runs the file from now on. A listener has its own place for signals whenever it runs."""
        self._bytes[:] = digest
        lib.burst_blame_on(self._place)

    def end(self) -> None:
        """It runs none."""
        self._bytes[:] = _NONE

    def note(self, signal: int) -> None:
        """As the handler of signals does it."""
        self._row["signal"] = signal

    def __del__(self) -> None:
        with suppress(AttributeError):  # there was none
            self.end()
            self._free.append(self._number)


class OverdueWatch:
    """Calls `end` for runs that go on too long. One thread, which sleeps while nothing is bounded."""

    def __init__(self, end: Callable[[Slot], object]) -> None:
        self._end = end
        self._runs: dict[object, tuple[int, Slot]] = {}
        self._starting, self._thread = (
            threading.Lock(),
            threading.Thread(target=self._look, name="overdue", daemon=True),
        )
        self._some = threading.Event()

    def add(self, run: object, slot: Slot, end: int) -> None:
        """The run ends by `end`, CLOCK_MONOTONIC ns, or is overdue GRACE seconds later. The earliest end counts."""
        known = self._runs.get(run)
        if known is None or end < known[0]:
            self._runs[run] = end, slot
        if not self._some.is_set():
            self._some.set()
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()

    def remove(self, run: object) -> None:
        """It has ended."""
        self._runs.pop(run, None)

    def _look(self) -> None:
        while True:
            self._some.wait()
            time.sleep(_LOOK)
            latest = time.monotonic_ns() - int(GRACE * 1e9)
            for run, (end, slot) in list(self._runs.items()):
                if end < latest and run in self._runs:
                    self._end(slot)
            self._some.clear()  # before looking: a run that is added meanwhile sets it again
            if self._runs:
                self._some.set()


class GuardedModel(PreparedModel):
    """A model file, whose runs are noted."""

    def __init__(self, inner: PreparedModel, digest: bytes, running: RunningFiles) -> None:
        self.inner, self._digest, self._running = inner, digest, running
        self.serves_all, self.improves_after = inner.serves_all, inner.improves_after
        self.burst_versions = inner.burst_versions

    @property
    def is_static(self) -> bool:  # type: ignore[override]
        return self.inner.is_static

    def bind(
        self,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array],
        options: BindOptions,
    ) -> BoundExecution:
        bound = self.inner.bind(inputs, outputs, options)
        return GuardedExecution(bound, self._digest, self._running)

    def saved(self, root: Array) -> Saved | None:
        return self.inner.saved(root)

    def rest(self) -> None:
        self.inner.rest()

    def configure_execution_burst(self, offer: BurstOffer) -> ExecutionBurst | None:
        return self.inner.configure_execution_burst(offer)

    def burst_began(self, preference: Preference) -> None:
        self.inner.burst_began(preference)

    def burst_ended(self) -> None:
        self.inner.burst_ended()

    def improved(self, preparation: Preparation) -> PreparedModel | None:
        better = self.inner.improved(preparation)
        return better and GuardedModel(better, self._digest, self._running)


class GuardedExecution(BoundExecution):
    """An execution of a model file. One thread runs it at a time."""

    def __init__(self, inner: BoundExecution, digest: bytes, running: RunningFiles) -> None:
        self._inner, self._digest, self._running = inner, digest, running
        self._slot: Slot | None = None  # while it runs
        self._cancelled = FOREVER  # since when
        self.native, self.is_infallible, self.is_static = inner.native, inner.is_infallible, inner.is_static

    @property
    def shapes(self) -> Sequence[tuple[tuple[int, ...], bool]]:  # type: ignore[override]
        return self._inner.shapes

    @property
    def copied_bytes(self) -> int:  # type: ignore[override]
        return self._inner.copied_bytes

    @property
    def checked_bytes(self) -> int:  # type: ignore[override]
        return self._inner.checked_bytes

    def run(self) -> None:
        running, slot = self._running, self._running.slot()
        if slot is None:
            self._inner.run()
            return
        slot.begin(self._digest)
        self._slot = slot
        end = min(self._cancelled, lib.burst_due())
        if end != FOREVER:
            running.watch(self, slot, end)
        try:
            self._inner.run()
        finally:
            self._slot = None
            slot.end()
            running.unwatch(self)

    def failure(self, status: ErrorStatus) -> Exception:
        return self._inner.failure(status)

    def cancel(self) -> None:
        self._cancelled = min(self._cancelled, time.monotonic_ns())
        self._inner.cancel()
        if (slot := self._slot) is not None:
            self._running.watch(self, slot, self._cancelled)
            if self._slot is None:  # it ended meanwhile
                self._running.unwatch(self)
