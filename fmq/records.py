"""Messages of any length on a queue of bytes: `RecordWriter` and `RecordReader`, for both flavours that lose nothing.

A record is sent in parts, each of which becomes visible at once. A reader that joins a broadcast queue begins with the
next record. A record whose writer died, or gave up by its timeout, before the last part is not delivered.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from sys import getrefcount
from typing import TYPE_CHECKING, Any, cast

from fmq._core import ffi, lib
from fmq.clock import FOREVER, deadline_of
from fmq.errors import Corrupt, FmqError, Timeout, TooLong
from fmq.geometry import Flavour
from fmq.process_bound import ProcessBound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

    from fmq.end import MessageQueueReader, MessageQueueWriter

_HEAD = 16  # bytes before each part; csrc/fmq/record.c
_LEAST = 64  # bytes that a queue of records holds
_FIRST, _LAST = lib.FMQ_FIRST, lib.FMQ_LAST
_WHOLE = _FIRST | _LAST


class RecordWriter(ProcessBound):
    """Sends records. Those that do not fit in half of the queue go in parts of a quarter of it."""

    to_send = "send the queue's descriptor, and take a role of the queue where it arrives"

    def __init__(self, writer: MessageQueueWriter) -> None:
        """Use the writer, and do not close it. Raise ValueError for another queue than one of bytes."""
        _check(writer)
        self._writer = writer

    def send(self, data: Buffer, timeout: float | None = None) -> None:
        """Send the bytes of any object with a C-contiguous buffer. Raise Timeout, Closed, PeerDied.

        After a Timeout none of it is delivered; send it again.
        """
        deadline, source = FOREVER if timeout is None else deadline_of(timeout), ffi.from_buffer(data)
        for at, size, flags in self._parts(len(source)):
            while (code := self._write(source, at, size, flags, deadline=deadline)) == -errno.EINTR:
                pass  # a signal's Python handler ran
            if code:
                self._writer._refuse(code, "send", size + _HEAD)

    async def send_async(self, data: Buffer) -> None:
        """Send as `send` does, for asyncio. None of the record is delivered when the task is cancelled."""
        source = ffi.from_buffer(data)
        for at, size, flags in self._parts(len(source)):
            while code := self._write(source, at, size, flags, deadline=0):
                if code not in (-errno.EAGAIN, -errno.EINTR):
                    self._writer._refuse(code, "send", size + _HEAD)
                await self._writer._until(size + _HEAD)

    def _write(self, source: Any, at: int, size: int, flags: int, deadline: int) -> int:
        writer, total = self._writer, len(source)
        part = ffi.cast("char *", source) + at
        code: int = lib.fmq_part_write(writer.usable(), part, size, total, flags, writer.spin_ns, deadline)
        writer.rearm()
        return code

    def _parts(self, total: int) -> list[tuple[int, int, int]]:
        """Yield where each part begins, its bytes, and its flags."""
        capacity = self._writer.capacity
        if total + _HEAD <= capacity // 2:
            return [(0, total, _FIRST | _LAST)]
        most = max(1, capacity // 4 - _HEAD)
        starts = range(0, total, most)
        return [
            (at, min(most, total - at), (_FIRST if at == 0 else 0) | (_LAST if at + most >= total else 0))
            for at in starts
        ]


class RecordReader(ProcessBound):
    """Receives records."""

    to_send = "send the queue's descriptor, and take a role of the queue where it arrives"

    def __init__(self, reader: MessageQueueReader, most: int = 2**30) -> None:
        """Use the reader, and do not close it. `most`: bytes of the longest record that it accepts."""
        _check(reader)
        if most < 0:
            raise ValueError(f"most={most}: a number of bytes")
        self._reader, self._most = reader, most
        self._part = ffi.new("fmq_part *")
        self._begun: memoryview | None = None  # what parts have come of a record, and
        self._got = 0  # how many bytes that is

    def receive(self, timeout: float | None = None, into: Buffer | None = None) -> bytes | int:
        """Return the next record; or, with `into`, which is writable, the bytes that were put there. Raise Timeout,
        Closed, PeerDied, Evicted, Corrupt, and TooLong for a record of more than `most` bytes, or than `into` has: the
        next call goes on behind it.

        A Timeout loses nothing: give the next call the same `into`.
        """
        deadline = FOREVER if timeout is None else deadline_of(timeout)
        while True:
            self._peek(deadline)
            if (record := self._take(into)) is not None:
                return record

    @contextmanager
    def receive_in_place(self, timeout: float | None = None) -> Iterator[memoryview]:
        """Lend the next record where it lies, without a copy, until the block ends; its writer has no use of that room
        so long. A record that came in parts, or that lies around the end of the ring, is copied. Raise what `receive`
        does, and BufferError when an array or a view still refers to the record at the end: it stays unread.

        Evicted at the end of the block: what was read in it may have been overwritten.
        """
        deadline = FOREVER if timeout is None else deadline_of(timeout)
        while True:
            self._peek(deadline)
            if self._lies_in_one_place(self._part[0]):
                with self._borrowed(self._part[0]) as record:
                    yield record
                return
            if (copy := self._take(None)) is not None:
                with memoryview(cast("bytes", copy)) as record:
                    yield record
                return

    def _lies_in_one_place(self, part: Any) -> bool:
        return part.flags == _WHOLE and not part.second and part.total <= self._most

    @contextmanager
    def _borrowed(self, part: Any) -> Iterator[memoryview]:
        """Lend a part, and take it at the end of the block."""
        self._begun, room = None, ffi.buffer(part.one, part.first)
        references = getrefcount(room)
        try:
            with memoryview(room) as whole, whole.toreadonly() as record:
                yield record
        finally:
            is_kept = getrefcount(room) > references
            self._commit(0 if is_kept else part.taken)
        if is_kept:
            raise BufferError("an array or a view refers to the record: copy what you keep. It stays unread")

    async def receive_async(self, into: Buffer | None = None) -> bytes | int:
        """Receive as `receive` does, for asyncio. Nothing is lost when the task is cancelled."""
        while True:
            try:
                self._peek(0)
            except Timeout:
                await self._reader._until(1)
            else:
                if (record := self._take(into)) is not None:
                    return record

    def _peek(self, deadline: int) -> None:
        """Wait for a part, which stays in the ring until it is committed."""
        reader = self._reader
        while code := lib.fmq_part_peek(reader.usable(), self._part, reader.spin_ns, deadline):
            if code == -errno.EINTR:
                continue  # a signal's Python handler ran
            if code == -errno.EBADMSG:
                raise Corrupt("receive: what was written here is no record; its writer has to be a RecordWriter")
            if code not in (-errno.EAGAIN, -errno.ETIMEDOUT, -errno.EBUSY):
                self._begun = None  # the rest of it will not come
            reader._refuse(code, "receive", _HEAD)

    def _take(self, into: Buffer | None) -> bytes | int | None:
        """Take the part that was peeked at. None: the record is not over."""
        part, record, error = self._part[0], None, None
        try:
            record = self._joined(part, into)
        except FmqError as refused:
            self._begun, error = None, refused
        except BaseException:
            lib.fmq_commit(self._reader.handle, 0)
            raise
        self._commit(part.taken)
        if error is not None:
            raise error
        return record

    def _commit(self, taken: int) -> None:
        code = lib.fmq_commit(self._reader.handle, taken)
        self._reader.rearm()
        if code:  # evicted: what was read may have been overwritten
            self._begun = None
            self._reader._refuse(code, "receive", taken)

    def _joined(self, part: Any, into: Buffer | None) -> bytes | int | None:
        """Put a part where its record is, which it returns if that is over."""
        if part.flags == _WHOLE and into is None and part.total <= self._most:
            self._begun = None
            whole: bytes = ffi.buffer(part.one, part.first)[:]
            return whole + ffi.buffer(part.two, part.second)[:] if part.second else whole
        if part.flags & _FIRST:
            self._begin(part.total, into)
        if self._begun is None:
            return None  # of a record that began before this reader came, or that was refused
        n = part.first + part.second
        if part.total != len(self._begun) or self._got + n > part.total:
            raise Corrupt(f"receive: a part of {n} bytes does not belong to a record of {len(self._begun)}")
        self._begun[self._got : self._got + part.first] = ffi.buffer(part.one, part.first)
        self._begun[self._got + part.first : self._got + n] = ffi.buffer(part.two, part.second)
        self._got += n
        if not part.flags & _LAST:
            return None
        begun, self._begun = self._begun, None
        if self._got != part.total:
            raise Corrupt(f"receive: a record of {part.total} bytes ended after {self._got}")
        return bytes(begun) if into is None else len(begun)

    def _begin(self, total: int, into: Buffer | None) -> None:
        self._begun, self._got = None, 0
        room = None if into is None else memoryview(into).cast("B")
        if total > self._most:
            raise TooLong(f"a record of {total} bytes; most={self._most}. It was skipped")
        if room is not None and total > len(room):
            raise TooLong(f"a record of {total} bytes; into has {len(room)}. It was skipped")
        self._begun = memoryview(bytearray(total)) if room is None else room[:total]


def _check(end: MessageQueueWriter | MessageQueueReader) -> None:
    if end.dtype != "u1" or end.overwrites:
        flavours = [each.name for each in (Flavour.SYNCHRONIZED, Flavour.BROADCAST)]
        raise ValueError(f"dtype={end.dtype}: records need a queue of bytes ('u1') that is one of {flavours}")
    if end.capacity < _LEAST:
        raise ValueError(f"capacity={end.capacity}: a queue of records holds at least {_LEAST} bytes")
