"""MessageQueue and its two ends. The protocol is csrc/README.md; here are Python's manners on top of it."""

from __future__ import annotations

import contextlib
import errno
import math
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from fmq._core import ffi, lib
from fmq.descriptor import Descriptor, Flavour, Geometry, geometry
from fmq.errors import Closed, Timeout, raise_errno
from fmq.life import Watch
from fmq.region import Kind, Region
from fmq.role import LIFE_AT, READER, WRITER, Role

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, DTypeLike, NDArray

PAGE = 4096  # the control page of csrc/layout.h
_POSITION_AT = {WRITER: 128, READER: 256}  # csrc/layout.h
FOREVER = 2**64 - 1
DEFAULT_SPIN = 50e-6  # seconds
_RETRY = (-errno.EINTR,)


def deadline_of(timeout: float | None) -> int:
    """Absolute CLOCK_MONOTONIC nanoseconds. None waits for ever, 0 does not wait."""
    if timeout is None:
        return FOREVER
    if not timeout >= 0:
        raise ValueError(f"timeout={timeout!r}: seconds from now, 0 or more; None waits for ever")
    return 0 if timeout == 0 else min(FOREVER, lib.fmq_now() + math.ceil(min(timeout, 1e9) * 1e9))


class MessageQueue:
    """An atomic circular FIFO in shared memory: one writer, one reader, in any two processes.

    Elements are a numpy dtype of a fixed size. Transfers are all or nothing: n elements become visible at once.
    """

    def __init__(self, region: Region, shape: Geometry) -> None:
        """Use `create` or `open`."""
        self._region, self._geometry = region, shape

    @classmethod
    def create(
        cls,
        dtype: DTypeLike,
        capacity: int,
        flavour: Flavour = Flavour.SYNCHRONIZED,
        name: str | None = None,
        memory: Kind = "memfd",
    ) -> MessageQueue:
        """A new empty queue of `capacity` elements.

        With a name ("/like-this") other programs can open it, and it stays until `fmq.unlink`, whoever dies.
        Raises FileExistsError, NoSpace, and ValueError for a dtype with objects or an impossible capacity.
        """
        shape = geometry(dtype, capacity, flavour)
        return cls(Region.create(shape.nbytes, memory, name, shape.format), shape)

    @classmethod
    def open(cls, what: Descriptor | str) -> MessageQueue:
        """The queue of a descriptor, or of a name. Raises InvalidDescriptor, FileNotFoundError."""
        region = Region.open(what) if isinstance(what, str) else what.region()
        return cls(region, Geometry.read(region))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of one element."""
        return self._geometry.dtype

    @property
    def capacity(self) -> int:
        """In elements."""
        return self._geometry.capacity

    @property
    def name(self) -> str | None:
        """For queues with a name."""
        return self._region.name

    @property
    def descriptor(self) -> Descriptor:
        """For another process; see Descriptor. Borrows this queue's file descriptor."""
        g, region = self._geometry, self._region
        if region.name is not None:
            return Descriptor(g.dtype, g.capacity, g.flavour, sealed=False, name=region.name)
        return Descriptor(g.dtype, g.capacity, g.flavour, sealed=region.sealed, fd=region.fd)

    def writer(self) -> MessageQueueWriter:
        """Takes the writer's role. Raises RoleTaken while another writer lives."""
        return MessageQueueWriter(self._region, self._geometry)

    def reader(self) -> MessageQueueReader:
        """Takes the reader's role. Raises RoleTaken while another reader lives."""
        return MessageQueueReader(self._region, self._geometry)

    def close(self) -> None:
        """Gives the file descriptor back; ends that were taken go on."""
        self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Span:
    """Elements in place in the ring: `first` up to the wrap point, `second` from its start (often empty).

    Valid inside its `with` block only: afterwards the memory belongs to the other side.
    """

    __slots__ = ("first", "second")

    def __init__(self, first: NDArray[Any], second: NDArray[Any]) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __setitem__(self, key: slice, values: ArrayLike) -> None:
        """`span[:] = values`, where values broadcast to the whole length."""
        if key != slice(None):
            raise IndexError(f"span[{key}]: only span[:] crosses the wrap point; index .first and .second")
        whole = np.broadcast_to(np.asarray(values, self.first.dtype), (len(self),))
        self.first[:], self.second[:] = whole[: len(self.first)], whole[len(self.first) :]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy, in order."""
        if copy is False:
            raise ValueError("copy=False: a span may have two parts; use .first and .second")
        return np.concatenate((self.first, self.second)).astype(dtype or self.first.dtype, copy=False)


class _End:
    """What both ends share. One thread at a time; a second one gets Busy."""

    _which: int

    def __init__(self, region: Region, shape: Geometry) -> None:
        self._role = Role(region.fd, self._which)
        self._region = region
        self._dtype, self._capacity = shape.dtype, shape.capacity
        self._ring = region.asarray(shape.dtype, shape.capacity, PAGE)
        handle = ffi.new("fmq_end **")
        if code := lib.fmq_open(region.base, region.nbytes, self._which, handle):
            self._role.release()
            raise_errno(code, "cannot take the role")
        self._end = ffi.gc(handle[0], lib.fmq_free)
        # The peer could have changed the memory since `shape` was read; our buffers are of that shape.
        if code := lib.fmq_check(self._end, shape.capacity, shape.dtype.itemsize):
            self._role.release()
            raise_errno(code, "cannot take the role")
        self._spans = ffi.new("fmq_spans *")
        self.spin = DEFAULT_SPIN
        self._finalizer = weakref.finalize(self, self._role.release)

    @property
    def spin(self) -> float:
        """Seconds that a wait polls before it sleeps; 0 sleeps at once."""
        return self._spin / 1e9

    @spin.setter
    def spin(self, seconds: float) -> None:
        if not 0 <= seconds <= 10:
            raise ValueError(f"spin={seconds!r}: seconds from 0 to 10")
        self._spin = int(seconds * 1e9)

    @property
    def capacity(self) -> int:
        """Of the queue, in elements."""
        return self._capacity

    @property
    def available(self) -> int:
        """Elements that can be read (reader) or places that can be written (writer) without waiting."""
        n: int = lib.fmq_available(self._usable())
        if n < 0:
            raise_errno(n, "available")
        return n

    @property
    def position(self) -> int:
        """Elements that this end, and those who had its role before, have transferred in the queue's life."""
        return int(self._region.asarray(np.uint64, 1, _POSITION_AT[self._which])[0])

    @property
    def peer(self) -> str:
        """The other side, as the kernel tells it: "nobody" came yet, "alive", "released" or "dead"."""
        return ("nobody", "alive", "released", "dead")[lib.fmq_peer(self._usable())]

    def watch(self, sock: socket.socket) -> Watch:
        """Shuts `sock` down when the peer dies, so that a wait on it ends as promptly as one on this queue."""
        return Watch(self._region, LIFE_AT[WRITER if self._which == READER else READER], sock)

    def close(self) -> None:
        """Ends a call in progress in another thread, drops an open reservation, tells the peer, and frees the role."""
        lib.fmq_stop(self._end)
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _usable(self) -> Any:
        if self._role.is_held:
            return self._end
        raise Closed("this end is closed, or was opened before a fork; open the queue again in this process")

    def _count(self, n: int) -> int:
        if 0 <= n <= self._capacity:
            return n
        raise ValueError(f"n={n}: the queue's capacity is {self._capacity} elements; make a larger queue or use parts")

    def _transfer(self, what: str, function: Any, pointer: Any, n: int, timeout: float | None) -> None:
        end, deadline, spin = self._usable(), deadline_of(timeout), self._spin
        while (code := function(end, pointer, n, spin, deadline)) in _RETRY:
            pass  # a signal's Python handler ran between the two calls
        if code:
            raise_errno(code, what)

    @contextlib.contextmanager
    def _transaction(self, what: str, n: int, timeout: float | None) -> Iterator[Span]:
        end, spans, spin, deadline = self._usable(), self._spans, self._spin, deadline_of(timeout)
        while (code := lib.fmq_reserve(end, self._count(n), spans, spin, deadline)) in _RETRY:
            pass
        if code:
            raise_errno(code, what)
        start = spans.start
        try:
            yield Span(self._ring[start : start + spans.first], self._ring[: spans.second])
        except BaseException:
            lib.fmq_commit(end, 0)
            raise
        if code := lib.fmq_commit(end, n):
            raise_errno(code, what)


