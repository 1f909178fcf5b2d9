"""Where the time of each request went: both sides of a burst always write their times into one shared memory.

They are plain stores (csrc/burst/trace.h), a few nanoseconds each. Any process that has the memory may read them at any
time and disturbs neither side. The last 256 requests are there one by one; of earlier ones only the totals.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from burst import timeline
from burst._core import ffi, lib
from burst.errors import Malformed
from burst.memory import Memory
from burst.messages import PHASES, Cause
from burst.timeline import Sides
from fmq.printable import printable
from fmq.process_bound import ProcessBound
from fmq.region import guard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

STAGES: Final = ("encode", "queue", "wake", "bind", "execute", "return")
"""The stages of one request, in this order.

encode: until the request was in the queue, with the copying of arrays. queue: while the device served earlier requests.
wake: until the listener had it. bind: until it was recognised, or checked and bound, and admitted. execute: until its
result was there. return: until the client had that.
"""
_UNKNOWN = 2**64 - 1  # ns
_MAGIC = 0x4543415254535242  # the bytes "BRSTRACE"
_VERSION = 2
_FOUR = struct.Struct("=4Q")  # of burst_sent and burst_served
_SENT, _SERVED = ffi.offsetof("burst_trace", "sent"), ffi.offsetof("burst_trace", "served")
_LEAST = ffi.offsetof("burst_trace", "worked")
_ONE, _EIGHT = struct.Struct("=Q"), struct.Struct("=8Q")  # of burst_worked
_WORKED = np.dtype([(name, "u8") for name in ("id", "in", "in_end", "work", "work_end", "out", "out_end", "reserved")])
_RECORD = np.dtype([(name, "u8") for name in ("id", "begin", "sent", "taken", "started", "done", "received")])


class Trace(ProcessBound):
    """The times and counts of one burst, in a memory of `Trace.nbytes` bytes."""

    to_send = "send its `memory`"

    nbytes: Final = ffi.sizeof("burst_trace")

    def __init__(self, memory: Memory) -> None:
        """Begin on memory that a peer may have made. Raise Malformed when it is too small."""
        if memory.nbytes < _LEAST:
            raise Malformed(f"a trace of {memory.nbytes} bytes; {_LEAST} are needed")
        self.memory = memory
        self.works_until = 0.0  #: time.monotonic() until which its works are wanted
        self.page = ffi.cast("burst_trace *", memory.base)

    @classmethod
    def create(cls) -> Trace:
        """Return a trace in new memory."""
        trace = cls(Memory.create(cls.nbytes))
        trace.page.version, trace.page.records, trace.page.magic = _VERSION, lib.BURST_RECORDS, _MAGIC
        return trace

    @classmethod
    def nbytes_in(cls, fd: int) -> int:
        """Return how much to map of a trace; a peer may have made it before it had all of its parts. Raise OSError."""
        return cls.nbytes if os.fstat(fd).st_size >= cls.nbytes else int(_LEAST)

    def describe(self, model: str, depth: int) -> None:
        """Note what the burst runs, and how many requests may be in flight. The client calls it."""
        self.page.model = model.encode()[: ffi.sizeof(self.page.model) - 1].decode(errors="ignore").encode()
        self.page.client.depth = depth

    @property
    def model(self) -> str:
        """The model's description, cleaned of unprintable characters: the client can write anything there."""
        return _text(self.page.model)

    def note_application(self, name: str) -> None:
        """Note whose the burst is. The device calls it. Keeps the end of a name that is too long."""
        self.page.application = name.encode()[1 - ffi.sizeof(self.page.application) :]

    @property
    def application(self) -> str:
        """The name of the client's application, cleaned as `model`; "" for none but its account."""
        return _text(self.page.application)

    def note(self, number: int, times: Sequence[int]) -> None:
        """Note one request of a client that executes its requests itself; `times`: as `records` has them.

        `number`: from 1 on. Readers in other threads drop a record that they see half written.
        """
        begin, sent, taken, started, done, received = times
        at = _FOUR.size * (number % lib.BURST_RECORDS)
        _FOUR.pack_into(self._bytes, _SENT + at, number, begin, sent, received)
        _FOUR.pack_into(self._bytes, _SERVED + at, number, taken, started, done)

    def note_work(self, number: int, times: Sequence[int]) -> None:
        """Note when the accelerator copied in, computed and copied out for that request: from and to for each, ns of
        CLOCK_MONOTONIC, or twice 0. The device calls it, at any time after the answer too, one thread at a time.
        """
        if self.memory.nbytes >= self.nbytes:
            at = _LEAST + _EIGHT.size * (number % lib.BURST_RECORDS)
            _EIGHT.pack_into(self._bytes, at, 0, *times, 0)
            _ONE.pack_into(self._bytes, at, number)

    def works(self) -> NDArray[Any]:
        """Return what `note_work` has noted of the last requests, ordered by id; empty where the device
        notes nothing.
        """
        if self.memory.nbytes < self.nbytes:
            return np.empty(0, _WORKED)
        there: NDArray[Any] = self.memory.asarray(np.uint64, (lib.BURST_RECORDS, 8), _LEAST)
        found, again = there.copy(), there.copy()
        whole = (found[:, 0] != 0) & (found == again).all(axis=1)  # drops those that were being written while we copied
        for begin in (1, 3, 5):
            whole &= found[:, begin] <= found[:, begin + 1]
        return np.sort(found.view(_WORKED)[:, 0][whole], order="id")

    @cached_property
    def _bytes(self) -> memoryview:
        return self.memory.asarray().data

    def records(self) -> NDArray[Any]:
        """Return the last requests whose results have come, oldest first: id, and ns of CLOCK_MONOTONIC for
        each step.
        """
        sent, served = (
            self.memory.asarray(np.uint64, (lib.BURST_RECORDS, 4), ffi.offsetof("burst_trace", name)).copy()
            for name in ("sent", "served")
        )
        found = np.empty(lib.BURST_RECORDS, _RECORD)
        for side, names in ((sent, ("id", "begin", "sent", "received")), (served, ("", "taken", "started", "done"))):
            for column, name in enumerate(names):
                if name:
                    found[name] = side[:, column]
        steps = [found[name].astype(np.int64) for name in ("begin", "sent", "taken", "started", "done", "received")]
        whole = (sent[:, 0] != 0) & (sent[:, 0] == served[:, 0])
        for earlier, later in pairwise(steps):
            whole &= earlier <= later  # drops records that were being written while we copied
        return np.sort(found[whole], order="id")

    def stages(self, records: NDArray[Any] | None = None) -> dict[str, NDArray[np.int64]]:
        """Return the nanoseconds that each of the last requests, or of `records`, spent in each of `STAGES`, and in
        "total".
        """
        r = {name: c.astype(np.int64) for name, c in _columns(self.records() if records is None else records).items()}
        free = np.minimum(np.maximum(r["sent"], np.concatenate([[0], r["done"][:-1]])), r["taken"])
        marks = (r["begin"], r["sent"], free, r["taken"], r["started"], r["done"], r["received"])
        stages = {name: b - a for name, a, b in zip(STAGES, marks[:-1], marks[1:], strict=True)}
        return stages | {"total": r["received"] - r["begin"]}

    def note_failure(self, number: int, status: int, text: str, cause: Cause) -> None:
        """Note why a request failed. The device calls it before it answers; a longer text is cut."""
        record = self.page.failures[number % lib.BURST_FAILURES]
        record.id = 0
        raw = text.encode()[: ffi.sizeof(record.text)].decode(errors="ignore").encode()
        ffi.memmove(record.text, raw, len(raw))
        record.status, record.nbytes = status, len(raw)
        record.phase = 1 + PHASES.index(cause.phase) if cause.phase else 0
        record.late_by, record.retry_after = _as_ns(cause.late_by), _as_ns(cause.retry_after)
        record.id = number

    def note_joined(self, number: int, count: int) -> None:
        """Note that so many requests were one run, that one among them. The device calls it before it answers."""
        record = self.page.failures[number % lib.BURST_FAILURES]
        record.id = 0
        record.status, record.nbytes, record.phase, record.late_by = 0, 0, 0, count
        record.id = number

    def joined(self, number: int) -> int:
        """Return how many requests were one run, that one among them."""
        record = self.page.failures[number % lib.BURST_FAILURES]
        return int(record.late_by) if (record.id, record.status) == (number, 0) else 1

    def failure(self, number: int, status: int) -> tuple[str, Cause] | None:
        """Say why that request got that status; None where the device says nothing. It can write anything."""
        record = self.page.failures[number % lib.BURST_FAILURES]
        nbytes, phase = int(record.nbytes), int(record.phase)
        if (record.id, record.status) != (number, status) or nbytes > ffi.sizeof(record.text) or phase > len(PHASES):
            return None
        text = ffi.buffer(record.text, nbytes)[:].decode(errors="replace")
        times = _as_seconds(record.late_by), _as_seconds(record.retry_after)
        return printable(text), Cause(PHASES[phase - 1] if phase else None, *times)

    def sides(self, first_lane: int = 0) -> Sides:
        """Return where to draw this burst in a timeline."""
        client, device = self.page.client, self.page.device
        return Sides(int(client.pid), int(device.pid), int(device.tid), first_lane)

    def chrome_events(self, name: str, first_lane: int = 0) -> list[dict[str, Any]]:
        """Return the last requests as events of the Trace Event format (burst/timeline.py)."""
        records, sides = self.records(), self.sides(first_lane)
        both = ((sides.client, "client"), (sides.device, "device"))
        labels = [timeline.label("process_name", pid, 0, f"{name}, {side}") for pid, side in both]
        drawn = timeline.requests(name, sides, records, self.stages(records))
        return [*labels, *drawn, *timeline.works(name, sides, self.works())]


def _text(field: Any) -> str:
    raw: bytes = ffi.buffer(field)[:].partition(b"\0")[0]
    return printable(raw.decode(errors="replace"))


@contextmanager
def blamed(trace: Trace | None) -> Iterator[None]:
    """Note a crash of this thread inside the block in the trace, if there is one."""
    lib.burst_blame_on(trace.page if trace else ffi.NULL)
    try:
        yield
    finally:
        lib.burst_blame_on(ffi.NULL)


def note_crashes() -> None:
    """Make this process note a fatal signal in a listener in the trace of its burst before it dies."""
    if code := lib.burst_blame():
        raise OSError(-code, f"cannot handle fatal signals: {os.strerror(-code)}")
    guard()  # after that, and so called first: memory that a client truncated is no crash


def _as_ns(seconds: float | None) -> int:
    return _UNKNOWN if seconds is None else min(_UNKNOWN, max(0, int(seconds * 1e9)))


def _as_seconds(ns: int) -> float | None:
    return None if ns == _UNKNOWN else ns / 1e9


def _columns(records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {name: records[name] for name in _RECORD.names or ()}