class MessageQueueWriter(_End):
    """The writing end."""

    _which = WRITER

    def write(self, elements: ArrayLike, timeout: float | None = None) -> None:
        """Writes all elements or none, waiting for room. Raises Timeout, Closed, PeerDied, Corrupt, ValueError."""
        array = np.ascontiguousarray(elements, self._dtype).reshape(-1)
        self._transfer("write", lib.fmq_write, ffi.from_buffer(array.view(np.uint8)), self._count(len(array)), timeout)

    def try_write(self, elements: ArrayLike) -> bool:
        """Writes all elements if there is room for them now."""
        try:
            self.write(elements, 0)
        except Timeout:
            return False
        return True

    def reserve(self, n: int, timeout: float | None = None) -> contextlib.AbstractContextManager[Span]:
        """`with w.reserve(n) as span:` writes in place; visible at once at the end, not at all if the block raises."""
        return self._transaction("reserve", n, timeout)


class MessageQueueReader(_End):
    """The reading end."""

    _which = READER

    def read(self, n: int, timeout: float | None = None) -> NDArray[Any]:
        """Takes n elements, waiting for them. Raises Timeout, Closed, PeerDied, Corrupt, ValueError."""
        out = np.empty(self._count(n) * self._dtype.itemsize, np.uint8)
        self._transfer("read", lib.fmq_read, ffi.from_buffer(out), n, timeout)
        return out.view(self._dtype)

    def try_read(self, n: int) -> NDArray[Any] | None:
        """n elements if they are there now."""
        try:
            return self.read(n, 0)
        except Timeout:
            return None

    def peek(self, n: int, timeout: float | None = None) -> contextlib.AbstractContextManager[Span]:
        """`with r.peek(n) as span:` reads in place; taken at the end of the block, left there if it raises."""
        return self._transaction("peek", n, timeout)


class Exchange:
    """One message each way in one C call: how a burst speaks. One thread at a time; a second one gets Busy."""

    __slots__ = ("_arguments", "_back", "_buffer", "_element", "_out", "_size")

    def __init__(self, out: MessageQueueWriter, back: MessageQueueReader) -> None:
        self._out, self._back = out._end, back
        self._size, self._element = back._dtype.itemsize, out._dtype.itemsize
        self._buffer = ffi.new("char[]", back.capacity * self._size)
        self._arguments = back._end, self._buffer, back.capacity

    def __call__(self, packet: bytes, deadline: int = FOREVER) -> bytes:
        """Sends `packet` (b"": nothing) and returns the next message. `deadline`: absolute CLOCK_MONOTONIC ns.

        Raises BufferError when the packet does not fit: then nothing was sent. Timeout: it was sent.
        """
        n, spin = len(packet) // self._element, self._back._spin
        got = _exchange(self._out, packet, n, *self._arguments, spin, deadline)
        while got in _RETRY:
            got = _exchange(self._out, b"", 0, *self._arguments, spin, deadline)
        if got < 0:
            _refuse_exchange(got, n)
        received: bytes = _unpack(self._buffer, got * self._size)
        return received


_exchange, _unpack = lib.fmq_exchange, ffi.unpack


def _refuse_exchange(code: int, n: int) -> NoReturn:
    if code in (-errno.EAGAIN, -errno.EMSGSIZE):
        raise BufferError(f"a packet of {n} elements does not fit into the channel")
    raise_errno(code, "exchange")
